"""A folder for every generated kernel: what is in it runs, and editing the source changes what is measured."""

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F

import tritium
from support import codegen
from tritium.compat import kernel_benchmark
from tritium.errors import ReportError
from tritium.report import Report, kernel_dump
from tritium.report.kernel_dump.dissection import Dissection, fragment, script
from tritium.report.records import GraphRecord

ONE_BY_ONE = """
import json, os, runpy, sys
for path, *arguments in json.loads(sys.argv[1]):
    os.chdir(os.path.dirname(path))
    sys.argv = [path, *arguments]
    print("ran", path)
    runpy.run_path(path, run_name="__main__")
"""


def run_scripts(*commands: tuple[Path | str, ...]) -> list[str]:
    """Run scripts with their arguments in one process, each in its folder; return what each printed."""
    program = [sys.executable, "-c", ONE_BY_ONE, json.dumps([[str(part) for part in command] for command in commands])]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = re.split(r"^ran .*\n", done.stdout, flags=re.MULTILINE)[1:]
    assert len(printed) == len(commands)
    return printed


def modulated(x, scale, w):
    h = F.layer_norm(x, (48,)) * (1 + scale)
    return F.gelu(h) @ w, h.sum(1), x.transpose(1, 2).contiguous().relu()


def modulated_inputs(dtype=torch.float32):
    return torch.randn(2, 10, 48, dtype=dtype), torch.randn(2, 1, 48, dtype=dtype), torch.randn(48, 32, dtype=dtype)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """The folders of one compiled function with a dynamic dimension, by the operators in their names."""
    folder = tmp_path_factory.mktemp("dumped")
    x, scale, w = modulated_inputs()
    torch._dynamo.mark_dynamic(x, 1)
    with torch.inference_mode():
        compiled = torch.compile(modulated, backend="tritium")
        compiled(x, scale, w)
        written = tritium.explain(compiled).dump(folder)
    assert written
    assert all(path.parent.name.startswith("modulated-") for path in written)
    return written


@pytest.mark.codegen
def test_every_folder_is_whole_and_its_fragment_runs(dumped):
    views = {"aten.reshape", "aten.permute", "aten.transpose", "aten.view"}
    for folder in dumped:
        assert folder.name.startswith("fused_")
        names = {path.name for path in folder.iterdir()}
        assert names == {"fragment.py", "fragment.onnx", "loops.txt", "kernel.cpp", "benchmark.py", "meta.json"}
        meta = json.loads((folder / "meta.json").read_text())
        assert meta["missing"] == {}
        assert meta["bytes_read"] > 0
        assert meta["ideal_bytes"] > 0
        assert "ops.load(" in (folder / "loops.txt").read_text()
        drawn = [node.op_type for node in onnx.load(folder / "fragment.onnx").graph.node]
        assert all(op.startswith(("aten.", "prims.", "operator.")) for op in drawn)
        assert {op.rpartition(".")[0] for op in drawn if op.startswith("aten.")} <= {*meta["operators"], *views}
    assert all(
        "torch.float32 (" in printed for printed in run_scripts(*((folder / "fragment.py",) for folder in dumped))
    )


@pytest.mark.codegen
def test_the_benchmark_measures_the_source_beside_it(dumped, tmp_path):
    """The kernel is edited to wait for milliseconds: the time is that of the edit."""
    folder = next(path for path in dumped if "erf" in path.name)
    edited = shutil.copytree(folder, tmp_path / folder.name)
    source = (edited / "kernel.cpp").read_text()
    body = source.index("{", source.rindex('extern "C"')) + 1
    wait = "for (volatile long i = 0; i < 20000000; ++i);"
    (edited / "kernel.cpp").write_text(source[:body] + wait + source[body:])
    # A short time of it is as good: it is compared with a kernel that waits for none.
    benchmark = (edited / "benchmark.py").read_text()
    assert "\nSECONDS = 0.5\n" in benchmark
    (edited / "benchmark.py").write_text(benchmark.replace("\nSECONDS = 0.5\n", "\nSECONDS = 0.05\n"))
    data, printed = run_scripts((folder / "benchmark.py", "--json"), (edited / "benchmark.py",))
    found = json.loads(data)
    assert found["us"] > 0
    assert found["gb_per_s"] == pytest.approx(found["bytes"] / found["us"] / 1e3)
    assert found["copy_gb_per_s"] > 0.1
    assert found["eager_us"] > 0
    assert float(printed.partition("time        ")[2].split()[0]) > 1_000 + found["us"]
    for word in ("us a launch", "GB/s for", "by a large copy here: the kernel reaches", "one by one"):
        assert word in printed


