from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.bench import ROW as A_ROW
from support.bench import Tiny
from tritium import cli, envs, fusions, measure, tuning
from tritium.bench import comparison, workloads
from tritium.bench.results import Results
from tritium.cli import progress
from tritium.cli.app import app
from tritium.tuning import Verdict
from tritium.tuning import compare as trials

ROW = dataclasses.replace(A_ROW, median_ms=100.0)


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, list(arguments), env=environment)


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measuring by made-up rows, which a test may change; what was asked for is kept."""
    asked, rows = [], [ROW]

    def fake(workload, settings, notify):
        asked.append((workload.name, settings))
        notify(f"{workload.name}: timing", 0.5)
        found = [dataclasses.replace(row, workload=workload.name) for row in rows]
        settings.on_rows(found)
        return found

    monkeypatch.setattr(workloads, "run", fake)
    return SimpleNamespace(asked=asked, rows=rows)


@pytest.mark.parametrize("command", ["doctor", "bench", "explain", "verify"])
def test_every_command_has_help(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert command in invoke("--help").output


@pytest.mark.parametrize("command", ["bench", "explain"])
def test_an_unknown_workload_names_the_nearest(command):
    result = invoke(command, "flx")
    assert result.exit_code == 2
    said = "there is no workload 'flx', and no folder of that name holds a pipeline; did you mean 'flux'?"
    assert result.stderr.strip() == f"tritium: {said}"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("command", "others"),
    [("bench", ["example", "attention", "sparse-attention"]), ("explain", ["example"])],
)
def test_an_unknown_workload_lists_all_that_is_valid(command, others):
    stderr = invoke(command, "nosuch").stderr
    assert "no folder of that name holds a pipeline; valid: " in stderr
    assert all(repr(name) in stderr for name in (*workloads.WORKLOADS, *others))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "flux", "--mode", "defalt"], "did you mean 'default'"),
        (["bench", "flux", "--against", "eager,inducto"], "did you mean 'inductor'"),
        (["bench", "flux", "--graphs", "--mode", "reduce-overhead"], "compares with mode 'reduce-overhead' already"),
        (["bench", "flux", "--quantize", "int9"], "Plan.quantize: linear cannot be 'int9'; did you mean 'int8'?"),
        (
            ["bench", "flux", "--quantize", "fp8", "--mode", "max-autotune"],
            "has no mode: leave out --mode max-autotune",
        ),
        (["bench", "families", "--quantize", "fp8"], "--quantize: not for families"),
        (["bench", "families", "--skip", "RR1"], "--skip: not for families"),
        (["bench", "flux", "--skip", "RR1"], "--skip concerns whole pipelines: write `tritium bench pipeline flux"),
        (["bench", "pipeline", "flux", "--skip", "RRX"], "Plan.skip: 'RRX' is no row of a table"),
        (["bench", "flux", "--device", "tpu"], "device 'tpu' is not known"),
        (["bench", "kl-decode", "--regime", "dynamc"], "did you mean 'dynamic'"),
        (["bench", "kl-decode", "flux", "--regime", "dynamic"], "flux has no dynamic sizes"),
        (["bench", "attention", "--regime", "dynamic"], "attention is none"),
        (["bench", "flux", "--compare", "missing.json"], "cannot be read"),
        (["bench", "flux", "families"], "families is a suite, which is measured alone"),
        (["bench", "families", "flux"], "takes no further workload, got flux; use --only NAME"),
        (["bench", "families", "--only", "flux512"], "did you mean 'flux-512'"),
        (["bench", "families", "--graphs", "--mode", "max-autotune"], "--mode, --graphs: not for families"),
        (["bench", "pipeline"], "write `tritium bench pipeline flux`"),
        (["bench", "pipeline", "flx"], "did you mean 'flux'"),
        (["bench", "host", "--only", "flux"], "--only names families"),
        (["bench", "flux", "--only", "flux-512"], "--only and --budget concern suites"),
        (["explain", "flux", "--engine", "egaer"], "did you mean 'eager'"),
        (["explain", "flux", "--engine", "eager", "--dump", "kernels"], "engine 'eager' generates none"),
        (["explain", "flux", "--dump", __file__], "cannot be made"),
        (["explain", "--fusions", "--dump", "kernels"], "leave out --dump"),
        (["bench", "flux", "--profile", "--against", "inductor"], "--against needs eager"),
        (["explain"], "explain needs a workload, one of "),
        (["explain", "flux", "--fusions"], "leave out a workload"),
        (["explain", "--fusions", "--engine", "eager", "--device", "cpu"], "leave out --engine, --device"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_wrong_variable_is_one_line_and_exit_code_2():
    result = invoke("explain", "flux", TRITIUM_ENGIN="eager")
    assert result.exit_code == 2
    assert "did you mean 'TRITIUM_ENGINE'" in result.stderr


def test_bench_prints_a_table_and_writes_what_it_printed(measured, tmp_path):
    path = tmp_path / "results.json"
    result = invoke("bench", "flux", "wan", "--against", "inductor", "--seconds", "3", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert [name for name, _ in measured.asked] == ["flux", "wan"]
    assert measured.asked[0][1].variants == ["inductor", "tritium"]
    assert measured.asked[0][1].seconds == 3.0
    assert "[ 50%] flux: timing" in result.stderr
    assert "1.25x" in result.stdout
    assert "shrunk for the CPU" in result.stdout
    assert [row.workload for row in Results.load(path).rows] == ["flux", "wan"]


@pytest.mark.parametrize("name", ["", "file/results.json"])
def test_an_unwritable_file_is_refused_before_measuring(measured, tmp_path, name):
    (tmp_path / "file").touch()
    result = invoke("bench", "flux", "--json", str(tmp_path / name))
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not measured.asked


def test_results_that_are_none_are_refused_before_measuring(measured, tmp_path):
    path = tmp_path / "old.json"
    path.write_bytes(b"\xff\xfe")
    result = invoke("bench", "flux", "--compare", str(path))
    assert result.exit_code == 2
    assert "is no result of `tritium bench --json`" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not measured.asked


@pytest.mark.parametrize("measured_before", [False, True])
def test_rows_measured_before_an_interrupt_are_written(monkeypatch, tmp_path, measured_before):
    def run_(workload, settings, notify):
        if workload.name == "wan" or not measured_before:
            raise KeyboardInterrupt
        settings.on_rows([ROW])
        return [ROW]

    monkeypatch.setattr(workloads, "run", run_)
    path = tmp_path / "results.json"
    Results.now([dataclasses.replace(ROW, workload="sd3")], "cpu").save(path)
    assert invoke("bench", "flux", "wan", "--json", str(path)).exit_code != 0
    assert [row.workload for row in Results.load(path).rows] == (["flux"] if measured_before else ["sd3"])
    assert list(tmp_path.iterdir()) == [path]


def test_a_suite_keeps_its_rows_and_says_what_failed(monkeypatch, tmp_path):
    def broken(target, settings):
        raise ValueError("not today")

    monkeypatch.setattr(comparison, "optimized", broken)
    path = tmp_path / "families.json"
    asked = ("--only", "pixart-512", "--against", "eager", "--warm", "--seconds", "0", "--device", "cpu")
    result = invoke("bench", "families", *asked, "--json", str(path), TRITIUM_ENGINE="eager")
    assert result.exit_code == 1
    assert "FAILED pixart-512: tritium optimize failed: ValueError: not today" in result.stdout
    assert [row.variant for row in Results.load(path).rows] == ["eager", "tritium"]
    assert "tritium optimize failed: ValueError: not today" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("option", "fields", "printed"),
    [
        ("--graphs", {"variant": "tritium graphs", "host_us": 123.4}, "host us: until a call returns"),
        ("--graphs", {"variant": "tritium graphs", "host_us": 123.4}, " 123 "),
        ("--cold", {"disturbed": True}, "DISTURBED"),
        (
            "--profile",
            {"operators_us": 6000.0, "fusion_gain": -0.25},
            "6.00 ms in operators and kernels, eagerly 8.00 ms: fusion gain -25.0%",
        ),
        (
            "--cold",
            {"cold_start_s": 30.0, "restart_s": 6.0},
            "6.0 s to the first image of another process with compile artifacts, 20% of 30.0 s",
        ),
    ],
)
def test_bench_prints_what_a_row_has(measured, option, fields, printed):
    eager = dataclasses.replace(ROW, variant="eager", operators_us=8000.0)
    measured.rows[:] = [eager, dataclasses.replace(ROW, **fields)]
    result = invoke("bench", "flux", option, "--device", "cpu", COLUMNS="300")
    assert result.exit_code == 0, result.output
    assert printed in " ".join(result.stdout.split())


@pytest.mark.parametrize(("before", "code"), [(100 / 1.06, 1), (100 / 1.04, 0)])
def test_compare_fails_past_five_percent(measured, tmp_path, before, code):
    path = tmp_path / "old.json"
    Results.now([dataclasses.replace(ROW, median_ms=before)], "cpu").save(path)
    result = invoke("bench", "flux", "--device", "cpu", "--compare", str(path))
    assert result.exit_code == code, result.output
    assert ("REGRESSION" in result.stdout) == bool(code)


@pytest.mark.parametrize(("is_terminal", "in_ci"), [(True, False), (False, False), (True, True)])
def test_a_bar_on_a_terminal_and_each_line_once_elsewhere(monkeypatch, is_terminal, in_ci):
    monkeypatch.setattr(envs, "in_terminal_free_ci", lambda: in_ci)
    console = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None, width=80)
    with progress.shown(console) as notify:
        notify("timing", 0.7)
        notify("timing", 0.8)
        notify("done", 1.0)
    lines = console.file.getvalue().splitlines()
    assert (lines == ["[ 70%] timing", "[100%] done"]) == (in_ci or not is_terminal)


def test_explain_reports_on_a_stock_model():
    pytest.importorskip("diffusers")
    result = invoke("explain", "flux", "--engine", "eager", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["graphs"][0]["engine"] == "eager"
    # Two norms a stream and block: 2 double blocks with 2 streams, 2 single blocks with 1.
    assert report["sites"]["rms_norm"]["fused"] == 12


def test_explain_prints_the_page():
    pytest.importorskip("diffusers")
    result = invoke("explain", "wan", "--engine", "eager", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("wan: 2 blocks")
    assert "Sites" in result.stdout


@pytest.mark.codegen
def test_explain_writes_a_folder_for_every_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(workloads, "find", lambda name, others: [Tiny()])
    result = invoke("explain", "tiny", "--device", "cpu", "--dump", str(tmp_path / "kernels"))
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "kernels").glob("*/fused_*")
    assert (folder / "kernel.cpp").exists()
    assert f"1 kernels in {tmp_path / 'kernels'}" in result.stdout
    assert "Lowered " in result.stdout


def test_explain_lists_every_fusion():
    result = invoke("explain", "--fusions")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for name, fusion in fusions.catalog().items():
        found = [re.split(r"\s{2,}", line.strip()) for line in lines if line.split()[:1] == [name]]
        assert len(found) == 1, name
        assert found[0][1:4] == [
            ", ".join(fusion.families),
            "-" if fusion.replacement is None else fusion.replacement.name,
            "by structure" if fusion.find else str(len(fusion.spellings)),
        ]
    assert "Fuse a hand-written or whole RMSNorm" in result.stdout


def test_explain_lists_every_fusion_as_data():
    result = invoke("explain", "--fusions", "--json")
    assert result.exit_code == 0, result.output
    listed = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert list(listed) == list(fusions.catalog())
    assert listed["rms_norm"] == {
        "name": "rms_norm",
        "families": ["rms_norm"],
        "op": "rms_norm",
        "spellings": list(map(str, fusions.catalog()["rms_norm"].spellings)),
        "by_structure": False,
        "region": False,
        "doc": "Fuse a hand-written or whole RMSNorm over the last dim into `tritium::rms_norm`.",
    }
    assert listed["gated_residual"]["spellings"] == ["residual"]
    assert listed["rope"]["by_structure"]
    assert all(entry["doc"] for entry in listed.values())


def test_what_a_backend_raises_on_purpose_is_one_line():
    pytest.importorskip("diffusers")
    # Dynamo wraps it: the message must still be ours alone.
    result = invoke("explain", "flux", "--engine", "eager", "--device", "cpu", TRITIUM_FORCE_PROVIDER="rms_norm=triton")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("tritium: provider 'triton'")


def test_a_warning_is_one_line(monkeypatch):
    def checks(_):
        for text in ("tritium: a file is ignored", "a library's"):
            print(warnings.formatwarning(text, RuntimeWarning, "api.py", 78, "source"), end="")
        return []

    monkeypatch.setattr("tritium.cli.sharing.checks", checks)
    printed = invoke("doctor", "--sharing").stdout.splitlines()
    assert printed[:2] == ["tritium: a file is ignored", "api.py:78: RuntimeWarning: a library's"]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, capsys, missing):
    monkeypatch.delitem(sys.modules, missing)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("tritium: the command line needs")
    assert "pip install 'tritium[cli]'" in stderr
    assert len(stderr.splitlines()) == 1


def test_the_console_script_runs_the_application(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tritium", "bench", "flx"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert "did you mean 'flux'" in capsys.readouterr().err


class TestTune:
    @pytest.fixture
    def compared(self, monkeypatch, tmp_path):
        """Replaces the measuring; what was asked for is kept."""
        asked = []

        def compare(key, device_type, compiler, seconds):
            assert compiler is not None
            asked.append((key, device_type, seconds))
            return Verdict(
                key,
                "aten",
                {"inductor": 2.0, "aten": 1.0},
                alone_us={"inductor": 9.0, "aten": 3.0},
                bytes=6,
                versions={"torch": "0"},
            )

        monkeypatch.setattr(trials, "compare_in_block", compare)
        monkeypatch.setattr(measure.Load, "disturbed", False)
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
        return asked

    def test_all_standard_shapes_are_compared_and_kept(self, compared, tmp_path):
        result = invoke("tune", "rope", "--device", "cpu", "--seconds", "0.5")
        assert result.exit_code == 0, result.output
        assert [(key.op, key.dtype, where, seconds) for key, where, seconds in compared] == [
            ("rope", "float32", "cpu", 0.5)
        ]
        (path,) = tmp_path.iterdir()
        assert {row.provider for row in tuning.load(path).rows.values()} == {"aten"}
        assert "2.00x" in result.output
        assert f"kept in {path}" in result.output.replace("\n", "")

    def test_a_busy_machine_is_told_to_run_again(self, compared, monkeypatch, tmp_path):
        monkeypatch.setattr(measure.Load, "disturbed", True)
        result = invoke("tune", "rope", "--device", "cpu")
        assert result.exit_code == 1
        assert "1 of 1 were NOT kept" in result.output
        assert "kept in" not in result.output
        assert compared
        assert not list(tmp_path.iterdir())

    def test_a_table_can_be_written_elsewhere(self, compared, tmp_path):
        path = tmp_path / "folder" / "mine.json"
        assert (
            invoke("tune", "rope", "--device", "cpu", "--to", str(path), "--dtype", "bfloat16,float16").exit_code == 0
        )
        assert {key.dtype for key in tuning.load(path).rows} == {"bfloat16", "float16"}
        assert len(compared) == 2

    def test_a_damaged_table_is_named(self, compared, tmp_path):
        invoke("tune", "rope", "--device", "cpu")
        (path,) = tmp_path.iterdir()
        path.write_text('{"rows": [null]}')
        result = invoke("tune", "--device", "cpu", "--show")
        assert result.exit_code == 0
        assert f"{path} is damaged" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        asked = invoke("tune", "--device", "cpu", "--show", "--to", str(path))
        assert asked.exit_code == 2
        assert asked.stderr.startswith(f"tritium: cannot show {path}: TypeError")
        assert len(asked.stderr.strip().splitlines()) == 1
        del compared

    def test_nothing_to_show_is_said(self, compared):
        assert "nothing was measured on" in invoke("tune", "--show", "--device", "cpu").stdout
        assert compared == []

    def test_one_file_is_shown(self, compared, tmp_path):
        path = tmp_path / "mine.json"
        assert invoke("tune", "--show", "--to", str(path)).exit_code == 2
        invoke("tune", "rope", "--device", "cpu", "--to", str(path))
        del compared[:]
        result = invoke("tune", "--show", "--to", str(path))
        assert result.exit_code == 0
        assert "2.00x" in result.output
        assert compared == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["rop"], "there is no op 'rop', and no folder of that name holds a pipeline; did you mean 'rope'"),
            (["rms_norm"], "op 'rms_norm' has nothing to compare; ops that have: cat_linear"),
            (["rope", "--dtype", "float8"], "dtype 'float8' is not measured"),
            (["linear_gelu", "--device", "cpu"], "has a kernel of its own on"),
        ],
    )
    def test_what_cannot_be_compared_is_an_error(self, arguments, message):
        result = invoke("tune", *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())
