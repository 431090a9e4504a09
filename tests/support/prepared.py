"""What Inductor does once per process, done on import: processes that are forked afterwards start compiling at once.

Nothing here depends on a program, on its environment or on its cache folder. Import it last.
"""

import contextlib
import gc
import importlib

from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.runtime import triton_compat

# Imported by the first compilation.
MODULES = (
    "torch._dynamo.backends.inductor",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.mps",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.runtime.caching",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.utils.cpp_extension",
)

for name in MODULES:
    # Not every supported torch has all of them.
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

# Half a gigabyte is hashed for cache keys.
codecache.torch_key()
if triton_compat.HAS_TRITON:
    triton_compat.triton_key()
# Compiles and loads a program for each set of this machine's instructions.
cpu_vec_isa.valid_vec_isa_list()

# As in conftest.py: there are a million objects of imported modules, and compilers create little garbage.
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 50, 100)
