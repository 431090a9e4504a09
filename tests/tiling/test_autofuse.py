"""The policy as users reach it: `tritium.autofuse`, pins, and its place in cache keys."""

import json
import shutil
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tritium
from tiling.generated import generate, generate_pattern, hook_owner, triton_on_cpu
from tritium import compat
from tritium.errors import ConfigError
from tritium.passes import Decline
from tritium.tiling import session
from tritium.tiling.policy import SWITCHES, TilingPolicy

PAD = "triton_poi_fused_constant_pad_nd_0"


@pytest.fixture(autouse=True)
def originals():
    """Inductor's functions, which every test leaves as they were."""
    wrapped = [hook for hook in compat.tiling.hooks() if hook.wrapper is not None]
    found = [(hook.owner, hook.attribute, vars(hook.owner)[hook.attribute]) for hook in wrapped]
    yield found
    tritium.autofuse.disable()
    assert not compat.tiling.is_wrapped()
    assert session.current() is None
    assert are_there(found)


def are_there(originals):
    return all(vars(owner)[name] is original for owner, name, original in originals)


class TestEnable:
    def test_disable_restores_every_function(self, originals):
        for options in ({}, {"narrow_sizes": False}):
            assert tritium.autofuse.enable(**options) is None
        assert session.of_process() is not None
        assert not any(vars(owner)[name] is original for owner, name, original in originals)
        for _ in range(2):
            tritium.autofuse.disable()
            assert session.of_process() is None
            assert are_there(originals)

    def test_a_block_restores_the_earlier_policy(self, originals):
        tritium.autofuse.enable(narrow_sizes=False)
        outer = session.of_process()
        assert outer.proves_multiple(8, 4)
        with tritium.autofuse.enabled():
            inner = session.of_process()
            assert inner.policy.narrow_sizes
            with tritium.autofuse.enabled(choose_tiling=False):
                assert not session.of_process().policy.choose_tiling
            assert session.of_process() is inner
            assert tritium.autofuse.decisions()["proofs"] == []
        assert session.of_process() is outer
        assert tritium.autofuse.decisions()["proofs"] == ["(8) / (4)"]

    def test_a_block_that_fails_restores_it_too(self):
        tritium.autofuse.enable(narrow_sizes=False)
        outer = session.of_process()
        with pytest.raises(ValueError, match="theirs"), tritium.autofuse.enabled():
            raise ValueError("theirs")
        assert session.of_process() is outer
        with pytest.raises(ConfigError), tritium.autofuse.enabled(force_tiling="2d"):
            pass
        assert session.of_process() is outer

    def test_disable_inside_a_block_stays(self, originals):
        with tritium.autofuse.enabled():
            tritium.autofuse.disable()
            assert are_there(originals)
        assert session.of_process() is None

    def test_a_later_wrapper_of_other_code_keeps_working(self):
        tritium.autofuse.enable()
        kernel = hook_owner("codegen_kernel")
        ours = kernel.codegen_kernel
        theirs = lambda self, name=None: ours(self, name)  # noqa: E731
        kernel.codegen_kernel = theirs
        tritium.autofuse.disable()
        assert kernel.codegen_kernel is theirs
        assert session.current() is None
        kernel.codegen_kernel = ours.__wrapped__

    def test_an_unknown_torch_is_declined_with_a_reason(self, monkeypatch, originals):
        reason = compat.tiling.decline_tiling((2, 99))
        monkeypatch.setattr(compat.tiling, "decline_tiling", lambda: reason)
        assert tritium.autofuse.enable() == Decline("supported on torch 2.11 to 2.15, not on 2.99")
        assert session.of_process() is None
        assert are_there(originals)

    def test_versions_and_changed_functions(self, monkeypatch):
        assert compat.tiling.decline_tiling() is None
        for version in ((2, 10), (2, 16), (3, 0)):
            assert compat.tiling.decline_tiling(version).endswith(f", not on {version[0]}.{version[1]}")
        monkeypatch.setattr(hook_owner("reduction_split_factor"), "reduction_split_factor", lambda device: 1)
        assert "takes no reduction_numel_hint" in compat.tiling.decline_tiling()
        monkeypatch.setattr(hook_owner("codegen_kernel"), "codegen_kernel", lambda self: "")
        assert "takes no name" in compat.tiling.decline_tiling()
        monkeypatch.delattr(hook_owner("create_tiling"), "create_tiling")
        assert "has no SIMDScheduling.create_tiling" in compat.tiling.decline_tiling()
        monkeypatch.undo()

    @pytest.mark.skipif(
        compat.versions.TORCH < (2, 12), reason="torch 2.11 crashes in Dynamo after a thread has compiled"
    )
    def test_it_acts_in_every_thread(self):
        kernels = []
        with tritium.autofuse.enabled():
            thread = threading.Thread(target=lambda: kernels.extend(generate_pattern("crop_to_nhwc")[0]))
            thread.start()
            thread.join()
        assert [kernel.dims for kernel in kernels] == [2]

    def test_a_policy_of_the_context_precedes_that_of_the_process(self):
        with tritium.autofuse.enabled(narrow_sizes=True), session.active(TilingPolicy(narrow_sizes=False)):
            assert not session.current().policy.narrow_sizes
            seen = []
            thread = threading.Thread(target=lambda: seen.append(session.current().policy.narrow_sizes))
            thread.start()
            thread.join()
            assert seen == [True]

    def test_decisions_have_reasons(self):
        _, decisions = generate_pattern("crop_to_nhwc", policy={})
        assert tritium.autofuse.decisions()["kernels"] == []
        (kernel,) = decisions["kernels"]
        assert kernel["reason"]
        assert kernel["costs"]
        # Since torch 2.14 Inductor proves products of sums itself.
        assert bool(kernel["proofs"]) == (compat.versions.TORCH < compat.tiling.PROVES_PRODUCTS)
        assert set(kernel["proofs"]) <= set(decisions["proofs"])
        json.dumps(decisions)

    def test_code_compiled_after_disable_is_inductors(self):
        (first,), _ = generate_pattern("pad_ncdhw", policy={})
        (second,), _ = generate_pattern("pad_ncdhw")
        assert (first.dims, second.dims) == (2, 1)

    def test_no_warning_is_given(self):
        with warnings.catch_warnings(), triton_on_cpu():
            warnings.simplefilter("error", RuntimeWarning)
            with tritium.autofuse.enabled():
                generate(lambda x: F.pad(x, (1, 1, 1, 1)), [torch.randn(4, 8, 8)], {0: (1, 2)})

    def test_importing_it_loads_no_compiler(self, in_process):
        program = "import sys, tritium; tritium.autofuse; assert 'torch._inductor.codegen.simd' not in sys.modules"
        in_process(program)


