"""On a real GPU: owned kernels inside compiled models, modes, streams of shapes. Run with -m gpu."""

import json

import pytest
import torch

import tritium
from support.fidelity import assert_no_worse
from support.small_models import Block, Stack, block_inputs, flux, flux_inputs
from tritium import quality, tuning
from tritium.compiler.compile import compile_pinned
from tritium.tuning import Key, compare

pytestmark = pytest.mark.gpu


def on_gpu(inputs: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


OWNED = ("linear_gelu", "cat_linear", "qk_norm_rope", "residual_norm_modulate")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("provider", ["inductor", "triton", "aten", "reference"])
def test_flux_with_and_without_owned_kernels(dtype, provider):
    model, inputs = flux().to("cuda", dtype), on_gpu(flux_inputs(dtype=dtype))
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    config = tritium.CompilationConfig(force_provider=provider)
    with torch.inference_mode():
        eager = model(**inputs)[0]
        compiled = torch.compile(model, backend=tritium.Backend(config), fullgraph=True)
        actual = compiled(**inputs)[0]
        exact = flux().double().cuda()
        exact.load_state_dict(model.state_dict())
        assert_no_worse(actual, eager, exact(**wide)[0])
    report = tritium.explain(compiled)
    counts = report.sites["rms_norm"], report.sites["rope"]
    taken = provider in ("triton", "reference")
    assert [site.fused if taken else site.inductor for site in counts] == [6, 4]
    recognised = {family: report.sites[family].recognised for family in ("adalayernorm", "gelu", "cat_linear")}
    assert recognised == {"adalayernorm": 6, "gelu": 3, "cat_linear": 2 if dtype == torch.float32 else 1}
    assert report.kernels
    assert not report.failures
    assert report.device["type"] == "cuda"
    # Generated code launches kernels and products itself: none of our operators is called.
    called = {entry["op"] for entry in report.fallbacks if entry["op"].startswith("tritium.")}
    assert provider == "reference" or called == set()
    owned = {family for family in OWNED if report.sites[family].fused}
    expected = {"aten": {"linear_gelu", "cat_linear"}, "triton": {"qk_norm_rope", "residual_norm_modulate"}}
    assert provider == "reference" or owned == expected.get(provider, set())


def test_tuning_measures_device_and_host(tmp_path, monkeypatch):
    """A row of this GPU, and a compilation that decides by it."""
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
    key = Key.of("linear_gelu", {"tokens": 4096, "k": 512, "n": 2048}, torch.bfloat16)
    path = tmp_path / tuning.Machine(torch.cuda.get_device_name()).file_name
    (row,) = compare.measure_keys([key], "cuda", path, lambda *what: None, compile_pinned, seconds=0.3)
    assert row.ms.keys() == row.alone_us.keys() == row.issue_us.keys() == {"inductor", "aten"}
    assert all(time > 0 for times in (row.ms, row.alone_us, row.issue_us) for time in times.values())
    linear = torch.nn.Linear(512, 2048).to("cuda", torch.bfloat16)

    def function(x):
        return torch.nn.functional.gelu(linear(x), approximate="tanh")

    with torch.inference_mode():
        compiled = torch.compile(function, backend=tritium.Backend(), fullgraph=True)
        x = torch.randn(1, 4096, 512, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), function(x), rtol=2e-2, atol=2e-2)
    reason = next(iter(tritium.explain(compiled).sites["linear_gelu"].reasons))
    assert reason.endswith("measured), on this machine")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_are_inductor_s(mode):
    model = Stack(2).cuda()
    x, gate = (value.cuda() for value in block_inputs())
    with torch.inference_mode():
        expected = model(x, gate)
        compiled = torch.compile(model, backend=tritium.Backend(), mode=mode)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(x, gate).clone()
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_dynamic_shapes_with_owned_kernels():
    model = Stack(2).cuda()
    config = tritium.CompilationConfig(force_provider="triton")
    compiled = torch.compile(model, backend=tritium.Backend(config), dynamic=True)
    with torch.inference_mode():
        for batch, tokens in ((2, 7), (3, 63), (2, 100), (5, 3)):
            x, gate = (value.cuda() for value in block_inputs(batch=batch, tokens=tokens))
            torch.testing.assert_close(compiled(x, gate), model(x, gate), rtol=1e-3, atol=1e-4)
    report = tritium.explain(compiled)
    assert len(report.records) <= 2
    assert report.sites["rms_norm"].fused == 2 * len(report.records)


def test_a_kernel_that_fails_leaves_its_graph_to_inductor(monkeypatch):
    from tritium.ops import rms_norm

    def refused(width):
        # Triton takes powers of two alone.
        return original(width)[0], {"num_warps": 3}

    original = rms_norm.launch_options
    monkeypatch.setattr(rms_norm, "launch_options", refused)
    model, (x, gate) = Block().cuda(), (value.cuda() for value in block_inputs(batch=3, tokens=11))
    config = tritium.CompilationConfig(force_provider="triton")
    with torch.inference_mode(), pytest.warns(RuntimeWarning, match="lowering failed"):
        compiled = torch.compile(model, backend=tritium.Backend(config))
        torch.testing.assert_close(compiled(x, gate), model(x, gate), rtol=1e-3, atol=1e-4)
    assert tritium.explain(compiled).failures[0]["part"] == "lowering"


