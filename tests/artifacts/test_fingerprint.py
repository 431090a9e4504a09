"""A fingerprint is the same for the same machine, versions and model, and says in words what differs."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritium
from tritium import fusions, ops
from tritium.artifacts import digest as digests
from tritium.artifacts.fingerprint import Fingerprint, config_digest
from tritium.errors import FingerprintError

TEXT = st.text(max_size=8)
FINGERPRINTS = st.builds(
    Fingerprint,
    device=TEXT,
    capability=st.none() | TEXT,
    instructions=st.lists(TEXT, max_size=3).map(tuple),
    threads=st.none() | st.integers(0, 512),
    torch=TEXT,
    triton=st.none() | TEXT,
    tritium=TEXT,
    diffusers=st.none() | TEXT,
    python=TEXT,
    models=st.dictionaries(TEXT, TEXT, max_size=3).map(lambda found: tuple(sorted(found.items()))),
)

HERE = Fingerprint(
    device="AMD EPYC",
    capability="AVX512 avx2 avx512",
    instructions=("avx2", "avx512f"),
    threads=2,
    torch="2.11.0",
    triton=None,
    tritium="ab" * 32,
    diffusers="0.36.0",
    python="3.11",
    models=(("transformer", "1"), ("vae", "2")),
)


def test_of_this_process():
    found = Fingerprint.current({"transformer": {"width": 4}}, "cpu")
    assert found == Fingerprint.current({"transformer": {"width": 4}}, "cpu")
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert [name for name, _ in found.models] == ["transformer"]
    assert Fingerprint.current({}, "cpu").differences(found) == ["models: transformer only there"]


def test_the_number_of_threads_is_part_of_a_cpu():
    before, threads = Fingerprint.current({}, "cpu"), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert Fingerprint.current({}, "cpu").differences(before) == [f"threads: {threads} there, {threads + 1} here"]
    finally:
        torch.set_num_threads(threads)


@given(FINGERPRINTS)
def test_round_trip_through_json(found):
    assert Fingerprint.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.differences(found) == []


@given(FINGERPRINTS, FINGERPRINTS)
def test_a_line_for_each_ingredient_that_differs(here, there):
    different = [field.name for field in fields(here) if getattr(here, field.name) != getattr(there, field.name)]
    assert [line.partition(":")[0] for line in here.differences(there)] == different


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "2.13.0"}, "torch: 2.13.0 there, 2.11.0 here"),
        ({"triton": "3.6.0"}, "triton: 3.6.0 there, none here"),
        ({"diffusers": None}, "diffusers: none there, 0.36.0 here"),
        ({"threads": 8}, "threads: 8 there, 2 here"),
        ({"device": "NVIDIA H200"}, "device: NVIDIA H200 there, AMD EPYC here"),
        ({"tritium": "cd" * 32}, "tritium: other code there (cdcdcdcdcdcd), abababababab here"),
        ({"instructions": ("amx_tile", "avx2")}, "instructions: amx_tile only there, avx512f only here"),
        ({"models": (("transformer", "9"), ("vae", "2"))}, "models: transformer is configured otherwise"),
        (
            {"models": (("transformer", "9"), ("unet", "2"))},
            "models: transformer is configured otherwise; unet only there, vae only here",
        ),
    ],
)
def test_differences_in_words(change, words):
    assert HERE.differences(replace(HERE, **change)) == [words]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "is a mapping, got list"),
        ({**HERE.to_dict(), "torhc": "2"}, r"no ingredient 'torhc'; did you mean 'torch'\?"),
        ({name: value for name, value in HERE.to_dict().items() if name != "torch"}, "lacks torch"),
        ({**HERE.to_dict(), "instructions": None}, "instructions are a list"),
        ({**HERE.to_dict(), "models": [1]}, "models a mapping"),
    ],
)
def test_anything_but_a_written_fingerprint_is_refused(found, words):
    with pytest.raises(FingerprintError, match=words):
        Fingerprint.from_dict(found)


class Kind(Enum):
    ONE = "one"


class TestModels:
    @pytest.mark.parametrize(
        ("here", "there"),
        [
            # Where a configuration came from.
            ({"width": 4, "text": {"_name_or_path": "/here"}}, {"text": {}, "width": 4, "transformers_version": "5"}),
            # The containers and types that hold equal values.
            ({"axes": (4, 4, 8)}, {"axes": [4, 4, 8]}),
            ({"axes": {3, 1, 2}}, {"axes": {1, 2, 3}}),
            ({"kind": Kind.ONE}, {"kind": "one"}),
            ({"dtype": torch.float32}, {"dtype": "torch.float32"}),
            # Addresses of objects.
            ({"processor": object()}, {"processor": object()}),
        ],
    )
    def test_equal_configurations(self, here, there):
        assert config_digest(here) == config_digest(there)

    @pytest.mark.parametrize(
        "other", [{"width": 5}, {"width": 4.0}, {"width": "4"}, {"width": 4, "depth": None}, {}, {"width": {"a": 4}}]
    )
    def test_every_other_difference_counts(self, other):
        assert config_digest(other) != config_digest({"width": 4})

    def test_a_model_of_diffusers(self, tmp_path):
        from support.small_models import flux

        model = flux()
        model.save_pretrained(tmp_path / "here")
        again = type(model).from_pretrained(tmp_path / "here")
        assert again.config["_name_or_path"] != model.config.get("_name_or_path")
        assert config_digest(again.config) == config_digest(model.config)
        assert config_digest(flux(layers=2).config) != config_digest(model.config)


class TestPackage:
    def test_every_file_that_decides_what_a_graph_becomes(self):
        assert {*ops.files(), *fusions.files()} <= set(digests.package_files())

    def test_moving_the_package_changes_nothing_and_editing_it_does(self, tmp_path):
        def digest(source: Path) -> str:
            program = f"import sys; sys.path.insert(0, {str(source)!r})\nfrom tritium.artifacts import digest as d\n"
            program += f"assert d.__file__.startswith({str(source)!r}); print(d.package_digest())"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        package = tmp_path / "elsewhere" / "tritium"
        shutil.copytree(Path(tritium.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        assert digest(package.parent) == digests.package_digest()
        file = package / "ops" / "op.py"
        file.write_text(file.read_text() + "\n# edited\n")
        assert digest(package.parent) != digests.package_digest()