def test_triton_folders_without_a_gpu(tmp_path):
    """Everything but running: the source is a module with one kernel, and a launch passes what it takes."""
    observer = codegen.generated(modulated, *modulated_inputs(torch.bfloat16), dynamic={0: [1]})
    folders = codegen.folders(observer, tmp_path)
    assert folders
    for folder in folders:
        meta = json.loads((folder / "meta.json").read_text())
        assert meta["missing"] == {}
        assert meta["not_runnable"] is None
        tree = ast.parse((folder / "kernel.py").read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert len(functions) == 1
        taken = [a.arg for a in functions[0].args.args if a.annotation is None]
        assert [argument["parameter"] for argument in meta["arguments"]] == taken
        numels = {a["parameter"]: a["value"] for a in meta["arguments"] if a["kind"] == "number"}
        assert all(value > 0 for value in numels.values())
        assert meta["device"] == "cuda"
        script = folder / "fragment.py"
        text = script.read_text()
        assert "'device': 'cuda:0'" in text
        script.write_text(text.replace("'device': 'cuda:0'", "'device': 'cpu'"))
    run_scripts(*((folder / "fragment.py",) for folder in folders))


def test_arguments_of_unusual_kernels():
    """Scratch memory is an argument too; a function that the kernel calls is not taken for the kernel."""
    settings = {"triton.force_cooperative_reductions": True}
    (kernel,) = codegen.generated(lambda x: x.sum(), torch.randn(1 << 18), **settings).dissection.kernels
    spaces = {a.parameter: a for a in kernel.arguments if a.kind == "workspace"}
    assert {"sem_ptr", "ws_ptr"} <= spaces.keys()
    assert kernel_benchmark.make({**dataclasses.asdict(spaces["ws_ptr"]), "device": "cpu"}).sum() == 0
    (kernel,) = codegen.generated(lambda x: x.cumsum(-1) * 2, torch.randn(64, 96)).dissection.kernels
    assert kernel.source.count("\ndef ") == 2
    assert {"in_ptr0", "xnumel", "r0_numel"} < {argument.parameter for argument in kernel.arguments}


def test_sizes_that_depend_on_data_break_nothing():
    """Inductor has no hint for them: whatever is not known is told, and compiling goes on."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        observer = codegen.generated(lambda x: x[x > 0].exp() + 1, torch.randn(64), device="cpu")
    before, after = observer.dissection.kernels
    assert before.arguments
    assert "is not known before the model runs" in after.not_runnable
    assert "fragment.py" in after.missing
    assert "ops.exp(" in after.loops
    (fallback,) = observer.fallbacks
    assert fallback.op == "aten.index.Tensor"
    assert fallback.has_lowering


@pytest.mark.thorough
@pytest.mark.codegen
def test_equal_kernels_have_equal_folders_in_any_process(tmp_path, in_process):
    """The second process finds the graph compiled: what it writes is what the first one wrote."""
    program = """
import sys, torch, tritium
def f(x): return (x.exp() + 1).sum(-1)
with torch.inference_mode():
    compiled = torch.compile(f, backend="tritium")
    compiled(torch.ones(4, 64))
report = tritium.explain(compiled)
print(report.records[0].kernels_from, *sorted(path.name for path in report.dump({folder!r})))
"""
    first = in_process(program.format(folder=str(tmp_path / "cold")), loaded=True).split()
    second = in_process(program.format(folder=str(tmp_path / "warm")), loaded=True).split()
    assert (first[0], second[0]) == ("codegen", "store")
    assert first[1:] == second[1:]
    for name in ("kernel.cpp", "fragment.py", "loops.txt", "meta.json"):
        cold, warm = (next((tmp_path / which).rglob(name)).read_text() for which in ("cold", "warm"))
        assert cold == warm


def test_a_graph_whose_kernels_are_not_known_says_why(tmp_path):
    lost = Report([GraphRecord("0/0", "f", "inductor", "cpu")])
    with pytest.raises(ReportError, match=r"0/0 \(it was found compiled in Inductor's cache"):
        lost.dump(tmp_path)
    # Engine `eager` generates nothing: there is nothing to miss.
    assert Report([GraphRecord("0/0", "f", "eager", "cpu")]).dump(tmp_path) == []


@pytest.mark.codegen
def test_a_compiler_error_leaves_the_kernels_in_a_folder(tmp_path, monkeypatch):
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def broken(*args, **kwargs):
        raise RuntimeError("the C++ compiler is broken")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", broken)
    config = tritium.CompilationConfig(graph_log_url=str(tmp_path))
    x = torch.randn(3, 37)
    with torch.inference_mode(), pytest.warns(RuntimeWarning, match="graphs and kernels in"):
        compiled = torch.compile(lambda x: x.exp().mul(3.25).sum(-1), backend=tritium.Backend(config))
        torch.testing.assert_close(compiled(x), x.exp().mul(3.25).sum(-1))
    (failure,) = tritium.explain(compiled).failures
    (kernel,) = Path(failure["graphs_at"]).rglob("kernel.cpp")
    assert "exp()" in kernel.read_text()
    assert (kernel.parent / "fragment.py").exists()


@pytest.mark.codegen
def test_torch_compile_debug_writes_them_beside_torch_s_own(tmp_path, in_process, monkeypatch):
    program = """
import torch
with torch.inference_mode():
    torch.compile(lambda x: x.exp() + 1, backend="tritium")(torch.ones(4, 64))
"""
    monkeypatch.chdir(tmp_path)
    in_process(program, env={"TORCH_COMPILE_DEBUG": "1"}, instructions=True)
    (folder,) = tmp_path.glob("torch_compile_debug/run_*/tritium/*/fused_*")
    # Torch's own folder of the same run.
    assert list((folder.parents[2] / "torchinductor").rglob("output_code.py"))
    assert (folder / "benchmark.py").exists()


def test_code_generation_that_fails_half_way_leaves_the_sources(tmp_path):
    dissection = Dissection()
    dissection.source("cpp_fused_add_0", "cpp", "int x;\n")
    (folder,) = kernel_dump.write(tmp_path, dissection.unfinished(), ())
    assert (folder / "kernel.cpp").read_text() == "int x;\n"
    assert "code generation failed" in json.loads((folder / "meta.json").read_text())["not_runnable"]


class TestFragments:
    def captured(self, function, *inputs):
        graph = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*inputs).graph
        return graph, {node.name: node for node in graph.nodes}

    def check(self, part, value, name, expected):
        """The part has one input, and the script computes the expected result from it."""
        (given,) = part.find_nodes(op="placeholder")
        space: dict = {}
        exec(script(part, "k"), space)
        torch.testing.assert_close(space["run"](**{given.name: value})[name], expected)
        return given.name

    def test_views_belong_to_it_and_other_operators_do_not(self):
        graph, nodes = self.captured(lambda x: x.exp().t().sin(), torch.randn(3, 4))
        part, x = fragment(graph, [nodes["sin"]]), torch.randn(3, 4)
        assert self.check(part, x, "sin", x.t().sin()) == "exp"

    def test_one_of_several_results(self):
        graph, nodes = self.captured(lambda x: torch.var_mean(x, 1)[1] * 2, torch.randn(3, 4))
        part, x = fragment(graph, [nodes["var_mean"], nodes["mul"]]), torch.randn(3, 4)
        self.check(part, x, "mul", x.mean(1) * 2)

    def test_values_that_print_as_no_python(self):
        def function(x):
            return torch.full((2,), float("-inf"), device="cpu") + x.clamp(max=float("inf")).double()

        graph, _ = self.captured(function, torch.randn(2))
        calls = [node for node in graph.nodes if node.op == "call_function"]
        x = torch.ones(2)
        self.check(fragment(graph, calls), x, calls[-1].name, function(x))


@pytest.mark.gpu
def test_a_triton_folder_runs(tmp_path):
    inputs = [value.cuda() for value in modulated_inputs(torch.bfloat16)]
    with torch.inference_mode():
        compiled = torch.compile(modulated, backend=tritium.Backend())
        compiled(*inputs)
        folders = tritium.explain(compiled).dump(tmp_path)
    assert folders
    for folder in folders:
        assert (folder / "kernel.py").exists()
        found = json.loads(run_scripts((folder / "benchmark.py", "--json"))[0].splitlines()[-1])
        assert found["us"] > 0
        assert found["eager_us"] > 0
