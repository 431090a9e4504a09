"""A decode that does not fit is refused before it starts; one that fits never is."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tritium
from support import small_vaes
from support.small_vaes import SMALL_VAES, decode
from tritium import CompilationConfig, Plan, device
from tritium.errors import MemoryShortage, TritiumError
from tritium.pipelines import memory

PLAN = Plan(
    config=CompilationConfig(engine="eager"), progress=False, components={"transformer": "eager", "vae": "eager"}
)


@pytest.fixture
def free(monkeypatch):
    """Make up the free memory of the device."""

    def make_up(size: int | None) -> None:
        monkeypatch.setattr(device, "free_memory", lambda where: size)

    return make_up


def optimized(vae, plan: Plan = PLAN):
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
    pipe = SimpleNamespace(components={"transformer": nn.ModuleDict({"blocks": blocks}), "vae": vae})
    return tritium.optimize(pipe, plan)


def peak(call) -> int:
    """The most bytes that tensors held at once, of those a call has made, as the profiler saw them allocated."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    held = most = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        most = max(most, held)
    return most


class TestEstimate:
    @pytest.mark.parametrize(
        "name", ["kl", "dc", "ltx_video", pytest.param("hunyuan_video", marks=pytest.mark.thorough)]
    )
    def test_it_is_below_what_a_decode_takes_and_not_far(self, name):
        """Convolutions of few channels copy their input many times over on a CPU, which nobody foretells."""
        small = SMALL_VAES[name]
        decoder, latent = small.build().decoder, small.latent(96, 80)
        estimate = memory.needed(decoder, (latent,), {})
        with torch.no_grad():
            taken = peak(lambda: decoder(latent))
        least = {"kl": 0.5, "dc": 0.8, "hunyuan_video": 0.7, "ltx_video": 0.15}[name]
        assert least * taken < estimate <= taken

    def test_a_stack_of_convolutions_is_counted_exactly(self):
        """One channel in, four and eight channels of 4-byte numbers: both are alive in the second convolution."""
        stack = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 1, 1))
        assert memory.needed(stack, (torch.rand(1, 1, 32, 16),), {}) == 32 * 16 * 4 * (4 + 8)

    def test_nothing_is_computed_and_nothing_is_changed(self):
        small = SMALL_VAES["wan"]
        vae = small.build()
        weights = [weight.clone() for weight in vae.decoder.parameters()]
        cache = [None] * 40
        memory.needed(vae.decoder, (small.latent(8, 8, frames=1),), {"feat_cache": cache, "feat_idx": [0]}, calls=3)
        assert cache == [None] * 40
        assert all(map(torch.equal, weights, vae.decoder.parameters()))
        assert type(next(vae.decoder.parameters())) is nn.Parameter

    def test_later_frames_take_more_than_the_first(self):
        small = SMALL_VAES["wan"]
        decoder = small.build().decoder
        latent = small.latent(16, 16, frames=1)

        def estimate(calls: int) -> int:
            cache = {"feat_cache": [None] * 40, "feat_idx": [0], "first_chunk": True}
            return memory.needed(decoder, (latent,), cache, calls=calls)

        assert estimate(1) < estimate(2) < estimate(3)
        # From the fourth on each leaves its image: two frames of three channels, twice as high and wide.
        assert estimate(9) - estimate(8) == 2 * 3 * 32 * 32 * 4


