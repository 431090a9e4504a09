"""The policy on kernels that Inductor generates: which tilings, which widths, and that they compute the same."""

import functools
import importlib.util
import re

import pytest
import torch
import torch.nn.functional as F

import tritium
from support.interpreter import interpreted
from tiling.generated import generate, generate_pattern, triton_on_cpu
from tiling.patterns import ALL, CUT, TRANSFORMER
from tritium import compat
from tritium.tiling import choose, cost

# Kernels that the cost model cuts further than Inductor does, static or not: their divisions cost more than their bytes.
FURTHER = {
    "pad_nchw": ["1->2"],
    "pad_ncdhw": ["1->2"],
    "pad_group_norm": ["r1", "1", "1->2"],
    "upsample": ["1->2"],
}


def dims(kernels):
    return [f"{'r' if kernel.is_reduction else ''}{kernel.dims}" for kernel in kernels]


def compiled(name, **options):
    """The kernels of a pattern; with the policy if any part of it is given."""
    policy = {part: options.pop(part) for part in ("choose_tiling", "narrow_sizes") if part in options}
    return generate_pattern(name, policy=policy or None, **options)[0]


@functools.cache
def tiled(name, **options):
    """The tilings of a pattern's kernels; generated once."""
    return dims(compiled(name, **options))


# torch 2.11 gives broadcasts a separate dim though they are coalesced without it (pytorch#177117).
OVERTILED = {"pad_group_norm"} if compat.versions.TORCH < (2, 13) else set()


# What the policy changes, and a few of the others.
QUICK = {*CUT, *FURTHER, "patchify", "rope"}
every_pattern = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in sorted(set(ALL) - OVERTILED)],
)


@every_pattern
def test_with_the_proof_dynamic_is_tiled_like_static(name):
    assert tiled(name, choose_tiling=False) == tiled(name, dynamic=False)


@pytest.mark.parametrize("name", CUT)
def test_inductor_alone_since_torch_2_14(name):
    same = tiled(name) == tiled(name, dynamic=False)
    assert same == (compat.versions.TORCH >= compat.tiling.PROVES_PRODUCTS)


@every_pattern
def test_what_the_cost_model_changes(name):
    before, after = tiled(name, choose_tiling=False), tiled(name, choose_tiling=True)
    changes = [one if one == two else f"{one}->{two}" for one, two in zip(before, after, strict=True)]
    assert changes == FURTHER.get(name, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRANSFORMER)
def test_transformer_kernels_keep_their_tiling(name, dtype):
    of_dtype = {} if dtype == torch.float32 else {"dtype": dtype}
    assert tiled(name, **of_dtype, choose_tiling=True) == tiled(name, **of_dtype)


def test_static_kernels_do_not_change_at_all():
    for name in ("pad_ncdhw", "crop_to_nhwc", "rope"):
        plain, tiled = compiled(name, dynamic=False), compiled(name, dynamic=False, choose_tiling=True)
        assert [kernel.source for kernel in plain] == [kernel.source for kernel in tiled]


class TestNarrow:
    @pytest.mark.parametrize("name", ["crop_to_nhwc", "pad_ncdhw", "pad_nhwc", "unpatchify", "qkv_split", "rope"])
    def test_no_index_keeps_64_bits(self, name):
        for kernel in compiled(name, narrow_sizes=True):
            indices = [line for line in kernel.body.splitlines() if re.match(r"\s+[xyz]\d+ =|.*_ptr\d+ \+", line)]
            assert indices
            # They are still passed as 64 bits.
            assert "ks0" not in kernel.signature or "'ks0': 'i64'" in kernel.source
            assert re.findall(r"\bks\d+\b", "\n".join(indices)) == []

    @pytest.mark.parametrize("name", ["crop_to_nhwc", "pad_ncdhw", "patchify"])
    def test_the_machine_code_divides_in_32_bits(self, name, tmp_path, monkeypatch):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        (before,) = compiled(name, choose_tiling=False, narrow_sizes=False)
        (after,) = compiled(name, choose_tiling=False)
        wide, narrow = (wide_divisions(assembly(kernel, tmp_path)) for kernel in (before, after))
        assert wide > narrow
        # In patchify what remains is the same for a whole tile: the maximum of two sizes.
        assert narrow == 0 or name == "patchify"


def wide_divisions(text):
    return len(re.findall(r"(?:div|rem)\.[su]64", text))


