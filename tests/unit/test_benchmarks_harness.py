"""The benchmark harness: rounds and their spread, results files, child processes, and fresh runs in every round."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import grpo, harness
from benchmarks.harness import (
    child_command,
    in_rounds,
    log_row,
    machine,
    medians,
    ranges,
    run_ranks,
    spread,
    write_results,
)
from tests.helpers import ROOT
from verl_ext.errors import UserError


def test_results_include_machine_and_versions(tmp_path: Path) -> None:
    write_results({"a": 1}, tmp_path / "r.json", ["numpy"])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["a"] == 1 and found["machine"] == machine() and " GiB, " in machine()
    assert found["versions"].keys() == {"python", "torch", "transformers", "numpy"}


def test_rounds_alternate_order_and_exclude_warm_up() -> None:
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    found = in_rounds({"a": lambda: side("a"), "b": lambda: side("b")}, 2, "testing", warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_spread_covers_rounds_that_report_the_metric() -> None:
    rounds = [{"s": 3.0, "write_s": 1.0}, {"s": 1.0}, {"s": 2.0, "write_s": 2.0}]
    assert medians(rounds) == {"s": 2.0, "write_s": 1.5}
    assert ranges(rounds) == {"s": [1.0, 3.0], "write_s": [1.0, 2.0]}
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)" and spread([1000.4], ".0f") == "1000 (1000 to 1000)"


def test_run_ranks_returns_logged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from benchmarks.harness import log_row\nprint('noise')\n"
    code += "for n in range(2): log_row(tokens=n, seconds=0.5)"
    monkeypatch.setattr(harness, "child_command", lambda *_, **__: [sys.executable, "-c", code])
    assert run_ranks("sft_ranks:bare", "x") == [{"tokens": 0, "seconds": 0.5}, {"tokens": 1, "seconds": 0.5}]


def test_command_past_its_timeout_is_stopped() -> None:
    with pytest.raises(UserError, match="took more than 0.5 s"):
        harness.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)


def test_torchrun_is_used_for_multiple_ranks() -> None:
    assert child_command("a:b", "w")[1:] == ["-m", "benchmarks.harness", "a:b", "w"]
    assert "--nproc-per-node=2" in child_command("a:b", "w", ranks=2)
    assert "--nproc-per-node=1" in child_command("a:b", "w", torchrun=True)


def test_child_of_unknown_module_is_rejected() -> None:
    done = subprocess.run(child_command("nothing:main", "x"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "error: there is no module 'nothing' in benchmarks; specify one\n"
    with pytest.raises(UserError, match="there is no module 'nothing'"):
        harness.run(child_command("nothing:main", "x"))


def test_each_grpo_round_uses_new_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in a reused run directory would do nothing, because its run has finished."""
    names = {"time/train/step_s": 1.0, "time/train/rollout_s": 0.5, "time/train/update_s": 0.25}
    names |= {"time/train/reward_s": 0.1, "train/seq_completion_len_mean": 64.0}
    directories: list[str] = []

    def run(command: Sequence[str], _: Mapping[str, str]) -> str:
        [run_dir] = [word.partition("=")[2] for word in command if word.startswith("trainer.default_local_dir=")]
        assert not [*Path(run_dir).iterdir()]
        directories.append(run_dir)
        row = {"step": 1, "attempt": 1, "time": 0.0, **names, "time/train/step_s": float(len(directories))}
        (Path(run_dir) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return ""

    monkeypatch.setattr(grpo, "run", run)
    found = [grpo.our_steps("hf", 1, 1, tmp_path)[0]["step_s"] for _ in range(2)]
    assert found == [1.0, 2.0] and len({*directories}) == 2


def test_grpo_summary_has_median_and_range_without_first_step() -> None:
    def step(seconds: float) -> grpo.GRPOStep:
        return {"step_s": seconds, "generation_s": seconds / 4, "model_s": seconds / 2, "tokens_mean": 64.0}

    # the first step of each run is excluded
    runs = [[step(100.0), step(4.0), step(8.0)], [step(100.0), step(2.0), step(6.0)]]
    summary = grpo.summary_of(runs)
    assert summary["step_s"] == 5.0 and summary["ranges"]["step_s"] == [2.0, 8.0]
    assert summary["sync_s"] == 0.0 and summary["rest_share"] == 0.25 and summary["steps"] == runs
    compared = grpo.compared(runs, [[step(1.0), step(12.0), step(12.0)], [step(1.0), step(4.0), step(4.0)]])
    assert compared["ratios"] == [2.0, 1.0] and compared["trl_over_ours"] == 1.5


def test_log_row_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_row(tokens=3, seconds=0.25)
    assert capsys.readouterr().out == 'ROW {"tokens": 3, "seconds": 0.25}\n'
