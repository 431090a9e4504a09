"""Pipelines attached to a keeper of this process: what arrives, what un-shares, what is refused."""

import gc
import os

import diffusers
import pytest
import torch

import tritium
from support import small_pipelines
from support.keepers import until
from tritium import device
from tritium.errors import KeeperLost, SharingError
from tritium.pipelines import sharing
from tritium.sharing.lease import leases, unshare
from tritium.sharing.placement import placements
from tritium.sharing.weights import named_tensors

generate = small_pipelines.generate


@pytest.fixture
def attached(keeper):
    return tritium.attach("small")


def bytes_mapped(pipe):
    return {entry.component: entry.mapped for entry in placements(pipe)}


def test_the_same_classes_and_the_same_image(flux, image, attached):
    assert type(attached) is diffusers.FluxPipeline
    assert {n: type(c) for n, c in attached.components.items()} == {n: type(c) for n, c in flux.components.items()}
    assert torch.equal(generate(attached), image)
    for name, module in flux.components.items():
        if isinstance(module, torch.nn.Module):
            own = dict(named_tensors(attached.components[name]))
            for path, tensor in named_tensors(module):
                assert torch.equal(own[path], tensor)
                assert own[path].stride() == tensor.stride()
                assert own[path].requires_grad == tensor.requires_grad
            assert not attached.components[name].training
    assert all(entry.private == 0 for entry in placements(attached))


def test_attaching_draws_no_random_numbers(keeper):
    state = torch.random.get_rng_state()
    with torch.inference_mode():
        pipe = tritium.attach("small")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(parameter.is_inference() for parameter in pipe.transformer.parameters())


def test_a_gpu_is_started_in_the_background(monkeypatch):
    started = []
    monkeypatch.setattr(device, "index_of", {"GPU-1": 1, "GPU-9": 9}.get)

    def zeros(_, *, device):
        started.append(device)
        if device.index == 9:
            raise RuntimeError("no such GPU")

    monkeypatch.setattr(torch, "zeros", zeros)
    assert device.start_in_background("cpu") is None
    for name in ("cuda:GPU-1", "cuda:GPU-9", "cuda:unknown"):
        device.start_in_background(name).join()
    assert started == [torch.device("cuda:1"), torch.device("cuda:9")]


def test_users_are_counted(keeper):
    gc.collect()
    assert leases() == []
    first, second = tritium.attach("small"), tritium.attach("small")
    assert len(keeper.users) == len(leases()) == 2
    # A model of the pipeline keeps the lease.
    vae = first.vae
    del first
    gc.collect()
    assert len(keeper.users) == 2
    del vae, second
    gc.collect()
    assert until(lambda: keeper.users == [])
    assert leases() == []


def test_a_module_is_unshared_with_its_ties(keeper, attached):
    gc.collect()
    before = bytes_mapped(attached)
    values = {name: tensor.clone() for name, tensor in attached.vae.state_dict().items()}
    assert unshare(attached.vae) == before["vae"]
    assert unshare(attached.vae) == 0
    assert bytes_mapped(attached) == {**before, "vae": 0}
    assert all(torch.equal(values[name], tensor) for name, tensor in attached.vae.state_dict().items())
    encoder = attached.text_encoder_2
    assert unshare(encoder.shared) > 0
    assert encoder.shared.weight.data_ptr() == encoder.encoder.embed_tokens.weight.data_ptr()
    assert len(keeper.users) == 1
    for module in (attached.transformer, attached.text_encoder, encoder):
        unshare(module)
    # Nothing is shared any more, so the lease has ended.
    assert until(lambda: keeper.users == [])
    assert leases() == []


def test_writers_copy_first(flux, image, attached):
    other = {name: torch.zeros_like(tensor) for name, tensor in flux.transformer.state_dict().items()}
    attached.transformer.load_state_dict(other)
    before = bytes_mapped(attached)
    assert before["transformer"] == 0
    assert before["text_encoder"] > 0
    # A write that nothing announces goes to pages of this process.
    with torch.no_grad():
        next(attached.text_encoder.parameters()).add_(1)
    later = tritium.attach("small")
    assert torch.equal(generate(later), image)
    assert not torch.equal(generate(attached), image)


def test_a_fused_lora_changes_only_its_pipeline(flux, image, attached):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    attached.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    assert bytes_mapped(attached)["transformer"] > 0
    attached.transformer.fuse_lora()
    layer = attached.transformer.transformer_blocks[0].attn.to_q.base_layer.weight
    assert not any(lease.maps(layer) for lease in leases())
    assert not torch.equal(layer, flux.transformer.transformer_blocks[0].attn.to_q.weight)
    assert torch.equal(generate(tritium.attach("small")), image)


def test_techniques_leave_shared_weights_alone(image, attached):
    config = tritium.CompilationConfig(engine="eager", fidelity="fast")
    quantize = tritium.Quantize("int8", keep="cpu")
    with tritium.optimize(attached, tritium.Plan(config=config, progress=False, channels_last=True, quantize=quantize)):
        assert not torch.equal(generate(attached, steps=1), image)
    assert torch.equal(generate(attached), image)
    assert torch.equal(generate(tritium.attach("small")), image)
    # Both put other memory in place of a weight; quantizing puts the shared memory back.
    assert bytes_mapped(attached)["transformer"] > 0.9 * sum(
        tensor.nbytes for tensor in attached.transformer.state_dict().values()
    )


