"""The worker: images as from the library, steps, previews, cancellations, edits and failures."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from support import workers
from tritium.serve import images, previews
from tritium.serve.engine import Cancelled, Done, Failed, Preview, Started, Step


@pytest.fixture(scope="module")
def worker():
    worker = workers.worker(batches=(1, 2))
    worker.load()
    return worker


def test_an_image_equals_the_library_call(worker):
    events = workers.of("a", workers.run(worker, workers.job()))
    assert events[0] == Started(batched=1)
    assert [event for event in events if isinstance(event, Step)] == [Step(index=i, total=4) for i in (1, 2, 3, 4)]
    assert np.array_equal(workers.pixels(events[-1]), workers.library(worker.pipe, workers.job()))


def test_each_of_a_batch_starts_from_its_own_seed(worker):
    events = workers.run(worker, workers.job("a"), workers.job("b", seed=4))
    for name, seed in (("a", 3), ("b", 4)):
        done = workers.of(name, events)[-1]
        alone = workers.library(worker.pipe, workers.job(seed=seed)).astype(int)
        assert np.abs(workers.pixels(done).astype(int) - alone).max() <= 1
        assert done.facts["batched"] == 2


@pytest.mark.parametrize("step", [1, 3])
def test_after_a_cancelled_job_the_next_is_equal(worker, step):
    reference = workers.library(worker.pipe, workers.job())

    def after(_name, events):
        return "delete" if any(event == Step(index=step, total=4) for _, event in events) else None

    events = workers.of("a", workers.run(worker, workers.job(), cancelled=after))
    assert events[-1] == Cancelled(why="delete")
    assert [event.index for event in events if isinstance(event, Step)] == list(range(1, step + 1))
    assert np.array_equal(workers.pixels(workers.run(worker, workers.job())[-1][1]), reference)


def test_a_cancelled_member_leaves_the_batch_alone(worker):
    batch = workers.job("a"), workers.job("b", seed=4)
    whole = workers.run(worker, *batch)
    cut = workers.run(
        worker, *batch, cancelled=lambda name, events: "deadline" if (name, len(events) > 4) == ("a", True) else None
    )
    assert workers.of("a", cut)[-1] == Cancelled(why="deadline")
    assert workers.of("b", cut)[-1].images == workers.of("b", whole)[-1].images


def test_an_error_leaves_the_scheduler_clean(worker, monkeypatch):
    reference = workers.run(worker, workers.job())[-1][1].images
    with monkeypatch.context() as patch:
        patch.setattr(type(worker.pipe.vae), "decode", lambda *_args, **_kwargs: 1 / 0)
        failed = workers.of("a", workers.run(worker, workers.job()))[-1]
    assert failed == Failed(code="internal", message="ZeroDivisionError: division by zero")
    assert worker.pipe.scheduler.step_index is None
    assert workers.run(worker, workers.job())[-1][1].images == reference


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (ValueError("something inside"), "internal"),
    ],
)
def test_errors_have_codes(worker, monkeypatch, error, code):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(type(worker.pipe.transformer), "forward", fail)
    failed = workers.of("a", workers.run(worker, workers.job()))[-1]
    assert (failed.code, failed.retry) == (code, False)


def test_arguments_that_the_pipeline_refuses_are_invalid(worker):
    # FLUX takes no more than 512 tokens; the check is the pipeline's own.
    long = workers.worker(text_tokens=1024)
    long.pipe, long._caller, long.bank, long.previewer = worker.pipe, worker._caller, None, None
    long._scheduler = worker._scheduler
    failed = workers.of("a", workers.run(long, workers.job()))[-1]
    assert (failed.code, failed.retry) == ("invalid_job", False)
    assert "max_sequence_length" in failed.message


def test_previews_come_between_the_steps(worker):
    events = workers.of("a", workers.run(worker, workers.job(partial_images=3)))
    previews = [event for event in events if isinstance(event, Preview)]
    assert [(preview.index, preview.step) for preview in previews] == [(0, 1), (1, 2), (2, 3)]
    assert Image.open(io.BytesIO(previews[0].image)).size == (32, 32)


def test_previews_show_where_the_steps_lead(worker):
    scheduler = type(worker.pipe.scheduler).from_config(worker.pipe.scheduler.config)
    scheduler.set_timesteps(4, mu=1.0)
    image, noise = torch.randn(2, 1, 16, 4).unbind(0)
    before = noise
    for time in scheduler.timesteps:
        after = scheduler.step(noise - image, time, before, return_dict=False)[0]
        assert torch.allclose(previews.clean(scheduler, before, after), image, atol=1e-4)
        before = after
    assert previews.clean(scheduler, None, after) is after


def test_a_preview_has_the_colours_of_the_latents(worker):
    """On an image that the map was not fitted to, it is nearer than the mean colour."""
    torch.manual_seed(1)
    image = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4) * 2 - 1, size=(32, 32))
    with torch.no_grad():
        latents = worker.pipe.vae.encode(image).latent_dist.mode()
    packed = worker.pipe._pack_latents(latents, *latents.shape)
    preview = np.asarray(worker.previewer.image(packed, 32, 32)).astype(float) / 127.5 - 1
    wanted = torch.nn.functional.interpolate(image, size=preview.shape[:2], mode="area")[0].permute(1, 2, 0).numpy()
    assert np.square(preview - wanted).mean() < np.square(wanted.mean((0, 1)) - wanted).mean()


@pytest.mark.parametrize(("output_format", "name"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_formats(worker, output_format, name):
    done = workers.run(worker, workers.job(output_format=output_format, compression=80))[-1][1]
    image = Image.open(io.BytesIO(done.images[0]))
    assert (image.format, image.size, done.facts["output_format"]) == (name, (32, 32), output_format)


def test_an_edit_starts_from_the_upload(worker):
    jobs = [workers.job(kind="edit", images=(workers.upload(colour),)) for colour in ("red", "blue")]
    red, blue = (workers.pixels(workers.run(worker, job)[-1][1]) for job in jobs)
    assert not np.array_equal(red, blue)


def test_masks_are_white_where_openai_has_them_transparent(worker):
    for content in (workers.upload((0, 0, 0, 0), "RGBA"), workers.upload(255, "L")):
        assert images.decode_mask(content, (32, 32)).getextrema() == (255, 255)
    assert images.decode_mask(workers.upload((0, 0, 0, 255), "RGBA"), (32, 32)).getextrema() == (0, 0)
    masks = [workers.upload((0, 0, 0, alpha), "RGBA") for alpha in (255, 0)]
    jobs = [workers.job(kind="edit", images=(workers.upload(),), mask=mask) for mask in masks]
    assert not np.array_equal(*(workers.pixels(workers.last(worker, job)) for job in jobs))


def test_an_optimized_worker():
    """One test: every test starts without compiled code."""
    worker = workers.worker(eager=False, sizes=((32, 32), (48, 32)))
    (model,) = worker.load()
    assert model.sizes == ((32, 32), (48, 32))
    assert (model.kinds, model.steps, model.fidelities) == (("image", "edit"), 4, ("exact", "close"))
    assert set(model.takes) == {"negative_prompt", "guidance", "true_cfg", "mask"}
    assert set(model.seconds) == set(model.sizes)

    # What was promised compiles nothing.
    jobs = [workers.job(), workers.job(width=48), workers.job(negative_prompt="blue", true_cfg=2.0)]
    jobs.append(workers.job(kind="edit", images=(workers.upload(),)))
    jobs.append(workers.job(kind="edit", images=(workers.upload(),), mask=workers.upload(255, "L")))
    assert all(isinstance(workers.last(worker, job), Done) for job in jobs)
    assert (worker.counts().recompiles, worker.counts().violations) == (0, 0)

    # Fidelity "exact" is the stock pipeline.
    exact = workers.last(worker, workers.job(fidelity="exact"))
    assert exact.facts["way"] == "exact"
    assert workers.last(worker, workers.job()).facts["way"] == "default"

    # What was not promised runs eagerly and is counted.
    assert isinstance(workers.last(worker, workers.job(height=48)), Done)
    assert worker.counts().recompiles == 0
    assert worker.counts().violations > 0

    pipe = worker.pipe
    worker.close()
    assert np.array_equal(workers.pixels(exact), workers.library(pipe, workers.job()))


@pytest.mark.codegen
@pytest.mark.thorough
def test_a_second_start_reads_the_first_ones_code(tmp_path, in_process):
    program = """
from support import workers
from tritium import compat
worker = workers.worker(eager=False, edits=False, config={}, artifacts=FILE)
worker.load()
print(compat.dynamo.inductor_seconds())
"""
    program = program.replace("FILE", repr(str(tmp_path / "code")))
    cold, warm = (float(in_process(program, cache=tmp_path / name).split()[-1]) for name in ("cold", "warm"))
    assert (tmp_path / "code").stat().st_size > 0
    assert warm < cold / 2
