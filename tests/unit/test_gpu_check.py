"""The GPU check: meaning of result rows, and isolation of failing parts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import gpu_check, gpu_correctness, gpu_speed
from benchmarks.gpu_check import GPUCheck, GPUCheckPart, GPUCheckSettings, chosen_parts, is_wrong, kill_tree, parts_of
from benchmarks.gpu_correctness import relative_distance
from tests.helpers import ROOT
from tests.helpers.processes import wait_gone, wait_until
from verl_ext.errors import UserError


@pytest.fixture
def check(tmp_path: Path) -> GPUCheck:
    return GPUCheck(GPUCheckSettings(str(tmp_path), 1, tiny=True), time.monotonic() + 600)


@pytest.mark.parametrize("tiny", [False, True])
def test_parts_have_unique_names_and_existing_functions(tiny: bool) -> None:
    parts = parts_of(tiny)
    assert len({part.name for part in parts}) == len(parts)
    modules = {"gpu_correctness": gpu_correctness, "gpu_speed": gpu_speed}
    for part in parts:
        module, function, *words = part.words
        assert callable(getattr(modules[module], function))
        assert function not in ("steps", "save") or words[0] in gpu_speed.SHAPES


def test_row_passes_up_to_its_limit() -> None:
    rows = [{"value": value, "limit": limit} for value, limit in ((1.0, 1.0), (1.1, 1.0), (math.nan, 1.0), (9.0, None))]
    assert [is_wrong(row) for row in rows] == [False, True, True, False]


def test_failed_part_does_not_stop_others(check: GPUCheck) -> None:
    check.run(GPUCheckPart("fails", ("no_such_module", "losses"), 60))
    check.run(GPUCheckPart("is skipped", ("gpu_correctness", "losses"), 60, needs=("no_such_package",)))
    failed, skipped = check.results
    assert "no_such_module" in failed["problem"] and any("no_such_module" in line for line in failed["log"])
    assert "log" not in skipped
    assert skipped["problem"] == "" and skipped["rows"][0]["note"] == "no_such_package is not installed"
    assert len(check.failures) == 1 and check.failures[0].startswith("fails: ")


def test_part_past_its_timeout_is_stopped(check: GPUCheck) -> None:
    check.run(GPUCheckPart("slow", ("gpu_correctness", "losses", "qwen2"), 0.5))
    assert check.results[0]["problem"] == "ran out of time after 0 s"
    check.deadline = time.monotonic()
    check.run(GPUCheckPart("late", ("gpu_correctness", "losses", "qwen2"), 60))
    late = check.results[1]
    assert late["problem"] == "" and late["rows"][0]["note"] == "0 s are left; run --parts 'late' alone"
    assert len(check.failures) == 1


def test_row_above_its_limit_is_failure(check: GPUCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(part: GPUCheckPart, limit_s: float) -> str:
        check.settings.add_row("error", 2e-3, limit=1e-3)
        check.settings.add_row("seconds", 5.0)
        return ""

    monkeypatch.setattr(check, "_start", start)
    check.run(GPUCheckPart("wrong", ("gpu_correctness", "losses", "qwen2"), 60))
    assert check.failures == ["wrong: error is 0.002, above 0.001"]


def test_stopping_part_kills_its_processes() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    children = wait_until(lambda: psutil.Process(process.pid).children(recursive=True))
    kill_tree(process)
    wait_gone(children)


def test_unknown_part_is_rejected() -> None:
    with pytest.raises(UserError, match="there is no part 'SFT'"):
        chosen_parts(["SFT"], tiny=True)
    assert [part.name for part in chosen_parts(["controller"], tiny=False)] == ["controller"]


def test_missing_gpu_error_suggests_tiny(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    monkeypatch.setattr(gpu_check, "visible_gpus", list)
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert capsys.readouterr().err == "error: no GPU is visible; --tiny runs the check on the CPU\n"


def test_relative_distance_is_norm_of_difference() -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    assert relative_distance(expected, expected) == 0.0
    assert relative_distance(expected | {"b": torch.tensor([0.0, 0.5])}, expected) == pytest.approx(0.1)
    assert relative_distance({"a": expected["a"]}, expected) == math.inf


def test_gpu_check_wheels_match_product_pins() -> None:
    pinned, carried = (
        dict(re.findall(r"^([\w.-]+)===?([\w.]+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("cpu.txt", "gpu_check.txt")
    )
    assert carried == {name: pinned[name] for name in carried}


def test_table_of_gpu_paths_names_results_and_tests() -> None:
    """Each path that was run has a part in a result without a problem, and each mocked path a test."""
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("gpu_*.json")]
    parts = {part["part"] for result in results for part in result["parts"] if not part["problem"]}
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"\bdef (test_\w+)", path.read_text())
    }
    section = (ROOT / "docs/design/guarantees.md").read_text().partition("\n## GPU paths\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    for path, kind, *names in rows:
        found = {*re.findall(r"`([^`]+)`", " ".join(names))}
        assert found <= parts | tests, (path, found - parts - tests)
        assert {"run": found & parts, "mocked": found & tests, "read": not found}[kind.strip(" |")], path
