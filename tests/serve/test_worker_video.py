"""The worker over a stock Wan pipeline: videos, guidance as a larger batch, and a pipeline without a callback."""

import io

import diffusers
import pytest
import torch
from PIL import Image
from transformers import UMT5Config, UMT5EncoderModel

from support import small_pipelines, small_vaes, workers
from support.zoo import ZOO
from tritium.serve import images
from tritium.serve.engine import Cancelled, Done, Preview, Step
from tritium.serve.worker import PipelineWorker
from tritium.serve.worker_settings import WorkerSettings

FRAMES = 5


def wan():
    transformer = ZOO["wan"].build()
    channels = transformer.config.in_channels
    words = small_pipelines.word_tokenizer(
        ["<pad>", "</s>", "<unk>"], "$A </s>", unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )
    torch.manual_seed(0)
    text = UMT5Config(
        vocab_size=len(words), d_model=transformer.config.text_dim, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    return diffusers.WanPipeline(
        tokenizer=words,
        text_encoder=UMT5EncoderModel(text).eval(),
        vae=small_vaes.wan(z_dim=channels, latents_mean=[0.0] * channels, latents_std=[1.0] * channels).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=transformer.eval(),
    )


def settings(**changes):
    fields = {"pipeline": "", "name": "wan", "sizes": ((32, 32),), "steps": 3, "frames": (FRAMES,), "text_tokens": 8}
    return WorkerSettings(**{**fields, "device": "cpu", "eager": True, "config": {"engine": "eager"}, **changes})


def job(**changes):
    fields = {"model": "wan", "kind": "video", "frames": FRAMES, "steps": 3, "output_format": "mp4"}
    return workers.job(**{**fields, "guidance": 5.0, **changes})


@pytest.fixture(scope="module")
def worker():
    worker = PipelineWorker(settings(), wan)
    (worker.model,) = worker.load()
    return worker


def test_a_video(worker):
    events = workers.of("a", workers.run(worker, job(partial_images=1)))
    assert [event.index for event in events if isinstance(event, Step)] == [1, 2, 3]
    assert [event.step for event in events if isinstance(event, Preview)] == [1]
    done = events[-1]
    assert done.facts["output_format"] == ("mp4" if images.can_write_mp4() else "gif")
    if done.facts["output_format"] == "gif":
        video = Image.open(io.BytesIO(done.images[0]))
        # The pipeline makes two latent frames of these, and this VAE three frames of two.
        assert (video.format, video.size, video.n_frames) == ("GIF", (32, 32), 3)
    assert workers.last(worker, job()).images == done.images


def test_a_cancelled_video(worker):
    after = workers.of(
        "a", workers.run(worker, job(), cancelled=lambda _, events: "delete" if len(events) > 2 else None)
    )
    assert after[-1] == Cancelled(why="delete")
    assert len(after) == 4


def test_its_model(worker):
    assert (worker.model.kinds, worker.model.frames) == (("video",), (FRAMES,))
    assert set(worker.model.takes) == {"negative_prompt", "guidance"}


def test_guidance_compiles_nothing_after_the_warm_up():
    """With guidance the batch of the denoiser is the same here, and doubled in other pipelines: both are promised."""
    worker = PipelineWorker(settings(eager=False), wan)
    worker.load()
    done = [workers.last(worker, job(guidance=guidance)) for guidance in (5.0, 1.0, None)]
    assert all(isinstance(event, Done) for event in done)
    assert (worker.counts().recompiles, worker.counts().violations) == (0, 0)
    worker.close()


class NoCallback(diffusers.FluxPipeline):
    """A pipeline whose call has no `callback_on_step_end`, as about half of diffusers' have none."""

    def __call__(self, prompt, height, width, num_inference_steps, generator, output_type, max_sequence_length):
        return super().__call__(
            prompt,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            generator=generator,
            output_type=output_type,
            max_sequence_length=max_sequence_length,
        )


def test_a_pipeline_without_a_callback_is_followed_and_stopped():
    worker = PipelineWorker(workers.settings(), lambda: NoCallback(**small_pipelines.flux().components))
    (model,) = worker.load()
    assert model.takes == ()
    events = workers.of("a", workers.run(worker, workers.job()))
    assert [event for event in events if isinstance(event, Step)] == [Step(index=i, total=4) for i in (1, 2, 3, 4)]
    stopped = workers.run(worker, workers.job(), cancelled=lambda _, found: "delete" if len(found) > 2 else None)
    assert workers.of("a", stopped)[-1] == Cancelled(why="delete")
    assert "step" not in worker.pipe.scheduler.__dict__
    assert workers.last(worker, workers.job()).images == events[-1].images