def test_settings_and_quantized_linears_arrive(runtime, tmp_path):
    pipe = small_pipelines.flux(1, 1)
    pipe.transformer.save_pretrained(tmp_path)
    config = tritium.QuantizationConfig("fp8")
    pipe.transformer = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, quantization_config=config)
    # Products of weights that are not aligned, as in their file, may round differently.
    for parameter in pipe.transformer.parameters():
        parameter.data = parameter.data.clone()
    pipe.default_sample_size = 7
    pipe.vae.enable_tiling()
    pipe.vae.to(memory_format=torch.channels_last)
    with sharing.keeper("quantized") as keeper:
        keeper.publish(pipe)
        other = tritium.attach("quantized")
        assert other.default_sample_size == 7
        assert other.vae.use_tiling
        assert other.vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
        block, theirs = (p.transformer.transformer_blocks[0].attn.to_q for p in (pipe, other))
        assert type(theirs) is type(block)
        assert theirs.stored.values.dtype == torch.float8_e4m3fn
        assert theirs.provider == block.provider
        assert torch.equal(generate(other), generate(pipe))
        del other, theirs
        gc.collect()


def adapted(pipe):
    peft = pytest.importorskip("peft")
    pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]))


def compiled(pipe):
    pipe.transformer.compile_repeated_blocks()


def offloaded(pipe):
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def of_ours(pipe):
    pipe.transformer.__class__ = type("Transformer", (type(pipe.transformer),), {})


def on_meta(pipe):
    pipe.vae.to("meta")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (adapted, "without adapters and handles"),
        (compiled, "is compiled, and compiled code is not shared"),
        (offloaded, r"has hooks that are not shared \(layerwise_casting\)"),
        (of_ours, "only classes of diffusers and transformers are rebuilt"),
        (on_meta, "is a meta tensor"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_at_once(change, reason, runtime):
    pipe = small_pipelines.flux(1, 1)
    change(pipe)
    with sharing.keeper("refused") as keeper:
        with pytest.raises(SharingError, match=reason):
            keeper.publish(pipe)
        assert keeper.state == "loading"
        assert not list(keeper._files.glob("*"))
        with pytest.raises(SharingError, match="keeper 'refused' is loading"):
            tritium.attach("refused", wait=0.1)


def test_generations_live_as_long_as_their_users(runtime):
    first = small_pipelines.flux(1, 1)
    with sharing.keeper("changing") as keeper:
        assert keeper.publish(first) == 1
        old = tritium.attach("changing")
        second = small_pipelines.flux(1, 1)
        second.vae.to(torch.float64)
        assert keeper.publish(second) == 2
        new = tritium.attach("changing")
        assert (old.vae.dtype, new.vae.dtype) == (torch.float32, torch.float64)
        assert torch.equal(generate(old), generate(first))
        assert {number: len(users) for number, users in keeper.status()["users"].items()} == {1: 1, 2: 1}
        del old
        gc.collect()
        assert until(lambda: set(keeper.status()["users"]) == {2})
        assert [path.name for path in keeper._files.iterdir()] == ["2"]
        del new
        gc.collect()


@pytest.mark.parametrize("how", ["plain", "optimized", "compiled"])
def test_pipelines_stop_with_their_keeper(how, runtime):
    pipe = small_pipelines.flux(1, 1)
    with sharing.keeper("ending") as keeper:
        keeper.publish(pipe)
        other = tritium.attach("ending")
        if how == "optimized":
            config = tritium.CompilationConfig(engine="eager")
            handle = tritium.optimize(other, tritium.Plan(config=config, progress=False))
        elif how == "compiled":
            other.transformer = torch.compile(other.transformer, backend="eager")
        private = other.vae
        unshare(private)
        generate(other)
    assert until(lambda: any(lease.name == "ending" for lease in leases()) is False, 1.0)
    with pytest.raises(
        KeeperLost, match="the weights of keeper 'ending' are gone: the process that kept them has ended"
    ):
        generate(other)
    # What it has copied before goes on.
    private.decode(torch.zeros(1, 4, 2, 2))
    if how == "optimized":
        handle.remove()
        with pytest.raises(KeeperLost):
            generate(other)


def test_a_write_to_unprotected_memory_stops_all_users(runtime, monkeypatch):
    monkeypatch.setattr("tritium.sharing.lease._PROTECTED", ())
    with sharing.keeper("written") as keeper:
        keeper.publish(small_pipelines.flux(1, 1))
        writer, reader = tritium.attach("written"), tritium.attach("written")
        unshare(writer.vae)
        with torch.no_grad():
            # Own memory by now.
            writer.vae.decoder.conv_in.bias.zero_()
            assert not until(lambda: keeper.spoiled != "", 0.6)
            writer.transformer.proj_out.bias.zero_()
        assert until(lambda: keeper.spoiled != "")
        assert keeper.spoiled == f"process {os.getpid()} has written into transformer.proj_out.bias"
        assert until(lambda: not any(lease.name == "written" for lease in leases()))
        with pytest.raises(KeeperLost, match=r"transformer.proj_out.bias was written in place, in memory that other"):
            generate(writer)
        with pytest.raises(KeeperLost, match=r"has written into transformer.proj_out.bias"):
            generate(reader)
        with pytest.raises(SharingError, match="keeper 'written' is draining"):
            tritium.attach("written")


def test_a_name_is_taken_once(keeper):
    with pytest.raises(SharingError, match="a keeper named 'small' is running already"):
        sharing.keeper("small")
    with pytest.raises(SharingError, match=r"there is no keeper named 'other' in .*; start one with `tritium keep"):
        tritium.attach("other")
    with pytest.raises(tritium.errors.ConfigError, match="takes the name of a keeper"):
        tritium.attach(3)


def test_changed_files_are_refused(keeper):
    path = keeper._files / "1" / "transformer" / "config.json"
    content = path.read_text()
    path.write_text(content + " ")
    with pytest.raises(SharingError, match="its fingerprint is not that of the files"):
        tritium.attach("small")
    path.write_text(content)
    assert until(lambda: keeper.users == [])
