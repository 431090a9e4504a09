"""LoRAs of a bank: the library's images, switched without compiling, and refused where they do not fit."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support import promised, small_pipelines, workers
from tritium import compat
from tritium.errors import ConfigError
from tritium.serve.engine import Failed, Lora


def weights(pipe, rank, paths, alpha=None):
    """A LoRA file's tensors, large enough to be seen."""
    torch.manual_seed(rank)
    found = {}
    for path in paths:
        layer = pipe.transformer.get_submodule(path)
        found[f"transformer.{path}.lora_A.weight"] = torch.randn(rank, layer.in_features)
        found[f"transformer.{path}.lora_B.weight"] = torch.randn(layer.out_features, rank)
        if alpha is not None:
            found[f"transformer.{path}.alpha"] = torch.tensor(float(alpha))
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two LoRAs that change different layers, with different ranks."""
    folder, pipe = tmp_path_factory.mktemp("loras"), small_pipelines.flux(1, 1)
    block = "transformer_blocks.0.attn"
    tensors = {"small": weights(pipe, 2, [f"{block}.to_q"]), "large": weights(pipe, 5, [f"{block}.to_q", "proj_out"])}
    for name, found in tensors.items():
        save_file(found, folder / f"{name}.safetensors")
    return {name: str(folder / f"{name}.safetensors") for name in tensors}


@pytest.fixture(scope="module")
def worker(files):
    worker = workers.worker(loras=files)
    worker.load()
    return worker


def in_the_library(files, *loras):
    pipe = small_pipelines.flux(1, 1)
    for lora in loras:
        pipe.load_lora_weights(files[lora.name], adapter_name=lora.name)
    if loras:
        pipe.set_adapters([lora.name for lora in loras], [lora.scale for lora in loras])
    return workers.library(pipe, workers.job()).astype(int)


SETS = [
    (),
    (Lora(name="small"),),
    (Lora(name="large", scale=0.5),),
    (Lora(name="large", scale=-2.0),),
]


def test_images_are_those_of_the_library(worker, files):
    images = []
    for loras in (*SETS, ()):
        image = workers.pixels(workers.last(worker, workers.job(loras=loras)))
        assert np.abs(image.astype(int) - in_the_library(files, *loras)).max() <= 1, loras
        images.append(image)
    # Without LoRAs exactly, also after others; and each set has an image of its own.
    assert np.array_equal(images[0], in_the_library(files))
    assert np.array_equal(images[0], images[-1])
    assert len({image.tobytes() for image in images}) == len(SETS)


def test_ranks_that_do_not_fit_are_refused(worker, files):
    both = (Lora(name="small"), Lora(name="large"))
    before = workers.last(worker, workers.job(loras=both[:1])).images
    failed = workers.last(worker, workers.job(loras=both))
    assert (type(failed), failed.code) == (Failed, "invalid_job")
    assert "have ranks 2 + 5 at transformer_blocks.0.attn.to_q, and this server's layers have 5" in failed.message
    assert workers.last(worker, workers.job(loras=both[:1])).images == before

    larger = workers.worker(loras=files, lora_rank=7)
    larger.load()
    image = workers.pixels(workers.last(larger, workers.job(loras=both)))
    assert np.abs(image.astype(int) - in_the_library(files, *both)).max() <= 1


def test_switching_compiles_nothing(files):
    worker = workers.worker(eager=False, loras=files)
    (model,) = worker.load()
    assert model.loras == ("small", "large")
    with promised.Compiles() as compiles:
        for loras in (SETS[1], SETS[3], (), SETS[2], SETS[1]):
            image = workers.pixels(workers.last(worker, workers.job(loras=loras)))
            assert np.abs(image.astype(int) - in_the_library(files, *loras)).max() <= 1
    assert compiles.count == 0
    assert (worker.counts().recompiles, worker.counts().violations) == (0, 0)
    assert compat.dynamo.graphs_compiled() > 0
    worker.close()


def test_files_that_do_not_fit(files, tmp_path):
    other = {"transformer.transformer_blocks.7.attn.to_q.lora_A.weight": torch.randn(2, 32)}
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="LoRA 'x'"):
        workers.worker(loras={"x": str(tmp_path / "other.safetensors")}).load()
    with pytest.raises(ConfigError, match="LoRA 'x': there is no file"):
        workers.worker(loras={"x": str(tmp_path / "absent.safetensors")}).load()
    with pytest.raises(ConfigError, match="a LoRA rank of 1 is below 5"):
        workers.worker(loras=files, lora_rank=1).load()
