"""The evaluation's commands as a user types them, on a tiny model trained to give three answers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval_pipeline.jobs import LEDGER_FILE
from tests.helpers.evaluation import (
    ADD,
    HEART,
    LEARNED,
    MAX_MODEL_LEN,
    evaluate,
    jobs,
    make_exports,
    num_kept,
    read_lines,
    slow_problems,
    started,
    statuses,
    write_lines,
    write_recipe,
)
from tests.helpers.processes import family_of, wait_gone, wait_until


@dataclass(frozen=True)
class Setup:
    """A run with one checkpoint, and a recipe of four problems for it."""

    root: Path
    run_dir: Path
    checkpoint: Path
    recipe: Path
    random: Path


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    from tests.helpers.checkpoints import commit

    root = tmp_path_factory.mktemp("evaluation")
    learned, random = make_exports(root / "models")
    recipe = write_recipe(root / "heart.yaml", {"tier1": {"heart": HEART}}, max_attempts=1)
    run_dir = root / "demo" / "sft"
    checkpoint = commit(run_dir, 30, learned)
    (run_dir / "config.yaml").write_text(
        f"eval: {{recipe: {recipe}}}\ntrainer: {{project_name: demo, experiment_name: sft}}\n"
    )
    return Setup(root, run_dir, checkpoint, recipe, random)


@pytest.fixture(scope="module")
def printed(setup: Setup) -> str:
    """The output of an evaluation of the run's checkpoint."""
    process = evaluate("run", "--checkpoint", setup.checkpoint, "--recipe", setup.recipe)
    assert process.returncode == 0, process.stderr
    warnings = [line for line in process.stderr.splitlines() if line.startswith("warning: ")]
    # of the prompt that is too long for the model
    assert len(warnings) == 3 and all("api_error" in line or "incomplete" in line for line in warnings), warnings
    return process.stdout


@pytest.fixture
def output(setup: Setup, printed: str) -> Path:
    """The directory with its metrics."""
    return setup.run_dir / "eval" / "eval_step_30"


@pytest.fixture(scope="module")
def repeated(setup: Setup) -> Path:
    """The same evaluation in another output directory, without W&B."""
    process = evaluate("run", "--checkpoint", setup.checkpoint / "huggingface", "--output", setup.root / "again",
                       "--recipe", setup.recipe, "--no-wandb")  # fmt: skip
    assert process.returncode == 0, process.stderr
    return setup.root / "again"


def test_metrics_of_checkpoint_are_correct(output: Path) -> None:
    from tests.helpers.models import make_tokenizer

    metrics = json.loads((output / "metrics.json").read_text())
    tokenizer = make_tokenizer(LEARNED.values())
    num_tokens = sum(len(tokenizer(answer)["input_ids"]) + 1 for answer in LEARNED.values())  # + the end of turn
    expected = {
        "num_problems": 4,
        "exec_success_rate": 0.5,
        "accepted_at_1": 0.25,
        "pass_ratio_mean": 0.375,
        "pass_ratio_p50": 0.25,
        "pass_ratio_p90": 0.85,  # between 0.5 and 1.0, at 0.9 * 3 = 2.7
        "success_rate": 0.25,
        "wrong_answer_rate": 0.25,
        "syntax_error_rate": 0.25,
        "runtime_error_rate": 0.0,
        "timeout_rate": 0.0,
        "api_error_rate": 0.25,
        "truncation_rate": 0.0,
        "avg_gen_tokens": num_tokens / 4,
        "cost_per_solved_tokens": num_tokens,
    }
    heart = metrics["datasets"]["heart"]
    assert {name: heart[name] for name in expected} == pytest.approx(expected)
    assert heart["throughput"] > 0 and heart["avg_judge_time"] > 0
    assert heart["intervals"]["accepted_at_1"] == pytest.approx([0.0456, 0.6994], abs=1e-4)  # Wilson
    assert (metrics["step"], metrics["label"], metrics["tier"]) == (30, "step_30", {"heart": 1})
    assert metrics["isolation"]["heart"] in ("bwrap", "sandlock")
    protocol = metrics["protocol"]["heart"]
    assert (protocol["max_model_len"], protocol["dtype"]) == (MAX_MODEL_LEN, "float32")
    assert (protocol["sampling"]["temperature"], protocol["limits"]["cpu_s"]) == (0.0, 5.0)


