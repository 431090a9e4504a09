"""The wheel: its files, its metadata, and what it does where nothing else of this repository is."""

import base64
import contextlib
import email
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest
import torch

import tritium
from support import installed, scripts
from support.installed import EXTRAS, Environment
from tritium.cli.doctor import PYTHONS

PROJECT = tomllib.loads((scripts.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What pip adds to the files of the package.
ADDED = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE", "licenses/NOTICE"}

LEAN = """
import sys
import torch
before = set(sys.modules)
import tritium
print(tritium.__file__)
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in ("tritium", *sys.stdlib_module_names)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return installed.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(site):
    (path,) = site.glob("*.dist-info/METADATA")
    return email.message_from_string(path.read_text(encoding="utf-8"))


def test_it_has_every_file_of_the_package_and_no_other(site):
    source = scripts.ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "tritium").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    about = {name for name in found if ".dist-info/" in name}
    assert found - about == expected
    assert {name.partition("/")[2] for name in about} == ADDED


def test_its_metadata(metadata):
    assert (metadata["Version"], metadata["License-Expression"]) == (tritium.__version__, "Apache-2.0")
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    # The core needs torch alone.
    assert [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line] == ["torch>=2.11"]
    pythons = [
        f"{major}.{minor}"
        for major, minor in re.findall(r":: (\d)\.(\d+)$", "\n".join(metadata.get_all("Classifier")), re.M)
    ]
    assert pythons[0] == "{}.{}".format(*PYTHONS[0])
    assert pythons[-1] == "{}.{}".format(*PYTHONS[1])
    newest = int(pythons[-1].partition(".")[2])
    assert set(metadata["Requires-Python"].split(",")) == {f">={pythons[0]}", f"<3.{newest + 1}"}


def test_its_description_has_no_link_into_a_checkout(metadata):
    readme = (scripts.ROOT / "README.md").read_text(encoding="utf-8")
    description = metadata.get_payload()
    relative = r"\]\((?!https:)"
    assert re.search(relative, readme)
    assert not re.search(relative, description)
    assert "<!--" not in description
    assert re.findall(r"^#.*", description, re.MULTILINE) == re.findall(r"^#.*", readme, re.MULTILINE)


def test_one_version_everywhere():
    citation = (scripts.ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (scripts.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (date,) = re.findall(r"^date-released: (.*)$", citation, re.MULTILINE)
    assert f"\nversion: {tritium.__version__}\n" in citation
    assert re.findall(r"^## (.*)$", changelog, re.MULTILINE)[0] == f"{tritium.__version__}, {date}"


def test_the_sdist_takes_every_file_of_the_root():
    listed = subprocess.run(["git", "ls-files"], cwd=scripts.ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    tracked = {name for name in listed.stdout.splitlines() if "/" not in name} - {".gitignore"}
    manifest = (scripts.ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    included = {name for line in re.findall(r"^include (.*)$", manifest, re.MULTILINE) for name in line.split()}
    assert tracked - included == {"LICENSE", "MANIFEST.in", "NOTICE", "README.md", "pyproject.toml", "setup.py"}


def test_importing_the_unpacked_wheel_is_lean(site, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", LEAN], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    where, modules = done.stdout.splitlines()
    assert where == str(site / "tritium" / "__init__.py")
    assert modules == "[]"


BACKEND = """
import torch, tritium

model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.GELU()).eval()
x = torch.randn(2, 16)
with torch.inference_mode():
    compiled = torch.compile(model, backend="tritium")
    torch.testing.assert_close(compiled(x), model(x))
print(sorted(tritium.explain(compiled).sites))
"""


def wait_until_ready(url, server, seconds=600):
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server is not ready: exit code {server.poll()}")


@pytest.mark.thorough
@pytest.mark.codegen
class TestInstalled:
    """The wheel in environments of their own: with torch alone, and with extras; run from a folder outside the checkout."""

    @pytest.fixture(scope="class")
    def alone(self, wheel, tmp_path_factory) -> Environment:
        environment = Environment.create(tmp_path_factory.mktemp("alone"))
        environment.install(f"torch=={torch.__version__.partition('+')[0]}", str(wheel))
        return environment

    @pytest.fixture(scope="class")
    def full(self, alone, wheel) -> Environment:
        alone.install(f"{wheel}[{','.join(EXTRAS)}]")
        return alone

    def test_torch_alone(self, alone):
        assert "gelu" in alone.python("-c", BACKEND)
        done = alone.run("tritium", "doctor", check=False)
        assert done.returncode == 2
        assert "pip install 'tritium[cli]'" in done.stderr

    def test_extras(self, full):
        assert "ok" in full.run("tritium", "doctor").stdout
        full.run("tritium", "run", "--size", "64x64", "--steps", "2", "-o", "out.png")
        assert (full.folder / "out.png").read_bytes().startswith(b"\x89PNG")
        full.run("tritium", "explain", "example-transformer", "--html", "report.html")
        assert "<html" in (full.folder / "report.html").read_text(encoding="utf-8")

    def test_the_server_answers_a_request(self, full):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        promised = ("--size", "64x64", "--steps", "2", "--no-edits")
        with full.started("tritium", "serve", "example", "--port", str(port), *promised) as server:
            wait_until_ready(f"{address}/readyz", server)
            order = json.dumps({"prompt": "a red circle", "size": "64x64", "output_format": "png"}).encode()
            request = urllib.request.Request(f"{address}/v1/images/generations", order)
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=120) as response:
                image = json.load(response)["data"][0]["b64_json"]
        assert base64.b64decode(image).startswith(b"\x89PNG")
        assert server.returncode == 0

    def test_an_example_from_outside(self, full):
        shutil.copy(scripts.ROOT / "examples" / "image.py", full.folder)
        assert "FluxTransformer2DModel" in full.python("image.py")