class TestRefusal:
    @pytest.mark.parametrize("name", SMALL_VAES)
    def test_it_comes_first_and_names_tiling(self, name, free):
        small = SMALL_VAES[name]
        vae = small.build()
        latent = small.latent(12, 12)
        with optimized(vae) as handle:
            free(10_000)
            with pytest.raises(
                MemoryShortage, match=r"takes \d.* free on cpu: vae\.enable_tiling\(\) decodes it in tiles"
            ):
                decode(vae, latent)
            free(2**40)
            assert torch.isfinite(decode(vae, latent)).all()
            assert not handle.part("vae.decode").spec.guard.unknown

    def test_it_says_how_much_and_is_a_memory_error(self, free):
        vae = SMALL_VAES["kl"].build()
        free(2**20)
        with (
            optimized(vae),
            pytest.raises(MemoryError, match=r"\(1, 4, 512, 512\) takes 0\.\d\d GiB .* 0\.00 GiB are") as error,
        ):
            decode(vae, SMALL_VAES["kl"].latent(512, 512))
        assert isinstance(error.value, TritiumError)

    def test_tiling_makes_it_fit(self, free):
        small = SMALL_VAES["kl"]
        vae = small.build()
        latent = small.latent(24, 24)
        with optimized(vae):
            free(memory.needed(vae.decoder, (latent,), {}) - 1)
            with pytest.raises(MemoryShortage):
                decode(vae, latent)
            small_vaes.tile(vae)
            assert decode(vae, latent).shape[-2:] == (48, 48)

    def test_exactly_enough_is_enough(self, free):
        small = SMALL_VAES["dc"]
        vae = small.build()
        latent = small.latent(12, 12)
        with optimized(vae):
            free(memory.needed(vae.decoder, (latent,), {}))
            decode(vae, latent)

    def test_a_long_video_is_refused_at_its_first_frame(self, free):
        small = SMALL_VAES["wan"]
        vae = small.build()
        first = {"feat_cache": [None] * 40, "feat_idx": [0], "first_chunk": True}
        one = memory.needed(vae.decoder, (small.latent(12, 12, frames=1),), first)
        with optimized(vae) as handle:
            free(one)
            decode(vae, small.latent(12, 12, frames=1))
            calls = handle.part("vae.decode").times.calls
            with pytest.raises(MemoryShortage):
                decode(vae, small.latent(12, 12, frames=9))
            assert handle.part("vae.decode").times.calls == calls + 1

    def test_the_advice_fits_the_case(self, free):
        small = SMALL_VAES["kl"]
        vae = small.build()
        with optimized(vae):
            free(1000)
            with pytest.raises(MemoryShortage, match=r"vae\.enable_slicing\(\) decodes one of the batch at a time"):
                decode(vae, small.latent(12, 12, batch=2))
            small_vaes.tile(vae)
            with pytest.raises(MemoryShortage, match="its tiles are too large"):
                decode(vae, small.latent(12, 12))

    def test_who_knows_better_switches_it_off(self, free):
        vae = SMALL_VAES["kl"].build()
        free(1000)
        with optimized(vae, PLAN.with_(check_memory=False)):
            decode(vae, SMALL_VAES["kl"].latent(12, 12))

    def test_a_device_that_says_nothing_refuses_nothing(self, free):
        vae = SMALL_VAES["kl"].build()
        free(None)
        with optimized(vae):
            decode(vae, SMALL_VAES["kl"].latent(12, 12))

    def test_inference_mode_and_compiled(self, free):
        small = SMALL_VAES["kl"]
        vae = small.build()
        with optimized(vae, PLAN.with_(components={"transformer": "eager"})) as handle, torch.inference_mode():
            free(2**40)
            vae.decode(small.latent(12, 12))
            free(1000)
            with pytest.raises(MemoryShortage):
                vae.decode(small.latent(13, 12))
            assert not handle.part("vae.decode").spec.guard.unknown


class TestGuard:
    def test_a_size_within_one_that_fits_is_not_estimated(self, free, monkeypatch):
        small = SMALL_VAES["kl"]
        vae = small.build()
        seen = []
        original = memory.needed
        monkeypatch.setattr(memory, "needed", lambda *args, **kwargs: seen.append(args) or original(*args, **kwargs))
        guard = memory.Guard(vae, vae.decoder, ())
        free(2**40)
        for size in ((16, 12), (16, 12), (8, 12), (12, 16), (16, 16), (12, 12)):
            guard.check((small.latent(*size),), {})
        assert [tuple(args[1][0].shape[-2:]) for args in seen] == [(16, 12), (12, 16), (16, 16)]

    def test_a_size_within_one_that_does_not_fit_is(self, free):
        small = SMALL_VAES["kl"]
        vae = small.build()
        guard = memory.Guard(vae, vae.decoder, ())
        free(memory.needed(vae.decoder, (small.latent(8, 8),), {}))
        with pytest.raises(MemoryShortage):
            guard.check((small.latent(16, 16),), {})
        guard.check((small.latent(8, 8),), {})

    def test_a_decoder_without_an_estimate_runs_and_says_so(self, free):
        class Odd(nn.Module):
            def forward(self, sample):
                return sample * float(sample.sum())

        vae = SMALL_VAES["kl"].build()
        vae.decoder = Odd()
        free(1)
        with optimized(vae) as handle:
            vae.decoder(torch.rand(1, 4, 4, 4))
            what = next(row.what for row in handle.components if row.name == "vae.decode")
        assert "memory not estimated: " in what


def test_free_memory_of_the_host_is_what_the_kernel_says():
    available = device.free_memory(torch.device("cpu"))
    assert available is None or available > 2**20
    assert device.free_memory(torch.device("meta")) is None


@pytest.mark.gpu
def test_free_memory_of_a_gpu_counts_what_torch_keeps():
    where = torch.device("cuda", 0)
    before = device.free_memory(where)
    held = torch.empty(2**28, dtype=torch.uint8, device=where)
    assert before - device.free_memory(where) >= 2**28
    del held
    assert device.free_memory(where) >= before - 2**25