def test_every_answer_is_stored_with_its_verdict(output: Path) -> None:
    rows = {row["problem_id"]: row for row in read_lines(output / "qa_logs" / "heart_qa.jsonl")}
    kinds = {"add": "success", "neg": "wrong_answer", "two": "syntax_error", "long": "api_error"}
    assert {name: row["error_type"] for name, row in rows.items()} == kinds
    assert [rows[name]["answer"] for name in ("add", "neg", "two", "long")] == [*LEARNED.values(), ""]
    assert rows["neg"]["program"].startswith("def neg") and rows["long"]["error"]
    assert {row["problem_id"]: row for row in read_lines(output / "answers" / "heart.jsonl")} == rows
    verdicts = read_lines(output / "verdicts" / "heart.jsonl")
    assert [(row["problem_id"], row["error_type"]) for row in verdicts] == list(kinds.items())
    assert [row["pass_ratio"] for row in verdicts] == [1.0, 0.5, 0.0, 0.0]
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["step"], summary["datasets"]["heart"]["accepted_at_1"]) == (30, 0.25)


def test_run_prints_table_and_records_best_checkpoint(setup: Setup, printed: str) -> None:
    lines = printed.splitlines()
    assert lines[0] == "Evaluated: step_30" and any(line.split()[:2] == ["accepted_at_1", "0.2500"] for line in lines)
    assert any(line.endswith(str(setup.run_dir / "eval" / "eval_step_30")) for line in lines)
    best = json.loads((setup.run_dir / "best_checkpoint.json").read_text())
    assert (best["step"], best["metric"], best["value"]) == (30, "exec_success_rate", 0.5)


