"""`--parallel`: how degrees are written, how ranks start, and what is explained without any."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tritium import Parallel
from tritium.bench.collectives import AFTER, explain
from tritium.cli import ranks
from tritium.cli.app import app
from tritium.errors import ConfigError


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def refusal(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    return result.stderr


class TestDegrees:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("auto", Parallel()),
            ("cfg=2,ulysses=4", Parallel(cfg=2, ulysses=4)),
            ("ulysses=2, vae=none", Parallel(ulysses=2, vae=None)),
            ("experts=2,vae=auto", Parallel(experts=2)),
        ],
    )
    def test_how_they_are_written(self, text, expected):
        assert ranks.parallel_of(text) == expected

    @pytest.mark.parametrize("text", ["ulises=2", "ulysses", "ulysses=two", "ulysses=0", "", "vae=most"])
    def test_wrong_ones(self, text):
        with pytest.raises(ConfigError):
            ranks.parallel_of(text)

    def test_the_ranks_to_start(self):
        assert ranks.count_of(Parallel(cfg=2, ulysses=2), None, "cpu") == 4
        assert ranks.count_of(Parallel(), 3, "cpu") == 3
        with pytest.raises(ConfigError, match="needs the number of ranks on a machine without GPUs: --gpus 2"):
            ranks.count_of(Parallel(), None, "cpu")
        with pytest.raises(ConfigError, match="uses 4 ranks and the world has 3"):
            ranks.count_of(Parallel(ulysses=4), 3, "cpu")


class TestRun:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--gpus", "2"), "--gpus is the number of ranks of --parallel"),
            (("--parallel", "auto"), "needs the number of ranks"),
            (("--parallel", "ulysses=2", "--gpus", "3"), "uses 2 ranks and the world has 3"),
            (("--parallel", "ulysses=2", "--eager"), "--parallel cannot be combined with --eager"),
            (("--parallel", "auto", "--recipe", "example"), "cannot be combined with --recipe"),
            (("--parallel", "auto", "--technique", "parallel={}"), "cannot be combined with --technique"),
        ],
    )
    def test_wrong_options_start_nothing(self, arguments, message, monkeypatch):
        monkeypatch.setattr(ranks.subprocess, "run", pytest.fail)
        assert message in refusal("run", *arguments, "--device", "cpu")

    def test_ranks_get_the_same_arguments(self, monkeypatch):
        started = []

        def run(command, check):
            started.append(command)
            return subprocess.CompletedProcess(command, 3)

        monkeypatch.setattr(ranks.subprocess, "run", run)
        options = ("run", "--seed", "3", "--parallel", "cfg=2,ulysses=2", "--device", "cpu")
        assert invoke(*options).exit_code == 3
        ((executable, *launcher),) = started
        assert executable == sys.executable
        assert launcher[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        assert launcher[5:] == ["-m", "tritium", *options]

    @pytest.mark.thorough
    @pytest.mark.parametrize("starts", ["itself", "torchrun"])
    def test_an_image_on_two_ranks(self, starts, tmp_path):
        """The first rank alone prints and writes."""
        common = ["--size", "64x64", "--steps", "2", "--json", "--device", "cpu", "-o", str(tmp_path / "image.png")]
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] * (starts == "torchrun")
        parallel = ["--parallel", "ulysses=2"] if starts == "itself" else []
        command = [sys.executable, "-m", *launcher, "tritium", "run", *parallel, *common]
        environment = {**subprocess.os.environ, "TRITIUM_ENGINE": "eager", "OMP_NUM_THREADS": "1"}
        found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["output"].endswith("image.png")
        assert (tmp_path / "image.png").stat().st_size > 1000


class TestExplain:
    @pytest.fixture(scope="class")
    def flux(self):
        result = invoke("explain", "flux", "--parallel", "ulysses=4", "--world", "4", "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def test_four_exchanges_a_block_and_two_joins(self, flux):
        (graph,) = flux["graphs"]
        assert graph["nodes"] > 100
        names = [one["name"] for one in flux["collectives"]]
        assert names == ["all_to_all_single"] * 16 + ["all_gather_into_tensor"] * 2
        first = flux["collectives"][0]
        assert first["shape"] == [4, 1, 6, 1152, 128]
        # Three quarters of 4608 / 4 tokens of 3072 in bfloat16 go to other ranks.
        assert first["bytes"] == 1152 * 3072 * 2 * 3 // 4
        assert first["block"] == "transformer_blocks.0"
        assert first["exposed"] == pytest.approx(15e-6 + first["bytes"] / 350e9, rel=1e-3)

    def test_estimates_are_of_the_published_model(self, flux):
        assert flux["blocks"]["FluxSingleTransformerBlock"] == {"explained": 2, "published": 38}
        assert flux["milliseconds"]["computing"] == pytest.approx(27.5, rel=0.05)
        assert flux["degrees"] == {"ulysses": 4}
        assert flux["padding"] == 0

    def test_experts_are_added_up_once_a_block(self, recwarn):
        found = explain("hidream", Parallel(experts=2), 2)
        assert not [str(one.message) for one in recwarn if "FakeTensor" in str(one.message)]
        assert len(found.graphs) == 1
        # Two blocks of each kind; single blocks also have the text.
        assert [one.name for one in found.collectives] == ["all_reduce"] * 4
        assert [one.shape for one in found.collectives] == [(4096, 2560)] * 2 + [(4480, 2560)] * 2
        # The result is sent once and received once on each of two ranks: 2 (P - 1) / P of its bytes.
        assert found.collectives[0].bytes == 4096 * 2560 * 2
        assert list(found.by_block) == ["double_stream_blocks", "single_stream_blocks"]
        assert found.blocks["HiDreamBlock"] == (4, 48)
        assert found.best.work.experts == 4
        assert found.best.work.mixtures == 48
        # 17.1 billion weights in bfloat16, of which the experts are the most.
        assert found.best.work.weights == pytest.approx(34.2e9, rel=0.01)
        assert found.best.work.expert_weights > found.best.work.weights / 2

    @pytest.mark.thorough
    def test_tokens_of_routed_models(self):
        found = explain("hidream", Parallel(ulysses=2), 2).by_block
        names = {block: [one.name for one in several] for block, several in found.items()}
        assert names == {
            "double_stream_blocks": ["all_to_all_single"] * 4,
            "single_stream_blocks": ["all_to_all_single"] * 4,
            AFTER: ["all_gather_into_tensor"],
        }

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--parallel", "ulysses=2"), "needs a model"),
            (("flux", "--parallel", "auto"), "--world 4"),
            (("flux", "--parallel", "ulysses=4", "--world", "2"), "uses 4 ranks and the world has 2"),
            (("flx", "--parallel", "ulysses=2"), "did you mean 'flux'"),
            (("flux", "--parallel", "ulysses=2", "--engine", "eager"), "leave out --engine"),
        ],
    )
    def test_wrong_options(self, arguments, message):
        assert message in refusal("explain", *arguments)