def test_freezing_on_the_gpu():
    class Freezes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(64, 64)
            self.k = torch.nn.Linear(64, 64)

        def forward(self, x):
            return torch.nn.functional.linear(x, torch.cat([self.q.weight, self.k.weight]))

    model, x = Freezes().cuda(), torch.randn(5, 64, device="cuda")
    config = tritium.CompilationConfig(enable_freezing=True)
    with torch.inference_mode():
        compiled = torch.compile(model, backend=tritium.Backend(config))
        compiled(x)
        model.q.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
    assert tritium.explain(compiled).frozen[0]["declined"] is None


def test_kernels_are_timed_on_the_device(tmp_path):
    """Generated kernels by their names, library calls by their order: at a fixed shape every launch is found."""
    model, inputs = flux().to("cuda", torch.bfloat16), on_gpu(flux_inputs(dtype=torch.bfloat16))
    with torch.inference_mode():
        compiled = torch.compile(model, backend=tritium.Backend(), fullgraph=True)
        report = tritium.explain(compiled, call=lambda: compiled(**inputs))
    found = report.measurement
    assert found.timed == found.of == len(report.kernels) > 0
    assert sum(entry["measured_us"] for entry in report.kernels) < 1e3 * found.call_ms
    assert found.roofs.flops_per_s > 1e13
    assert found.roofs.bytes_per_s > 1e11
    assert found.roofs.dtype == "bfloat16"
    report.to_html(tmp_path / "report.html")
    assert "Times are <b>measured</b>" in (tmp_path / "report.html").read_text()


OWN_KERNELS = """
import hashlib, json
import torch, tritium
from tritium.artifacts import files as artifacts
from tritium.artifacts.fingerprint import Fingerprint

here = Fingerprint.current({"norm": {"channels": 64}}, "cuda")
found = artifacts.load(file, here) if verb == "load" else None
torch.manual_seed(0)
norm = torch.nn.GroupNorm(32, 64, device="cuda", dtype=torch.bfloat16)
x = torch.randn(1, 64, 128, 128, device="cuda", dtype=torch.bfloat16)

def function(x, q):
    attention = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=None, dropout_p=0.0, is_causal=False)
    return torch.nn.functional.silu(norm(x)).sum() + attention.sum()

q = torch.randn(1, 256, 1, 512, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
config = tritium.CompilationConfig(force_provider={"group_norm_silu": "triton", "wide_attention": "products"})
if verb == "load":
    from triton.compiler.compiler import ASTSource

    # Nothing is compiled, whichever cache has it.
    ASTSource.make_ir = None
with torch.inference_mode():
    result = torch.compile(function, backend=tritium.Backend(config))(x, q)
if verb == "save":
    found = artifacts.save(file, here)
print(json.dumps([found.kernels, found.missing, hashlib.sha256(result.float().cpu().numpy().tobytes()).hexdigest()]))
"""


def test_the_next_machine_launches_kernels_without_a_compiler(tmp_path, in_process):
    """Neither Triton's nor C's: a launch goes through libraries that the first machine's C compiler made."""

    def run(verb: str, **env: str) -> list:
        machine = tmp_path / verb
        program = f"file, verb = {str(tmp_path / 'file')!r}, {verb!r}\n{OWN_KERNELS}"
        env |= {"HOME": str(machine), "TRITON_CACHE_DIR": str(machine / "triton")}
        return json.loads(in_process(program, cache=machine, env=env).splitlines()[-1])

    kernels, missing, result = run("save")
    # The softmax of the attention, which generated code calls; the norm's kernels are part of torch's own artifacts.
    assert kernels == 1
    assert missing == 0
    assert run("load", CC="/bin/false", TORCHINDUCTOR_COMPILE_THREADS="1") == [kernels, 0, result]


class TestPipelines:
    """`optimize` on the pipeline that ships."""

    @pytest.fixture
    def pipe(self):
        pipe = tritium.load_example("cuda")
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate(self, pipe, steps=8):
        generator = torch.Generator("cpu").manual_seed(0)
        return pipe(tritium.example.PROMPTS[0], num_inference_steps=steps, generator=generator, output_type="pt").images

    def test_images_are_close_and_come_back_bit_equal(self, pipe):
        eager = self.generate(pipe)
        with tritium.optimize(pipe, tritium.Plan(progress=False)) as handle:
            accelerated = self.generate(pipe)
            self.generate(pipe)
            times = {component.name: component.milliseconds for component in handle.components}
            assert handle.report.device["type"] == "cuda"
        assert quality.psnr(accelerated, eager) >= 40
        assert times["transformer"] > 0
        assert times["vae.decode"] > 0
        assert torch.equal(self.generate(pipe), eager)

    def test_offloading_a_model_at_a_time_works(self):
        pipe = tritium.load_example("cpu")
        pipe.set_progress_bar_config(disable=True)
        pipe.enable_model_cpu_offload()
        eager = self.generate(pipe, steps=2)
        with tritium.optimize(pipe, tritium.Plan(progress=False)):
            assert quality.psnr(self.generate(pipe, steps=2), eager) >= 40

    def test_every_part_is_measured(self, pipe):
        with tritium.optimize(pipe, tritium.Plan(progress=False, measure=True)) as handle:
            self.generate(pipe, steps=2)
            for name in ("transformer", "vae.decode", "text_encoder_2"):
                assert set(handle.part(name).measured) >= {"eager", "inductor", "tritium"}