def test_evaluation_is_wandb_run_with_documented_keys(setup: Setup, printed: str) -> None:
    from tests.helpers.wandb_files import read_history

    (log,) = (setup.run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    [row] = read_history(log)  # waits for the end of the file
    assert (row["eval/heart/exec_success_rate"], row["global_step"]) == (0.5, 30)
    assert "eval/heart/accepted_at_1_low" in row and any(key.startswith("eval/heart/qa") for key in row)
    assert b"phase1_eval_step_30" in log.read_bytes()


def test_report_compares_best_checkpoint_with_base_model(setup: Setup, output: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    run_dir = shutil.copytree(setup.run_dir, tmp_path / "sft")
    random = shutil.copytree(setup.random, tmp_path / "random")
    AutoModelForCausalLM.from_pretrained(random, dtype=torch.bfloat16).save_pretrained(random)
    words = ("report", run_dir, "--baseline", random, "--recipe", setup.recipe, "--no-wandb")
    process = evaluate(*words)
    assert process.returncode == 0, process.stderr
    table = run_dir / "eval" / "report" / "comparison_table.md"
    assert any(line.endswith(str(table)) for line in process.stdout.splitlines())
    lines = table.read_text().splitlines()
    assert f"- Base model: `base_random`, loaded from `{random}`" in lines
    assert not any("evaluated with different settings" in line for line in lines)
    (compared,) = (line.split("|") for line in lines if line.startswith("| `accepted_at_1` |"))
    rates = ("0.0000 [", "0.2500 [", "+0.2500 [")
    assert all(cell.strip().startswith(rate) for cell, rate in zip(compared[2:5], rates, strict=True))
    assert {path.name for path in table.parent.glob("*.png")} == {"error_distribution.png", "rates_over_steps.png"}
    assert evaluate(*words).returncode == 0  # everything has been evaluated already
    words = ("report", run_dir, "--baseline", run_dir / "global_step_30", "--recipe", setup.recipe, "--no-wandb")
    process = evaluate(*words)
    assert process.returncode == 0, process.stderr
    assert "Already evaluated: step_30" in process.stdout and not (run_dir / "eval" / "eval_base_step_30").exists()
    assert table.read_text().startswith("# step_30 against step_30\n")


def test_greedy_answers_repeat_byte_for_byte(output: Path, repeated: Path) -> None:
    (first,), (second,) = (list((path / "work" / "heart").glob("answers-*.jsonl")) for path in (output, repeated))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert not (repeated / "wandb").exists()


def test_evaluated_checkpoint_is_not_evaluated_again(setup: Setup, repeated: Path) -> None:
    before = (repeated / "metrics.json").read_bytes()
    process = evaluate(
        "run", "--checkpoint", setup.checkpoint, "--output", repeated, "--no-wandb", "--recipe", setup.recipe
    )
    assert (process.returncode, process.stderr) == (0, "")
    first, *rest = process.stdout.splitlines()
    assert first == "Already evaluated: step_30" and [line.endswith(str(repeated)) for line in rest] == [True]
    assert (repeated / "metrics.json").read_bytes() == before


def test_rejects_output_directory_of_another_model(setup: Setup, repeated: Path) -> None:
    before = (repeated / "metrics.json").read_bytes()
    words = ("--output", repeated, "--no-wandb", "--recipe", setup.recipe)
    process = evaluate("run", "--checkpoint", setup.random, *words)
    assert process.returncode == 2
    assert process.stderr.startswith(f"error: {repeated} ") and process.stderr.count("\n") == 1
    assert "step_30" in process.stderr and "--output" in process.stderr
    assert (repeated / "metrics.json").read_bytes() == before


def test_failure_is_recorded_and_retry_requeues_it(setup: Setup, repeated: Path, tmp_path: Path) -> None:
    place = shutil.copytree(repeated, tmp_path / "place")
    (place / LEDGER_FILE).unlink()
    (place / "work").rename(tmp_path / "work")
    (place / "work").write_text("in the way")
    run = ("run", "--checkpoint", setup.checkpoint, "--output", place, "--no-wandb", "--recipe", setup.recipe)
    process = evaluate(*run)
    assert process.returncode == 1 and "cannot write to" in process.stderr and "Traceback" not in process.stderr
    shown = evaluate("status", place)
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[1].split()[:5] == ["step_30", "heart", "1", "failed", "1"]
    assert f"cannot write to {place / 'work' / 'heart'}" in shown.stdout
    (place / "work").unlink()
    (tmp_path / "work").rename(place / "work")
    again = evaluate("retry", place)
    assert again.returncode == 0 and again.stdout.startswith("Re-queued: step_30 on heart")
    assert "cannot write to" in again.stdout
    assert [(job.state, job.attempts) for job in jobs(place)] == [("pending", 0)]
    assert evaluate("retry", place).stdout.startswith("No evaluation has failed")
    assert evaluate(*run).returncode == 0  # all answers and verdicts are kept
    (row,) = statuses(place)
    assert (row["state"], row["error"]) == ("done", None) and row["seconds"]["active_s"] >= 0


@pytest.fixture(scope="module")
def interrupted(setup: Setup) -> Path:
    """The output directory of an evaluation that was stopped by SIGTERM and resumed."""
    place = setup.root / "interrupted"
    recipe = write_recipe(setup.root / "slow.yaml", {"tier1": {"slow": slow_problems(10, 0.5)}}, batch_size=5)
    words = ("run", "--checkpoint", setup.checkpoint, "--recipe", recipe, "--output", place, "--no-wandb")
    log = setup.root / "interrupted.log"
    with started(log, *words) as process:
        wait_until(lambda: 2 <= num_kept(place, "verdicts"), process)
        family = family_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 75, log.read_text()
    assert 2 <= num_kept(place, "verdicts") < 10 and len(family) >= 3
    wait_gone(family)
    assert "Stopped by SIGTERM" in log.read_text()
    assert "Traceback" not in log.read_text()
    shutil.copytree(place, setup.root / "as_it_was")
    process = evaluate(*words)
    assert process.returncode == 0, process.stderr
    return place


def test_stopped_evaluation_resumes_without_recomputing(setup: Setup, interrupted: Path) -> None:
    for kind in ("answers", "verdicts"):
        (after,) = (interrupted / "work" / "slow").glob(f"{kind}-*.jsonl")
        before = setup.root / "as_it_was" / after.relative_to(interrupted)
        assert after.read_bytes().startswith(before.read_bytes())  # nothing is recomputed
        keys = [(row["problem_id"], row["sample"]) for row in read_lines(after)]
        assert sorted(keys) == sorted({(f"slow{i}", 0) for i in range(10)})
    metrics = json.loads((interrupted / "metrics.json").read_text())
    assert metrics["datasets"]["slow"]["accepted_at_1"] == 1.0
    with sqlite3.connect(setup.root / "as_it_was" / LEDGER_FILE) as ledger:
        assert ledger.execute("SELECT state, attempts, pid FROM jobs").fetchall() == [("pending", 0, None)]
    [job] = jobs(interrupted)
    assert (job.state, job.attempts) == ("done", 0)


BAD_INPUT = [
    (("run", "--checkpoint", "{root}/none"), "is not a directory"),
    (("run", "--checkpoint", "{root}"), "no config.json"),
    (("run",), "use --checkpoint DIR"),
    (("run", "--checkpoint", "{model}", "--recipe", "none"), "there is no recipe 'none'"),
    (("run", "--checkpoint", "{model}", "--problems", "{root}/none.jsonl"), "none.jsonl"),
    (("run", "--checkpoint", "{model}", "--problems", "{root}/bad.jsonl"), "bad.jsonl, line 1"),
    (("run", "--checkpoint", "{model}", "--problems", "{root}"), "{root}"),
    (("run", "--checkpoint", "{model}", "sampling.max_token=3"), "did you mean 'sampling.max_tokens'?"),
    (("run", "--checkpoint", "{model}", "--limit", "0"), "is not an integer of 1 or more"),
    (("run", "--checkpoint", "{model}", "--output", "{root}/bad.jsonl"), "cannot use the ledger"),
    (("run", "--checkpoint", "{model}", "tiers.tier1=[]"), "lists a dataset"),
    (("watch", "{root}/none"), "is not a directory"),
    (("status", "{root}"), "contains no evaluation"),
    (("retry", "{root}/none"), "contains no evaluation"),
    (("report", "{root}", "--baseline", "{model}"), "best_checkpoint.json"),
]
TYPO, NO_RUN = BAD_INPUT[7], BAD_INPUT[11]


def assert_one_error(code: object, stdout: str, stderr: str, message: str) -> None:
    assert (code, stdout) == (2, "")
    assert message in stderr and "Traceback" not in stderr
    assert len([line for line in stderr.splitlines() if "error: " in line]) == 1


@pytest.fixture
def bad_names(setup: Setup, tmp_path: Path) -> dict[str, str]:
    """The placeholders of `BAD_INPUT`."""
    (tmp_path / "bad.jsonl").write_text("{}")
    return {"root": str(tmp_path), "model": str(setup.random)}


@pytest.mark.parametrize(("words", "message"), BAD_INPUT)
def test_rejects_bad_input_in_one_line(
    bad_names: dict[str, str], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    from eval_pipeline.__main__ import main

    with pytest.raises(SystemExit) as end:
        main([word.format(**bad_names) for word in words])
    assert_one_error(end.value.code, *capsys.readouterr(), message.format(**bad_names))


@pytest.mark.parametrize(("words", "message"), [TYPO, NO_RUN])
def test_command_with_bad_input_exits_with_2(bad_names: dict[str, str], words: tuple[str, ...], message: str) -> None:
    process = evaluate(*(word.format(**bad_names) for word in words))
    assert_one_error(process.returncode, process.stdout, process.stderr, message.format(**bad_names))


@pytest.fixture
def judging(tmp_path: Path) -> tuple[str, ...]:
    """A `judge` command on the four problems, whose file of answers does not exist yet."""
    problems = write_lines(tmp_path / "problems.jsonl", HEART)
    return ("judge", "--problems", str(problems), "--answers", str(tmp_path / "answers.jsonl"),
            "--output", str(tmp_path / "out" / "verdicts.jsonl"))  # fmt: skip


def test_answers_from_file_are_judged_in_order(judging: tuple[str, ...], tmp_path: Path) -> None:
    answers = [
        ("neg", "def neg(a): return -a"),
        ("add", LEARNED[ADD]),
        ("add", "def add(a, b): return 0"),
        ("two", "def two(:"),
        ("neg", "def neg(a): raise ValueError('\u2028no')"),
        ("add", "while True: pass"),
    ]
    write_lines(tmp_path / "answers.jsonl", ({"problem_id": name, "answer": text} for name, text in answers))
    process = evaluate(*judging, "judge.limits.cpu_s=1")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("Judged: 6 answers\n") and "  isolation  " in process.stdout
    verdicts = read_lines(tmp_path / "out" / "verdicts.jsonl")
    assert [row["problem_id"] for row in verdicts] == [name for name, _ in answers]
    kinds = ["success", "success", "wrong_answer", "syntax_error", "runtime_error", "timeout"]
    assert [row["error_type"] for row in verdicts] == kinds
    assert [row["pass_ratio"] for row in verdicts] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [row["num_tests"] for row in verdicts] == [2, 1, 1, 1, 2, 1]
    for row in verdicts:
        assert list(row) == [
            "problem_id", "error_type", "pass_ratio", "judge_time", "num_passed", "num_tests", "message",
        ]  # fmt: skip
        assert row["judge_time"] >= 0 and (row["error_type"] == "success" or row["message"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem_id": "add", "answer": "x"}\n{"problem_id": "ad", "answer": "x"}', "line 2: .* no problem 'ad'"),
        ('{"problem_id": "add", "answer": "x"}\n{"problem_id": "add"', "line 2 is not JSON"),
        ('{"problem_id": "add"}', "line 1 lacks `problem_id` or a text `answer`"),
        ('{"problem_id": "add", "answer": 3}', "line 1 lacks `problem_id` or a text `answer`"),
        ("[]", "line 1 lacks `problem_id` or a text `answer`"),
        ("\n\n", "contains no answers"),
        (None, "cannot read the answers"),
    ],
)
def test_rejects_bad_answers_with_line_number(
    judging: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    from eval_pipeline.__main__ import main

    if text is not None:
        (tmp_path / "answers.jsonl").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(judging)
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_rejects_unknown_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eval_pipeline.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(["judge", "--dataset", "none", "--answers", str(tmp_path / "a"), "--output", str(tmp_path / "b")])
    assert_one_error(end.value.code, *capsys.readouterr(), "no dataset 'none'")