class TestPins:
    def dims(self, pin):
        (kernel,), decisions = generate_pattern("pad_ncdhw", policy={"force_tiling": pin})
        assert kernel.name == PAD
        return kernel.dims, decisions["kernels"][0]["reason"]

    @pytest.mark.parametrize(("pin", "dims"), [("1d", 1), ("2d", 2), ("3d", 3), ("coalesced", 1)])
    def test_a_kernel_by_its_name(self, pin, dims):
        assert self.dims(f"{PAD}={pin}")[0] == dims
        assert "pinned" in self.dims({PAD: pin})[1]

    def test_other_kernels_are_free(self):
        for other in ("triton_poi_fused_constant_pad_nd_1=1d", "triton_poi_fused_add_0=1d"):
            assert self.dims(other)[0] == 2

    def test_configuration(self, monkeypatch):
        pinned = tritium.CompilationConfig(force_tiling=f"{PAD}=2d, triton_poi_fused_add_3 = 1d")
        assert pinned.tiling_pins() == (("triton_poi_fused_add_3", "1d"), (PAD, "2d"))
        assert pinned == tritium.CompilationConfig(force_tiling={"triton_poi_fused_add_3": "1d", PAD: "2d"})
        assert pinned.identity() != tritium.CompilationConfig().identity()
        assert pinned.with_(enable_freezing=True).tiling_pins() == pinned.tiling_pins()
        hash(pinned)
        monkeypatch.setenv("TRITIUM_FORCE_TILING", f"{PAD}=3d")
        assert tritium.CompilationConfig().tiling_pins() == ((PAD, "3d"),)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("2d", "is not of the form kernel=tiling"),
            (f"{PAD}=4d", "cannot be tiled '4d'; valid: '1d'"),
            ("add=2d", "is not the name of a generated kernel"),
            ({PAD: 2}, "must map names to names"),
        ],
    )
    def test_what_cannot_be_honoured_is_an_error(self, value, message):
        with pytest.raises(ConfigError, match=message):
            tritium.CompilationConfig(force_tiling=value)
        with pytest.raises(ConfigError, match=message):
            tritium.autofuse.enable(force_tiling=value)

    def test_an_engine_without_kernels(self):
        with pytest.raises(ConfigError, match="generates none"):
            tritium.CompilationConfig(force_tiling=f"{PAD}=2d", engine="eager")


