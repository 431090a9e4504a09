"""Parts of a pipeline that take turns in one budget; and a pipeline that sleeps."""

import pytest
import torch
from torch import nn

import tritium
from support import small_pipelines
from support.streamed import WIDTH, Held, Stack, block_size, budget, note, optimized, tokens
from tritium import CompilationConfig, Plan
from tritium.errors import MemoryShortage, PipelineError
from tritium.techniques.choice import Choice
from tritium.techniques.memory import pool as pools
from tritium.techniques.memory.arena import Arena
from tritium.techniques.memory.link import link_to

CPU = torch.device("cpu")


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.convolution(x)


class Codec(nn.Module):
    """A VAE with a layer outside of its decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.after = nn.Linear(2, 2), Decoder(), nn.Linear(WIDTH, WIDTH)

    def decode(self, x):
        return self.decoder(self.after(x)[:, None])


class Pipeline:
    """Encodes once, denoises in steps with every denoiser in turn, and decodes."""

    def __init__(self, *denoisers, steps=2):
        torch.manual_seed(5)
        self.steps, self.denoisers = steps, denoisers
        names = {name: Stack(5) for name in denoisers}
        self.components = {"text_encoder": Stack(4), **names, "vae": Codec().eval()}

    def __call__(self, count=4):
        parts = self.components
        with torch.no_grad():
            x = parts["text_encoder"](tokens(count))
            for _ in range(self.steps):
                for name in self.denoisers:
                    x = parts[name](x)
            return parts["vae"].decode(x)


@pytest.fixture(autouse=True)
def _own_pools(monkeypatch):
    monkeypatch.setattr(pools, "_POOLS", {})


def optimize(pipe, size):
    choices = {name: Choice(how="eager") for name in pipe.components}
    return tritium.optimize(pipe, Plan(memory=tritium.Memory(size), components=choices, progress=False))


def weights(pipe):
    modules = {name: value for name, value in pipe.components.items() if isinstance(value, nn.Module)}
    return {
        f"{name}.{path}": (tensor.data_ptr(), tensor.clone())
        for name, module in modules.items()
        for path, tensor in module.state_dict().items()
    }


def assert_as_before(pipe, before):
    after = weights(pipe)
    for name, (place, value) in before.items():
        assert torch.equal(after[name][1], value), name
        assert after[name][0] == place, name


class TestTurns:
    @pytest.mark.parametrize(
        "denoisers", [("transformer",), ("transformer", "transformer_2"), ("controlnet", "transformer")]
    )
    @pytest.mark.parametrize("blocks", [0, 2])
    def test_equal_images_within_the_budget(self, denoisers, blocks):
        pipe, link = Pipeline(*denoisers), link_to(CPU)
        expected, before = pipe(), weights(pipe)
        slots = 2 * len(denoisers) if "controlnet" in denoisers else 2
        size = budget(Stack(1), blocks, slots=slots, activations=12_000 + 6_000 * len(denoisers))
        with optimize(pipe, size) as handle:
            for _ in range(3):
                assert torch.equal(pipe(), expected)
            with Held(link) as held:
                assert torch.equal(pipe(), expected)
            assert held.most <= size
            found = note(handle, "transformer")
            assert len(found["streamed"]) >= 3 - blocks
            assert not found["misses"]
            assert "takes its turn" in str(handle)
        assert_as_before(pipe, before)

    def test_weights_out_of_their_turn_show_nan(self):
        pipe = Pipeline("transformer")
        with optimize(pipe, budget(Stack(1), 1)):
            pipe()
            assert pipe.components["text_encoder"].embed.weight.isnan().all()
            assert pipe.components["vae"].decoder.convolution.weight.isnan().all()
            # Layers outside of parts are always there.
            assert not pipe.components["vae"].after.weight.isnan().any()

    def test_blocks_that_stay_are_not_loaded_again(self, monkeypatch):
        pipe, loads = Pipeline("transformer"), []
        with optimize(pipe, budget(Stack(1), 2)) as handle:
            for _ in range(2):
                pipe()
            state = handle.part("transformer").state_of("memory")
            resident = {seat.unit.name for seat in state.tenant.weights.seats if seat.slot is None}
            real = state.pool.arena.load
            monkeypatch.setattr(state.pool.arena, "load", lambda seat: loads.append(seat.unit.name) or real(seat))
            pipe()
        assert loads
        assert len(resident) > 1
        assert not resident & set(loads)

    def test_a_decode_that_needs_more_gets_it(self):
        pipe = Pipeline("transformer")
        pipe.components["vae"].decoder.convolution = nn.Conv2d(1, 60, 3, padding=1)
        expected, link = pipe(), link_to(CPU)
        size = budget(Stack(1), 3, activations=20_000)
        with optimize(pipe, size) as handle:
            for _ in range(3):
                with Held(link) as held:
                    assert torch.equal(pipe(), expected)
            assert held.most <= size
            assert "free for its activations" in str(handle)
            assert note(handle, "transformer")["resident"]

    def test_a_decode_that_cannot_fit_is_refused(self):
        pipe = Pipeline("transformer")
        pipe.components["vae"].decoder.convolution = nn.Conv2d(1, 900, 3, padding=1)
        with optimize(pipe, budget(Stack(1), 3)), pytest.raises(MemoryShortage, match=r"vae.decode does not"):
            pipe()

    def test_memory_that_is_not_free_again(self, monkeypatch):
        pipe = Pipeline("transformer")
        pipe.components["vae"].decoder.convolution = nn.Conv2d(1, 60, 3, padding=1)
        expected, real, failures = pipe(), Arena.reach, []

        def reach(arena):
            if failures and (failure := failures.pop()) is not None:
                raise failure
            real(arena)

        monkeypatch.setattr(Arena, "reach", reach)
        with optimize(pipe, budget(Stack(1), 3, activations=20_000)) as handle:
            for _ in range(3):
                pipe()
            before = note(handle, "transformer")["resident"]
            # The text encoder cannot have it, and then the denoiser not as much as before.
            failures += [torch.OutOfMemoryError("no"), None, torch.OutOfMemoryError("no")]
            assert torch.equal(pipe(), expected)
            assert not failures
            assert "not free" in str(handle)
            assert len(note(handle, "transformer")["resident"]) < len(before)
            assert torch.equal(pipe(), expected)

    def test_fit_takes_what_is_free(self):
        pipe = Pipeline("transformer")
        expected = pipe()
        with optimize(pipe, "fit") as handle:
            assert torch.equal(pipe(), expected)
            assert "all weights stay" in str(handle)

    def test_a_part_without_a_budget_stays_whole(self):
        pipe = Pipeline("transformer")
        expected = pipe()
        choices = {"text_encoder": Choice(how="eager", memory=False), "transformer": "eager", "vae": "eager"}
        whole = Plan(memory=tritium.Memory(budget(Stack(1), 0)), components=choices, progress=False)
        with tritium.optimize(pipe, whole):
            assert torch.equal(pipe(), expected)
            assert not pipe.components["text_encoder"].embed.weight.isnan().any()


class TestStock:
    def test_a_flux_pipeline(self):
        pipe = small_pipelines.flux(4, 8)
        pipe.set_progress_bar_config(disable=True)

        def image():
            seed = torch.Generator().manual_seed(0)
            call = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16, "output_type": "pt"}
            return pipe("a red circle", generator=seed, **call).images

        config = CompilationConfig(engine="eager")
        expected, before = image(), weights(pipe)
        settings = Plan(memory="1200kB", graphs="with_compile", config=config, progress=False)
        with tritium.optimize(pipe, settings) as handle:
            assert pipe.device == pipe._execution_device == CPU
            assert all(torch.equal(image(), expected) for _ in range(3))
            captures = len(handle.captures)
            assert captures >= 4
            asleep = handle.sleep()
            assert (asleep.captures, len(handle.captures)) == (captures, 0)
            assert asleep.weights > 0
            with pytest.raises(PipelineError, match=r"handle.wake\(\)"):
                image()
            handle.wake()
            assert torch.equal(image(), expected)
            assert len(handle.captures) == captures
            assert "captures had to be made again" in str(handle)
        assert_as_before(pipe, before)


class TestSleep:
    def test_without_a_budget(self):
        pipe = Pipeline("transformer")
        expected, before = pipe(), weights(pipe)
        with tritium.optimize(pipe, Plan(progress=False, config=CompilationConfig(engine="eager"))) as handle:
            assert torch.equal(pipe(), expected)
            asleep = handle.sleep()
            assert handle.sleep() is asleep
            assert asleep.weights >= sum(value.nbytes for _, value in before.values())
            assert pipe.components["transformer"].embed.weight.isnan().all()
            with pytest.raises(PipelineError, match="asleep"):
                pipe()
            handle.wake()
            handle.wake()
            assert torch.equal(pipe(), expected)
        assert all(torch.equal(value, before[name][1]) for name, (_, value) in weights(pipe).items())

    def test_removed_while_asleep(self):
        model = Stack()
        with torch.no_grad():
            expected = model(tokens())
        with optimized(model, budget(model, 1), how="eager") as handle:
            model(tokens())
            link = link_to(CPU)
            before = link.allocated()
            handle.sleep()
            assert link.allocated() <= before - 3 * block_size()
        with torch.no_grad():
            assert torch.equal(model(tokens()), expected)
        with pytest.raises(PipelineError, match="removed"):
            handle.sleep()

    def test_a_shared_part_keeps_its_pipeline_awake(self):
        pipe = Pipeline("transformer")
        other = Pipeline("transformer")
        other.components["text_encoder"] = pipe.components["text_encoder"]
        with (
            optimize(pipe, "1GB") as handle,
            optimize(other, "1GB"),
            pytest.raises(PipelineError, match="text_encoder is shared"),
        ):
            handle.sleep()