def assembly(kernel, folder):
    """PTX for a GPU that need not be there."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file = folder / f"{abs(hash(kernel.source))}.py"
    imports = "import triton\nimport triton.language as tl\n"
    imports += "from torch._inductor.runtime import triton_helpers\n@triton.jit\n"
    file.write_text(imports + kernel.body.replace("Placeholder.KERNEL_NAME", "kernel"))
    spec = importlib.util.spec_from_file_location("kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = dict(re.findall(r"'(\w+)': '([^']+)'", re.search(r"'signature': (\{[^}]*\})", kernel.source)[1]))
    blocks = {name: 32 for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(module.kernel, signature, constexprs=blocks)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_kernels_compute_what_they_should():
    """In Triton's interpreter, with the whole policy, for two shapes of one compiled kernel each."""
    pytest.importorskip("triton")
    names = ["crop_to_nhwc", "pad_nchw", "pad_ncdhw", "upsample"]
    assert interpreted("tiling.interpreted", "check_all", repr(names)) == len(names)


class TestGrids:
    def three_dims(self, x):
        return F.pad(x, (1, 1, 1, 1)) * 2

    def decided(self, x, dynamic, pins):
        with tritium.autofuse.enabled(force_tiling=pins):
            kernels = generate(self.three_dims, [x], {0: dynamic})
            return kernels, tritium.autofuse.decisions()["kernels"]

    def test_three_dims_where_they_fit(self):
        x = torch.randn(8, 32, 48)
        (kernel,), (decision,) = self.decided(x, (1, 2), "triton_poi_fused_constant_pad_nd_mul_0=3d")
        assert kernel.grid == "Grid3D"
        assert (decision["choice"], decision["reason"]) == ("3d", "pinned")

    def test_never_more_blocks_than_can_be_launched(self):
        """65,536 rows need as many blocks along y when a block has one row: refused, though it was asked for."""
        x = torch.empty(8, cost.MOST_BLOCKS, 4)
        (kernel,), (decision,) = self.decided(x, (1, 2), "triton_poi_fused_constant_pad_nd_mul_0=3d")
        assert kernel.grid != "Grid3D"
        assert "y may need more than 65,535 blocks" in decision["reason"]

    def test_larger_sizes_compile_again(self):
        torch._dynamo.reset()
        small, large = torch.empty(8, 32, 48), torch.empty(8, 70_000, 4)
        torch._dynamo.mark_dynamic(small, [1, 2])
        pins = {f"triton_poi_fused_constant_pad_nd_mul_{number}": "3d" for number in (0, 1)}
        with tritium.autofuse.enabled(force_tiling=pins), triton_on_cpu() as kernels, torch.no_grad():
            function = torch.compile(self.three_dims, fullgraph=True)
            for x in (small, torch.empty(8, 40, 50), large):
                with pytest.raises(Exception, match="there is no code behind this"):
                    function(x)
        assert [kernel.grid == "Grid3D" for kernel in kernels] == [True, False]

    def test_a_pinned_reduction_keeps_its_tiling(self):
        with tritium.autofuse.enabled(force_tiling="triton_red_fused_sum_0=3d"):
            (kernel,) = generate(lambda x: x.sum(1), [torch.randn(8, 32, 48)], {0: (1, 2)})
            (decision,) = tritium.autofuse.decisions()["kernels"]
        assert kernel.dims < 3
        assert "a reduction keeps the tiling" in decision["reason"]

    @pytest.mark.skipif(
        compat.versions.TORCH < choose.REDUCTIONS_IN_3D_MISCOMPILE, reason="they are right on this torch"
    )
    def test_settings_cannot_miscompile_a_reduction(self):
        settings = {"triton.prefer_nd_tiling": True, "triton.max_tiles": 3, "triton.tile_reductions": True}
        x = torch.randn(4, 6, 32, 10, 48)

        def reduce(x):
            return x.permute(0, 2, 4, 1, 3).sum(-1)

        plain = generate(reduce, [x], {0: (2, 4)}, settings=settings)
        with tritium.autofuse.enabled():
            kept = generate(reduce, [x], {0: (2, 4)}, settings=settings)
        assert max(kernel.dims for kernel in plain if kernel.is_reduction) == 3
        assert max(kernel.dims for kernel in kept if kernel.is_reduction) < 3
