"""Benchmarks that need no baseline and no training, at a small size: options change what is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import adaptive, grpo, health, monitor, quick
from tests.helpers.health_curves import write_run


def results_of(module: Any, words: list[str], directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The results that a benchmark writes."""
    output = directory / "results_of.json"
    monkeypatch.setattr("sys.argv", [module.__name__, *words, "--output", str(output)])
    module.main()
    return json.loads(output.read_text())


def test_monitor_benchmark_ingests_requested_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = results_of(monitor, ["--rows", "500", "--no-browser"], tmp_path, monkeypatch)
    many = results_of(monitor, ["--rows", "5000", "--no-browser"], tmp_path, monkeypatch)
    assert (few["rows"], many["rows"]) == (500, 5000)
    assert many["file_mb"] == pytest.approx(10 * few["file_mb"], rel=0.05)


def test_less_frequent_health_checks_cost_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ({**row, "time/train/step_s": 0.5} if "train/loss" in row else row for row in rows)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    often, rarely = (
        results_of(health, [str(run_dir), "--every", each], tmp_path, monkeypatch) for each in ("1", "100")
    )
    assert (often["every"], rarely["every"]) == (1, 100)
    [cost], [less] = often["runs"], rarely["runs"]
    assert cost["step_ms"] == pytest.approx(500, rel=0.01)
    assert cost["health_us_per_step"] > 3 * less["health_us_per_step"]


def test_detection_rate_grows_with_effect_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = results_of(health, ["--detection", "10"], tmp_path, monkeypatch)["detection"]
    rates = {row["rule"]: (row["0"], row["11"]) for row in rows}
    for rule in ("loss_rising", "reward_falling", "violation_rising", "overfitting"):
        assert rates[rule][0] <= 0.1 and rates[rule][1] >= 0.9
    assert rates["nothing_improves"][0] >= 0.8 and rates["nothing_improves"][1] == 0
    assert rates["80 % of the steps"][1] < 0.9


def test_controller_benchmark_covers_requested_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--tier-sizes", "1024", "2304", "--topk-choices", "2", "8", "--rounds", "1", "--new-tokens", "1"]
    rows = results_of(adaptive, words, tmp_path, monkeypatch)["rows"]
    values = {knob: [row["value"] for row in rows if row["knob"] == knob] for knob in ("tier", "top-k")}
    assert values == {"tier": ["tier 2304", "tier 1024"], "top-k": ["8", "2"]}
    assert {row["decode_ms"] for row in rows} == {0.0}  # the first token comes from prefill


def test_only_option_selects_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quick", "--only", "monitor"])
    quick.main()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "committed" in line]
    assert line.startswith("monitor ")


def test_ranks_that_do_not_divide_prompts_are_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["grpo", "--ranks", "3"])
    with pytest.raises(SystemExit, match="2"):
        grpo.main()
    assert capsys.readouterr().err == "error: --ranks is 3; it must divide 4\n"
