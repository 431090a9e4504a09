"""docs/what-fuses.md, statement by statement: the rows of its tables are generated and counted."""

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from support import codegen
from tritium import compat

PAGE = (Path(__file__).parents[2] / "docs" / "what-fuses.md").read_text(encoding="utf-8")

SHAPES = {
    "x": (2, 64, 96),
    "y": (2, 64, 96),
    "z": (2, 16, 96),
    "s": (2, 1, 96),
    "w": (96,),
    "m": (96, 96),
    "e": (100, 96),
    "v": (2, 64, 32, 32),
    "c": (64,),
}


def inputs(dtype=torch.float32):
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()} | {"i": torch.randint(64, (2, 32))}


def rows(heading):
    """The rows of the table under a heading: class, code, kernels on a GPU, the last column."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [(kind, code.strip("`"), int(count), last) for kind, code, count, last in cells[2:]]


def function_of(code, given):
    """The row's code as a function of the tensors it names, and those tensors."""
    names = [name for name in given if re.search(rf"\b{name}\b(?!\()", code)]
    function = eval(f"lambda {', '.join(names)}: {code}", {"torch": torch, "F": F})
    return function, [given[name] for name in names]


@functools.cache
def on_a_gpu(code):
    """What is generated for a row in float32; once for all tests."""
    function, given = function_of(code, inputs())
    return codegen.generated(function, *given)


def size(values):
    values = values if isinstance(values, tuple) else (values,)
    return sum(value.numel() * value.element_size() for value in values)


FUSES = rows("Classes that fuse")
APART = rows("What does not fuse, and the reason in the report")


def test_the_page_shows_every_class_of_operator():
    assert {kind for kind, *_ in FUSES} == {
        "elementwise",
        "broadcast",
        "reduce",
        "transpose",
        "slice",
        "concat",
        "gather",
    }
    assert len(APART) == 4


@pytest.mark.parametrize(("kind", "code", "count", "also"), FUSES, ids=[code for _, code, *_ in FUSES])
class TestClasses:
    def test_on_a_gpu_nothing_but_inputs_and_outputs_moves(self, kind, code, count, also):
        function, given = function_of(code, inputs())
        observer = on_a_gpu(code)
        assert len(codegen.launches(observer)) == count == 1
        (kernel,) = observer.kernels
        assert kernel.bytes_written == size(function(*given))
        assert kernel.bytes_read <= size(tuple(given))
        assert observer.fallbacks == []

    def test_on_a_cpu(self, kind, code, count, also):
        function, given = function_of(code, inputs())
        observer = codegen.generated(function, *given, device="cpu")
        result = size(function(*given))
        between = sum(kernel.bytes_written for kernel in observer.kernels) - result
        assert observer.fallbacks == []
        if also == "nothing":
            assert between == 0
        elif also == "a value for each row":
            assert 0 < between < 0.05 * result
        else:
            assert also == "a whole tensor"
            assert between >= 0.9 * result

    @pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)])
    def test_it_computes_in_fp32_and_rounds_at_stores(self, kind, code, count, also, dtype):
        function, given = function_of(code, inputs(dtype))
        observer = codegen.generated(function, *given)
        (source,) = codegen.sources(observer)
        pointers = dict(re.findall(r"'(\w+ptr\d*)': '\*(\w+)'", source))
        narrow = {name for name, of in pointers.items() if of in ("bf16", "fp16")}
        loads = re.findall(r"tl\.load\((\w+ptr\d+).*", source)
        assert narrow & set(loads)
        for line in source.splitlines():
            load = re.search(r"tl\.load\((\w+ptr\d+)", line)
            if load and load[1] in narrow:
                assert line.endswith(".to(tl.float32)")
        # The store converts: nothing is rounded before it.
        assert ".to(tl.bfloat16)" not in source
        assert ".to(tl.float16)" not in source


# Lengths that the code itself names are no dynamic ones.
OF_ANY_LENGTH = [code for _, code, *_ in FUSES if "view(2, 64" not in code and "x[:, 8:40]" not in code]


def test_two_rows_fix_their_length():
    assert len(OF_ANY_LENGTH) == len(FUSES) - 2


@pytest.mark.parametrize("code", OF_ANY_LENGTH)
def test_with_a_dynamic_dimension(code):
    function, given = function_of(code, inputs())
    dynamic = {index: [1] for index, value in enumerate(given) if value.dim() == 3 and value.shape[1] > 1}
    dynamic |= {index: [1] for index, value in enumerate(given) if value.dtype == torch.int64}
    observer = codegen.generated(function, *given, dynamic=dynamic)
    assert len(codegen.launches(observer)) == 1
    (source,) = codegen.sources(observer)
    assert not re.search(r"^    xnumel = \d+$", source, re.MULTILINE)
    (fixed,) = codegen.sources(on_a_gpu(code))
    assert re.search(r"^    xnumel = \d+$", fixed, re.MULTILINE)


@pytest.mark.parametrize(("case", "code", "count", "reason"), APART, ids=[case for case, *_ in APART])
def test_what_stays_apart(case, code, count, reason):
    function, given = function_of(code, inputs())
    observer = codegen.generated(function, *given)
    assert len(codegen.launches(observer)) == count
    words = re.findall(r"`([^`]+)`", reason)[0]
    if count == 1:
        assert words in {kernel.ops[0] for kernel in observer.kernels if kernel.kind == "library"}
    else:
        assert words in {pair.reason for pair in observer.not_fused_pairs}


def test_inductor_s_setting_puts_the_roundings_back():
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    (plain,) = codegen.sources(codegen.generated(lambda x: (x * 3 + 1) * x, x))
    (emulated,) = codegen.sources(codegen.generated(lambda x: (x * 3 + 1) * x, x, emulate_precision_casts=True))
    assert ".to(tl.bfloat16)" not in plain
    assert emulated.count(".to(tl.bfloat16)") >= 2


def test_a_reduction_over_a_dynamic_dimension_is_a_loop():
    x = torch.randn(64, 96)
    (fixed,) = codegen.launches(codegen.generated(lambda x: x.softmax(-1), x))
    (dynamic,) = codegen.launches(codegen.generated(lambda x: x.softmax(-1), x, dynamic={0: [1]}))
    assert fixed.startswith("triton_per_")
    assert dynamic.startswith("triton_red_")


@pytest.mark.codegen
def test_a_chain_is_rounded_once():
    """Bit-equal to the chain in fp32 with one rounding; eager, which rounds three times, is not."""

    def chain(x, added=0.3):
        return (x * 1.1 + added) * x

    x = torch.randn(64, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        actual = torch.compile(chain, backend="tritium")(x)
    # Since torch 2.14 Inductor rounds scalars of additions to the tensor's dtype on a CPU, as eager does there.
    added = 0.3 if compat.versions.TORCH < (2, 14) else torch.tensor(0.3, dtype=x.dtype).item()
    assert torch.equal(actual, chain(x.float(), added).bfloat16())
    assert not torch.equal(chain(x), chain(x.float(), added).bfloat16())


def test_the_files_on_the_page_are_those_that_are_written(tmp_path):
    written = codegen.folders(codegen.generated(lambda x: x.exp() + 1, torch.randn(64)), tmp_path)
    written += codegen.folders(codegen.generated(lambda x: x.exp() + 1, torch.randn(64), device="cpu"), tmp_path)
    found = {path.name for folder in written for path in folder.iterdir()}
    section = PAGE.partition("## Looking at one kernel\n")[2].partition("\n## ")[0]
    told = [
        name
        for line in section.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([\w.]+)`", line.split("|")[1])
    ]
    assert set(told) == found