PROGRAM = """
import json, sys
sys.path.insert(0, {source!r})
import torch, tritium
from torch._dynamo.utils import counters
{before}

@torch.no_grad()
def main():
    x = torch.randn(2, 8, 12, 16)
    torch._dynamo.mark_dynamic(x, [2, 3])
    compiled = torch.compile(lambda x: x[:, :, 1:, 1:] * 2)
    torch.testing.assert_close(compiled(x), x[:, :, 1:, 1:] * 2)

main()
counted = counters["inductor"]
autograd = counters["aot_autograd"]
print(json.dumps({{
    "hits": counted["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
    "misses": counted["fxgraph_cache_miss"] + autograd["autograd_cache_miss"],
    "bypasses": counted["fxgraph_cache_bypass"],
}}))
"""


class TestIdentity:
    """A patched code generator with an unchanged key would find code that another policy made. Real processes."""

    @pytest.mark.codegen
    def test_every_change_of_the_policy_misses(self, tmp_path, in_process):
        package = tmp_path / "edited"
        shutil.copytree(Path(tritium.__file__).parent, package / "tritium", ignore=shutil.ignore_patterns("weights"))

        def run(before=""):
            program = textwrap.dedent(PROGRAM).format(source=str(package), before=before)
            found = json.loads(in_process(program, cache=tmp_path / "cache", loaded=True))
            assert found["bypasses"] == 0
            return "hit" if found["hits"] and not found["misses"] else "miss"

        on = "assert tritium.autofuse.enable() is None"
        assert run() == "miss"
        assert run(on) == "miss"
        assert run(on) == "hit"
        file = package / "tritium" / "tiling" / "cost.py"
        file.write_text(file.read_text() + "\n# edited\n")
        assert run(on) == "miss"

    def test_the_policy_is_in_the_key(self):
        others = [TilingPolicy(**{part: False}) for part in SWITCHES]
        others.append(TilingPolicy(pins=((PAD, "2d"),)))
        assert len({policy.identity for policy in [TilingPolicy(), *others]}) == 7
        assert TilingPolicy().identity == TilingPolicy().identity

    def test_every_file_of_the_policy_is_in_it(self, monkeypatch):
        base, original = TilingPolicy().identity, Path.read_bytes
        for edited in Path(session.__file__).parent.glob("*.py"):
            monkeypatch.setattr(Path, "read_bytes", lambda file, e=edited: b"" if file == e else original(file))
            assert TilingPolicy().identity != base or not edited.stat().st_size, edited.name

    def test_plain_graphs_keep_their_key(self):
        def key():
            key_type = hook_owner("__init__")
            details = key_type.__new__(key_type)
            details.__init__(None, [], {}, [])
            return getattr(details, "tritium_tiling", None)

        assert key() is None
        with tritium.autofuse.enabled():
            assert key() == TilingPolicy().identity
        with session.active(TilingPolicy(narrow_sizes=False)):
            assert key() == TilingPolicy(narrow_sizes=False).identity
        assert key() is None
