"""Odd weights in slots: tied, strided, quantized, with adapters; and what others read and write."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tritium
from support.streamed import Block, Stack, block_size, budget, note, optimized, plan, tokens
from tritium import Quantize
from tritium.errors import ConfigError, PipelineError
from tritium.techniques.memory.units import Unit, divided, moved, tensors_of


def host(size):
    return torch.zeros(size, dtype=torch.uint8)


def calls(model, times=3):
    with torch.no_grad():
        return [model(tokens()) for _ in range(times)]


def equal(results, expected):
    return all(torch.equal(result, expected) for result in results)


class TestUnits:
    def strided(self):
        whole = torch.randn(6, 4)
        return {
            "plain": torch.randn(3, 5),
            "transposed": torch.randn(4, 3).t(),
            "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "expanded": torch.ones(1, dtype=torch.int8).expand(7, 9),
            "upper": whole[:3],
            "lower": whole[3:],
            "every second": whole[::2],
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "flags": torch.tensor([True, False, True]),
            "half": torch.randn(5).bfloat16(),
        }

    def test_values_and_layouts_are_kept(self):
        tensors = self.strided()
        before = {name: (value.clone(), value.stride(), value.dtype) for name, value in tensors.items()}
        unit = Unit.packed("unit", list(tensors.values()), host)
        buffer = unit.host.clone()
        unit.poison(torch.device("cpu"))
        assert tensors["plain"].isnan().all()
        assert tensors["plain"].shape == (3, 5)
        unit.bind(buffer)
        for name, (value, strides, dtype) in before.items():
            assert (tensors[name].stride(), tensors[name].dtype) == (strides, dtype)
            assert torch.equal(tensors[name], value), name
        # Views of one memory still are.
        tensors["every second"].fill_(7)
        assert float(tensors["upper"][0, 0]) == float(tensors["lower"][1, 0]) == 7
        unit.restore()
        assert all(torch.equal(tensors[name], value) for name, (value, *_) in before.items())

    @pytest.mark.parametrize("keeps_origin", [True, False])
    def test_restored_to_where_they_were(self, keeps_origin):
        block = Block().requires_grad_(False)
        before = {name: (value.data_ptr(), value.clone()) for name, value in block.named_parameters()}
        unit = Unit.packed("unit", tensors_of(block), host, keeps_origin=keeps_origin)
        unit.bind(unit.host.clone())
        unit.restore()
        for name, value in block.named_parameters():
            assert torch.equal(value, before[name][1])
            assert (value.data_ptr() == before[name][0]) is keeps_origin

    def test_newer_values_are_restored(self):
        block = Block().requires_grad_(False)
        unit = Unit.packed("unit", tensors_of(block), host, keeps_origin=True)
        unit.bind(unit.host)
        block.up.weight.fill_(3)
        unit.changed = True
        unit.restore()
        assert (block.up.weight == 3).all()

    def test_equal_blocks_have_equal_layouts(self):
        units = [Unit.packed("unit", tensors_of(Block()), host) for _ in range(3)]
        assert len({tuple((place.offset, place.shape) for place in unit.places) for unit in units}) == 1
        assert units[0].size == block_size()

    def test_shared_weights_stay_outside(self):
        model = Stack(3)
        model.blocks[1].up.weight = model.blocks[0].up.weight
        model.blocks[2].down.bias.data = model.embed.weight.data.view(-1)[:32]
        rest, inside = divided(model, list(model.blocks))
        assert {id(one) for one in rest} >= {id(model.blocks[0].up.weight), id(model.blocks[2].down.bias)}
        assert [len(tensors) for tensors in inside] == [5, 5, 5]

    def test_meta_weights_are_refused(self):
        with pytest.raises(PipelineError, match="on 'meta'"):
            Unit.packed("unit", [torch.empty(3, device="meta")], host)

    def test_moved_tensors_come_back(self):
        block = Block().requires_grad_(False)
        before = {name: (value.data_ptr(), value.clone()) for name, value in block.named_parameters()}
        # No tensor is on another device than the CPU here: nothing moves.
        moved(block.parameters(), torch.device("cpu"))()
        assert all(value.data_ptr() == before[name][0] for name, value in block.named_parameters())


class TestModels:
    def test_tied_blocks(self):
        model = Stack()
        model.blocks[4].up.weight = model.blocks[1].up.weight
        expected = calls(copy.deepcopy(model), 1)[0]
        with optimized(model, budget(model, 1, activations=40_000), how="eager"):
            assert equal(calls(model), expected)
        assert model.blocks[4].up.weight is model.blocks[1].up.weight

    def test_buffers_and_strides(self):
        model = Stack()
        for block in model.blocks:
            block.down.weight.data = block.down.weight.data.t().contiguous().t()
            block.register_buffer("scale", torch.randn(32))
            block.forward = lambda x, block=block: Block.forward(block, x) * block.scale
        expected = calls(copy.deepcopy(model), 1)[0]
        strides = model.blocks[0].down.weight.stride()
        model = copy.deepcopy(model)
        for block in model.blocks:
            block.forward = lambda x, block=block: Block.forward(block, x) * block.scale
        with optimized(model, budget(model, 1, activations=40_000), how="eager"):
            assert equal(calls(model), expected)
            assert model.blocks[3].down.weight.stride() == strides

    @pytest.mark.parametrize("format_", ["int8-weights", "int4-weights", "int8"])
    def test_quantized_weights_stream_at_their_size(self, format_):
        how = Quantize(format_, keep="cpu", group=32) if "int4" in format_ else Quantize(format_, keep="cpu")
        common = {"progress": False, "config": tritium.CompilationConfig(engine="eager")}
        plain, model = Stack(width=64), Stack(width=64)
        x = tokens(width=64)
        with torch.no_grad(), tritium.optimize(plain, tritium.Plan(quantize=how, **common)):
            expected = plain(x)
            quantized = [sum(t.untyped_storage().nbytes() for t in tensors_of(block)) for block in plain.blocks]
        before = {name: (value.data_ptr(), value.clone()) for name, value in model.named_parameters()}
        memory = tritium.Memory(115_000 if "int4" in format_ else 170_000)
        with torch.no_grad(), tritium.optimize(model, tritium.Plan(quantize=how, memory=memory, **common)) as handle:
            assert equal([model(x) for _ in range(3)], expected)
            found = note(handle)
        assert found["streamed"]
        assert found["size"] < 1.2 * sum(quantized) + 40_000
        assert all(torch.equal(value, before[name][1]) for name, value in model.named_parameters())

    def test_quantized_copies_on_the_device_are_refused(self):
        with pytest.raises(ConfigError, match="keep='cpu'"):
            tritium.Plan(memory="1GB", quantize="int8")
        with pytest.raises(ConfigError, match="enable_freezing"):
            tritium.Plan(memory="1GB", config=tritium.CompilationConfig(enable_freezing=True))


class TestAdapters:
    def adapted(self, model):
        import peft

        config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
        torch.manual_seed(3)
        peft.inject_adapter_in_model(config, model)
        return model.requires_grad_(False)

    def test_an_adapter_that_is_added_later(self):
        expected = calls(self.adapted(Stack()), 1)[0]
        model = Stack()
        with optimized(model, budget(model, 1, activations=60_000), how="eager") as handle:
            plain = calls(model)[0]
            self.adapted(model)
            assert equal(calls(model), expected)
            assert "copied to the host again" in str(handle)
            # The adapter streams with its block.
            assert not note(handle)["misses"]
        assert not torch.equal(plain, expected)
        assert equal(calls(model, 1), expected)

    @pytest.mark.parametrize("streams", [True, False], ids=["before a call", "after a call"])
    def test_a_merged_adapter(self, streams):
        reference = self.adapted(Stack())
        layers = [module for module in reference.modules() if hasattr(module, "merge")]
        for layer in layers:
            layer.merge()
        expected = calls(reference, 1)[0]
        model = self.adapted(Stack())
        with optimized(model, budget(model, 0, activations=60_000), how="eager"):
            if streams:
                calls(model)
            for layer in [module for module in model.modules() if hasattr(module, "merge")]:
                layer.merge()
            assert equal(calls(model), expected)
        assert equal(calls(model, 1), expected)


class TestOthers:
    def test_a_state_dict_has_the_values(self):
        model = Stack()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with optimized(model, budget(model, 0), how="eager"):
            for _ in range(2):
                found = model.state_dict()
                assert all(torch.equal(found[name], value) for name, value in before.items())
                calls(model)

    def test_a_state_dict_that_is_loaded(self):
        model, other = Stack(), Stack()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        expected = calls(other, 1)[0]
        with optimized(model, budget(model, 1), how="eager"):
            calls(model)
            model.load_state_dict(other.state_dict())
            assert equal(calls(model), expected)
        assert equal(calls(model, 1), expected)

    @pytest.mark.parametrize(
        "write",
        [
            lambda model: model.blocks[2].up.weight.mul_(2),
            lambda model: model.to(torch.float64),
            lambda model: setattr(model.blocks[1].down.bias, "data", torch.zeros(32)),
        ],
        ids=["in place", "cast", "data"],
    )
    def test_a_write_that_would_be_lost_is_an_error(self, write):
        model, expected = Stack(), calls(Stack(), 1)[0]
        with optimized(model, budget(model, 0), how="eager"):
            calls(model)
            write(model)
            with pytest.raises(PipelineError, match="moved or written to"):
                model(tokens())
        # What was there before is put back.
        assert equal(calls(model, 1), expected)

    def test_shared_parts_of_a_model_are_refused_if_they_take_turns(self):
        model = Stack()

        pipe = SimpleNamespace(components={"transformer": model, "text_encoder": nn.Sequential(model.embed)})
        with pytest.raises(PipelineError, match="weights of another part"):
            tritium.optimize(pipe, tritium.Plan(memory=tritium.Memory(budget(model, 0)), progress=False))
        assert equal(calls(model, 1), calls(Stack(), 1)[0])

    def test_offloaded_layers_are_refused_with_the_advice(self):
        from diffusers.hooks import apply_group_offloading

        model = Stack()
        cpu = torch.device("cpu")
        apply_group_offloading(model, cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
        with pytest.raises(PipelineError, match=r"which loads weights under compiled code"):
            tritium.optimize(model, tritium.Plan(progress=False))
        with pytest.raises(PipelineError, match=r"of another library, which moves its weights"):
            tritium.optimize(model, plan(10**6, how="eager"))
