"""Recipe settings of the watcher, the publisher and job results, on checkpoints that are never loaded."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from eval_pipeline import watch
from eval_pipeline.__main__ import main
from eval_pipeline.active_job import ActiveJob
from eval_pipeline.checkpoints import EvalCheckpoint, eval_dir_of_checkpoint, eval_dir_of_run, find_checkpoint
from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.jobs import Job
from eval_pipeline.judge import ErrorType, Verdict
from eval_pipeline.publish import Publisher
from eval_pipeline.recipe import config_for_run, load_eval_config
from eval_pipeline.run import EvalContext, JobRunner, TaskSource, write_job_result
from eval_pipeline.watch import RunWatcher, evaluate_checkpoint, watch_run
from eval_pipeline.worker import (
    AnswerJudged,
    AnswerReceived,
    BatchFailed,
    BatchFinished,
    BatchStarted,
    Event,
    key_of,
)
from tests.helpers.checkpoints import commit, make_export
from verl_ext.errors import UserError
from verl_ext.metrics.run_record import RunRecord

NUM_PROBLEMS = 8


def context_of(directory: Path, *overrides: str) -> EvalContext:
    """The context of a running training with checkpoints at steps 10 to 40."""
    problem = {"prompt": "Write f.", "entry_point": "f", "tests": ["assert f()"]}
    rows = [json.dumps({"problem_id": f"p{number}", **problem}) for number in range(NUM_PROBLEMS)]
    (directory / "few.jsonl").write_text("\n".join(rows))
    source = f"{{format: quickstart, path: '{directory}/few.jsonl'}}"
    recipe = directory / "few.yaml"
    recipe.write_text(f"datasets: {{few: {source}, more: {source}}}\ntiers: {{tier1: [few], tier2: [more]}}\n")
    run_dir = directory / "run"
    RunRecord(run_dir).start_attempt(first_step=0, world_size=1, total_steps=100)
    for step in (10, 20, 30, 40):
        commit(run_dir, step)
    return EvalContext(eval_dir_of_run(run_dir), load_eval_config(str(recipe), overrides))


def watcher_of(context: EvalContext) -> RunWatcher:
    return RunWatcher(context, Publisher(context, owns_selection=True))


def step_10(context: EvalContext) -> EvalCheckpoint:
    return find_checkpoint(context.directory.of_run / "global_step_10")


def claimed(context: EvalContext, step: int = 10) -> Job:
    """Claim the evaluation of a checkpoint on the first dataset."""
    [task] = context.add_jobs(find_checkpoint(context.directory.of_run / f"global_step_{step}"), tier=1)
    job = context.jobs.claim([(*task.key, task.digest)])
    assert job is not None
    return job


def evaluated(context: EvalContext, step: int, num_right: int, others: ErrorType, owns_selection: bool) -> None:
    """Evaluate a checkpoint on the first dataset and publish it, as `watch` or `run` does."""
    job, checkpoint = claimed(context, step), find_checkpoint(context.directory.of_run / f"global_step_{step}")
    with closing(context.open_job(job, checkpoint)) as active:
        answer_all(active, num_right, others)
        write_job_result(context, active)
    context.jobs.finish(job, active.seconds)
    Publisher(context, owns_selection).publish(context.add_jobs(checkpoint, tier=1))


def best_of(context: EvalContext) -> dict[str, Any]:
    """The record of the best checkpoint, without its time."""
    content = json.loads((context.directory.of_run / "best_checkpoint.json").read_text())
    return {key: value for key, value in content.items() if key != "selected_at"}


def answer_all(active: ActiveJob, num_right: int, others: ErrorType = "wrong_answer") -> None:
    """Report a worker's events: the first answers are correct, the others get another verdict."""
    batch = active.next_batch()
    active.handle(BatchStarted(batch.id, {"isolation": "bwrap", "protocol": {"engine": "none"}}))
    for number, request in enumerate(batch.requests):
        verdict = Verdict("success", 1, 1) if number < num_right else Verdict(others, 0, 1)
        active.handle(AnswerReceived(batch.id, key_of(request), GeneratedAnswer("def f(): return 1", 5, False)))
        active.handle(AnswerJudged(batch.id, key_of(request), verdict))
    active.handle(BatchFinished(batch.id, {"generate_s": 1.0, "judge_s": 1.0}))


def test_newer_packages_do_not_trigger_reevaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of older packages remain candidates for the best; new results record the installed ones."""

    def installed(version: str) -> None:
        monkeypatch.setattr("eval_pipeline.run.versions_of", lambda names: dict.fromkeys(names, version))

    def later(*overrides: str) -> EvalContext:
        return EvalContext(
            context.directory, load_eval_config(str(tmp_path / "few.yaml"), ["tiers.tier2=[]", *overrides])
        )

    def due(context: EvalContext) -> list[int | None]:
        return [task.checkpoint.step for task in context.unfinished(watcher_of(context).poll())]

    installed("1.26.4")
    context = context_of(tmp_path, "tiers.tier2=[]")
    for step, num_right in ((10, 6), (20, 2)):
        evaluated(context, step, num_right, "runtime_error", owns_selection=True)
    installed("2.3.5")
    assert due(later()) == [30, 40]
    for step, owns_selection in ((30, True), (40, False)):
        evaluated(later(), step, 4, "runtime_error", owns_selection)
        chosen = best_of(context)
        assert chosen["step"] == 10 and chosen["checkpoints"][0]["step"] == 10
    assert due(later()) == []
    assert due(later("judge.packages=[]")) == [10, 20, 30, 40]


@pytest.mark.parametrize(("every", "wanted"), [(1, [10, 20, 30, 40]), (2, [20, 40]), (3, [30]), (5, [])])
def test_tier2_every_selects_checkpoints_of_tier_2(tmp_path: Path, every: int, wanted: list[int]) -> None:
    tasks = watcher_of(context_of(tmp_path, f"tier2_every={every}")).poll()
    assert [task.checkpoint.step for task in tasks if task.dataset == "few"] == [10, 20, 30, 40]
    assert [task.checkpoint.step for task in tasks if task.dataset == "more"] == wanted


@pytest.mark.parametrize(("poll_s", "looks_again"), [("1e-9", True), ("3600", False)])
def test_poll_interval_limits_checkpoint_scans(tmp_path: Path, poll_s: str, looks_again: bool) -> None:
    context = context_of(tmp_path, f"poll_s={poll_s}", "tiers.tier2=[]")
    watcher = watcher_of(context)
    assert len(watcher.poll()) == 4
    commit(context.directory.of_run, 50)
    assert len(watcher.poll()) == 4 + looks_again


@pytest.mark.parametrize(("max_attempts", "state"), [(1, "failed"), (2, "pending")])
def test_retries_follow_max_attempts_and_backoff(tmp_path: Path, max_attempts: int, state: str) -> None:
    context = context_of(tmp_path, f"max_attempts={max_attempts}", "backoff_s=5000")
    context.jobs.fail(claimed(context), "no room", {})
    [job] = context.jobs.jobs()
    assert (job.attempts, job.state) == (1, state)
    assert job.not_before - time.time() == pytest.approx(5000, abs=300)


@pytest.mark.parametrize(("per_error_type", "num_kept"), [(1, 2), (3, 5), (10, 8)])
def test_qa_log_limits_answers_per_error_type(tmp_path: Path, per_error_type: int, num_kept: int) -> None:
    context = context_of(tmp_path, f"qa_per_error_type={per_error_type}")
    job = claimed(context)
    with closing(context.open_job(job, step_10(context))) as active:
        answer_all(active, num_right=2)
        write_job_result(context, active)
    log = context.directory.results_of(job.checkpoint) / "qa_logs" / "few_qa.jsonl"
    assert len(log.read_text().splitlines()) == num_kept


@pytest.mark.parametrize("tier", [None, "2", "3"])
def test_run_evaluates_datasets_up_to_given_tier(
    tier: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tier without datasets is reported."""
    words = ["run", "--checkpoint", str(make_export(tmp_path / "model")), "--recipe", str(tmp_path / "none.yaml")]
    (tmp_path / "none.yaml").write_text("datasets: {}\n")
    with pytest.raises(SystemExit, match="2"):
        main([*words, *([] if tier is None else ["--tier", tier])])
    error = capsys.readouterr().err
    assert f"no tier of the recipe up to {tier or 1} lists a dataset; set tiers.tier{tier or 1}" in error


def test_limit_samples_each_dataset_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit in the recipe still applies."""
    contexts: list[EvalContext] = []
    monkeypatch.setattr("eval_pipeline.watch.evaluate_checkpoint", lambda context, *_: contexts.append(context) or 0)
    context = context_of(tmp_path)
    checkpoint = step_10(context)
    words = ["run", "--checkpoint", str(checkpoint.path), "--recipe", str(tmp_path / "few.yaml")]
    for more in (["datasets.few.limit=5"], ["datasets.few.limit=5", "--limit", "3"]):
        with pytest.raises(SystemExit, match="0"):
            main([*words, *more])
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "3 problems" in told[0] and "seed" in told[0]
    limited, sampled = ([problem.problem_id for problem in each.problems("few")] for each in contexts)
    assert limited == ["p0", "p1", "p2", "p3", "p4"]
    assert len(sampled) == 3 and set(sampled) < set(limited) and sampled != limited[:3]
    digests = [[task.digest for task in each.add_jobs(checkpoint, 1)] for each in contexts]
    assert digests[0] != digests[1]
    assert "sample" not in source_of(contexts[0]) and source_of(contexts[1])["sample"] == 3


def test_incomplete_result_is_marked_and_evaluated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is marked in `metrics.json`, `best_checkpoint.json` and on the terminal; `retry` re-queues it."""
    context = context_of(tmp_path, "wandb=false")
    publisher, run_dir = Publisher(context, owns_selection=True), context.directory.of_run
    [task] = context.add_jobs(step_10(context), tier=1)
    for kinds in (["api_error", *["success"] * 7], ["success"] * NUM_PROBLEMS):
        job = claimed(context)
        with closing(context.open_job(job, step_10(context))) as active:
            while active.has_batches or active.retry_api_errors():
                batch = active.next_batch()
                active.handle(BatchStarted(batch.id, {"isolation": "bwrap", "protocol": {"engine": "none"}}))
                for request in batch.requests:
                    kind = kinds[int(request.problem_id[1:])]
                    active.handle(
                        AnswerReceived(batch.id, key_of(request), GeneratedAnswer("def f(): return 1", 5, False))
                    )
                    active.handle(AnswerJudged(batch.id, key_of(request), Verdict(kind, int(kind == "success"), 1)))
                active.handle(BatchFinished(batch.id, {}))
            write_job_result(context, active)
        context.jobs.finish(job, {})
        assert publisher.publish([task]) == {"step_10"}
        missing = {"few": 1} if "api_error" in kinds else {}
        for path in (context.directory.results_of("step_10") / "metrics.json", run_dir / "best_checkpoint.json"):
            assert json.loads(path.read_text())["incomplete"] == missing
        said = capsys.readouterr().err
        assert ("few is incomplete: 1 answers" in said) == ("best checkpoint, but its results" in said) == bool(missing)
        with pytest.raises(SystemExit, match="0"):
            main(["retry", str(run_dir)])
        assert publisher.publish([task]) == set()
        assert ("step_10 on few (1 answers without a verdict)" in capsys.readouterr().out) == bool(missing)


def test_retry_of_trial_names_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = context_of(tmp_path, "wandb=false")
    trial = EvalContext(eval_dir_of_checkpoint(step_10(run), output=None, is_trial=True), run.config)
    evaluated(trial, 10, 7, "api_error", owns_selection=False)
    assert f"retry {trial.directory.root}`" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["retry", str(trial.directory.root)])
    assert "Re-queued: step_10 on few" in capsys.readouterr().out


def test_report_calls_checkpoint_of_run_by_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it has no results with these settings: it is not the base model, and no point of a plot at step 0."""

    def evaluate(context: EvalContext, checkpoint: EvalCheckpoint, tier: int) -> int:
        [task] = context.add_jobs(checkpoint, tier)
        job = context.jobs.claim([(*task.key, task.digest)])
        assert job is not None
        with closing(context.open_job(job, checkpoint)) as active:
            answer_all(active, num_right=1)
            write_job_result(context, active)
        context.jobs.finish(job, {})
        Publisher(context, owns_selection=False).publish([task])
        return 0

    run_dir = chosen_run(tmp_path).directory.of_run
    monkeypatch.setattr(watch, "evaluate_checkpoint", evaluate)
    words = ["report", str(run_dir), "--baseline", str(run_dir / "global_step_20")]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--recipe", str(tmp_path / "few.yaml"), "sampling.max_tokens=7", "wandb=false"])
    table = (run_dir / "eval" / "report" / "comparison_table.md").read_text()
    assert table.startswith("# step_10 against step_20\n") and "base model" not in table.lower()
    assert "| metric | step_20 | best checkpoint |" in table and "different settings on `few`" in table
    assert "| `accepted_at_1` | 0.1250 [" in table  # with these settings, not 0.75 as in the run
    assert (
        json.loads((run_dir / "eval" / "eval_step_20" / "metrics.json").read_text())["datasets"]["few"]["accepted_at_1"]
        == 0.75
    )


OTHER_RULE = ("selection.metric=accepted_at_1", "selection.mode=min", "selection.dataset=few", "wandb=false")


def chosen_run(directory: Path) -> EvalContext:
    """A run where step 10 has most runnable answers, step 20 most correct ones, and a watcher chose step 10."""
    context = context_of(directory, "wandb=false")
    evaluated(context, 10, 2, "wrong_answer", owns_selection=True)
    evaluated(context, 20, 6, "runtime_error", owns_selection=True)
    assert best_of(context)["step"] == 10
    return context


def another_context(context: EvalContext, *overrides: str) -> EvalContext:
    """A context of the same run with a changed recipe."""
    recipe = load_eval_config(str(context.directory.of_run.parent / "few.yaml"), overrides)
    return EvalContext(eval_dir_of_run(context.directory.of_run), recipe)


@pytest.mark.parametrize("rule", [OTHER_RULE, (OTHER_RULE[0], "wandb=false")])
def test_side_evaluation_rule_does_not_change_best(tmp_path: Path, rule: tuple[str, ...]) -> None:
    """Its checkpoint is compared by the watcher's rule."""
    watched = chosen_run(tmp_path)
    before = best_of(watched)
    context = another_context(watched, *rule)
    evaluated(context, 30, 3, "runtime_error", owns_selection=False)
    after = best_of(context)
    assert [(entry["step"], entry["value"]) for entry in after.pop("checkpoints")] == [(10, 1), (20, 0.75), (30, 0.375)]
    assert after == {key: value for key, value in before.items() if key != "checkpoints"}
    evaluated(context, 40, 8, "success", owns_selection=False)
    assert best_of(context)["step"] == 40  # the newer one wins ties
    Publisher(another_context(watched, *rule), owns_selection=True).update_best_checkpoint()
    assert best_of(context)["metric"] == "accepted_at_1"  # as a watcher does


@pytest.mark.parametrize("override", ["judge.limits.cpu_s=7", "sampling.max_tokens=7", "datasets.few.limit=3"])
def test_side_evaluation_of_best_does_not_change_best(
    tmp_path: Path, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = chosen_run(tmp_path)
    before = best_of(watched)
    evaluated(another_context(watched, override, "wandb=false"), 10, 1, "runtime_error", owns_selection=False)
    assert best_of(watched) == before
    assert "best_checkpoint.json is unchanged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("format", "metric", "step"), [("gsm8k", "accepted_at_1", 10), ("few", "exec_success_rate", 20)]
)
def test_default_metric_follows_problems(tmp_path: Path, format: str, metric: str, step: int) -> None:
    """Every answer without code counts as run, so the newest checkpoint would always be selected."""
    rows = [
        json.dumps({"question": f"1 + {number}?", "answer": f"#### {number + 1}"}) for number in range(NUM_PROBLEMS)
    ]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    overrides = [f"datasets.few.path={tmp_path}/{format}.jsonl", "wandb=false"]
    overrides += ["datasets.few.format=gsm8k"] * (format == "gsm8k")
    context = context_of(tmp_path, *overrides)
    for at, num_right in ((10, 6), (20, 2)):
        evaluated(context, at, num_right, "wrong_answer", owns_selection=True)
    best = best_of(context)
    assert (best["metric"], best["step"]) == (metric, step)


def test_metric_without_code_is_refused_before_evaluation(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    overrides = [f"datasets.few.path={tmp_path}/gsm8k.jsonl", "datasets.few.format=gsm8k"]
    context = context_of(tmp_path, *overrides, "selection.metric=exec_success_rate")
    for evaluate in (lambda: watch_run(context, []), lambda: evaluate_checkpoint(context, step_10(context), 1)):
        with pytest.raises(UserError, match="selection.metric is exec_success_rate, which is 1 for every answer"):
            evaluate()
    assert context.jobs.jobs() == []


def test_finished_run_is_selected_by_changed_rule(tmp_path: Path) -> None:
    watched = chosen_run(tmp_path)
    for step in (30, 40):
        shutil.rmtree(watched.directory.of_run / f"global_step_{step}")
    RunRecord(watched.directory.of_run).end_attempt("finished", 40, "all steps completed")
    for rule, step in (("selection.metric=accepted_at_1", 20), ("selection.metric=null", 10)):
        context = another_context(watched, rule, "wandb=false", "tiers.tier2=[]")
        assert watcher_of(context).poll() and best_of(context)["step"] == step
    before = (context.directory.of_run / "best_checkpoint.json").read_bytes()
    assert watcher_of(context).poll()
    assert (context.directory.of_run / "best_checkpoint.json").read_bytes() == before


def test_system_prompt_is_part_of_evaluation(tmp_path: Path) -> None:
    """Its change queues the evaluation again, and going back reuses the stored answers."""
    context = context_of(tmp_path, "wandb=false")
    assert "system_prompt" not in source_of(context)
    prompted = another_context(context, "datasets.few.system_prompt=Be brief.", "wandb=false")
    assert source_of(prompted)["system_prompt"] == "Be brief."
    with closing(context.open_job(claimed(context), step_10(context))) as active:
        assert not active.has_batches


def test_watcher_of_run_that_starts_later_uses_its_chat_template_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tmp_path, "wandb=false")
    run_dir, polled = context.directory.of_run, []

    def start_run(context: EvalContext, recipe: object) -> int:
        """Watch a run that writes its configuration meanwhile."""
        polled.append(context.config.engine.chat_template_kwargs)
        (run_dir / "config.yaml").write_text("data: {apply_chat_template_kwargs: {enable_thinking: false}}\n")
        assert watcher_of(context).poll()
        return 0

    monkeypatch.setattr(watch, "watch_run", start_run)
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(run_dir), "--recipe", str(tmp_path / "few.yaml")])
    assert polled == [{}, {"enable_thinking": False}] and ended.value.code == 0


def test_chat_template_arguments_of_run_are_part_of_evaluation(tmp_path: Path) -> None:
    """They change the digest of the answers, and results with other arguments are not compared."""
    context = context_of(tmp_path, "wandb=false")
    run_dir, recipe = context.directory.of_run, str(tmp_path / "few.yaml")
    assert config_for_run(recipe, ["wandb=false"], run_dir) == context.config
    evaluated(context, 20, 7, "runtime_error", owns_selection=True)
    [plain] = [job.digest for job in context.jobs.jobs()]
    (run_dir / "config.yaml").write_text("data: {apply_chat_template_kwargs: {enable_thinking: false}}\n")
    config = config_for_run(recipe, ["wandb=false", "engine.chat_template_kwargs.today=Monday"], run_dir)
    assert config.engine.chat_template_kwargs == {"enable_thinking": False, "today": "Monday"}
    changed = EvalContext(context.directory, config)
    assert claimed(changed, 20).digest != plain
    evaluated(changed, 10, 3, "runtime_error", owns_selection=True)
    assert best_of(changed)["step"] == 10
    assert best_of(changed)["settings"]["few"]["chat_template_kwargs"] == config.engine.chat_template_kwargs
    evaluated(context, 30, 2, "runtime_error", owns_selection=True)
    assert best_of(context)["step"] == 20


def test_checkpoint_with_failed_dataset_does_not_change_selection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning comes once."""
    context = context_of(tmp_path, "wandb=false", "tiers.tier1=[few, more]")
    publisher = Publisher(context, owns_selection=True)
    for step, wanted in ((10, ["few", "more"]), (20, ["few"])):
        checkpoint = find_checkpoint(context.directory.of_run / f"global_step_{step}")
        tasks = [task for task in context.add_jobs(checkpoint, tier=1) if task.dataset in wanted]
        for task in tasks:
            job = context.jobs.claim([(*task.key, task.digest)])
            assert job is not None
            with closing(context.open_job(job, checkpoint)) as active:
                answer_all(active, 3 if step == 10 else 8, "runtime_error")
                write_job_result(context, active)
            context.jobs.finish(job, {})
        publisher.publish(tasks)
    publisher.update_best_checkpoint()
    assert (best_of(context)["step"], best_of(context)["datasets"]) == (10, ["few", "more"])
    assert capsys.readouterr().err.count("step_20 is not compared with other checkpoints") == 1


def test_removed_best_checkpoint_is_replaced(tmp_path: Path) -> None:
    watched = chosen_run(tmp_path)
    shutil.rmtree(watched.directory.of_run / "global_step_10")
    evaluated(another_context(watched, *OTHER_RULE), 30, 3, "runtime_error", owns_selection=False)
    assert (best_of(watched)["step"], best_of(watched)["metric"]) == (20, "exec_success_rate")


def source_of(context: EvalContext) -> dict[str, Any]:
    """The source of step 10 on the first dataset, as in `metrics.json`."""
    job = claimed(context)
    with closing(context.open_job(job, step_10(context))) as active:
        answer_all(active, num_right=1)
        write_job_result(context, active)
    result = context.directory.work_of(job.checkpoint, job.dataset) / "result.json"
    return json.loads(result.read_text())["protocol"]["few"]["source"]


def test_failed_evaluations_are_reported_at_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`watch` counts them if there are many; `run` names its own."""

    def fail_all(context: EvalContext, source: TaskSource, *_: Any) -> set[str]:
        for task in source.poll():
            if job := context.jobs.claim([(*task.key, task.digest)]):
                context.jobs.fail(job, "the engine broke\nbecause of that", {})
        return set()

    monkeypatch.setattr("eval_pipeline.watch.run_jobs", fail_all)
    context = context_of(tmp_path, "max_attempts=1", "tier2_every=1")
    assert watch_run(context, ["datasets.few.limit=2"]) == 1
    printed = capsys.readouterr()
    assert "no best checkpoint was selected" in printed.err
    lines = printed.out.splitlines()
    assert "Finished: evaluation of run" in lines
    [failed] = [line.split() for line in lines if line.startswith("  failed ")]
    assert failed[1:4] == ["8", "of", "8"] and "3 more" in " ".join(failed) and "step_10 on few" in " ".join(failed)
    assert [line.split()[-2] for line in lines[-3:-1]] == ["status", "retry"]
    assert lines[-1].split()[-3::2] == ["watch", "datasets.few.limit=2"]
    assert evaluate_checkpoint(context, step_10(context), 1) == 1
    first, reason = capsys.readouterr().out.splitlines()
    assert first == "Failed: evaluation of step_10" and reason.split() == ["few", "the", "engine", "broke"]


def test_failure_of_taken_over_job_is_left_to_other_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context, pool = context_of(tmp_path), Mock()
    tasks = context.add_jobs(step_10(context), tier=1)

    def failing_after_loss(timeout_s: float) -> list[Event]:
        [job] = context.jobs.jobs()
        context.jobs.release(job, {})  # as if another process held the claim
        return [BatchFailed(pool.submit.call_args.args[0].id, "no room")]

    pool.events = failing_after_loss
    JobRunner(context, pool).step(tasks)
    [job] = context.jobs.jobs()
    assert (job.state, job.attempts) == ("pending", 0)
    told = capsys.readouterr().err
    assert "another process has taken over step_10 on few, which failed in this process: no room" in told
    assert "next attempt" not in told


def test_checkpoint_removed_during_evaluation_keeps_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = context_of(tmp_path, "poll_s=1e-9", "tiers.tier2=[]", "max_attempts=1")
    run_dir = context.directory.of_run
    publisher = Publisher(context, owns_selection=True)
    watcher = RunWatcher(context, publisher)
    assert len(watcher.poll()) == 4
    job, checkpoint = claimed(context), step_10(context)
    with closing(context.open_job(job, checkpoint)) as active:
        shutil.rmtree(run_dir / "global_step_10")
        shutil.rmtree(run_dir / "global_step_20")  # waiting
        RunRecord(run_dir).end_attempt("finished", 40, "all steps completed")
        for _ in range(3):
            assert {task.checkpoint.step for task in watcher.poll()} == {10, 30, 40}
        answer_all(active, num_right=8)
        write_job_result(context, active)
    context.jobs.finish(job, active.seconds)
    assert publisher.publish(watcher.poll()) == {"step_10"}
    assert (run_dir / "eval/eval_step_10/metrics.json").exists()
    assert not (run_dir / "best_checkpoint.json").exists()
    told = capsys.readouterr().err
    assert told.count("step_10 was removed during") == 1 and told.count("step_20 was removed before") == 1
    assert publisher.publish(watcher.poll()) == set()
    assert not watcher.exhausted  # the other two


def test_run_that_has_not_started_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = watcher_of(EvalContext(eval_dir_of_run(tmp_path), load_eval_config("quickstart")))
    assert not watcher.has_finished() and not watcher.has_finished()
    assert capsys.readouterr().err.count("has not been started yet") == 1


def test_run_that_its_launcher_starts_gets_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunRecord(tmp_path)
    record.mark_waiting(project="p", experiment="e")
    watcher = watcher_of(EvalContext(eval_dir_of_run(tmp_path), load_eval_config("quickstart")))
    assert not watcher.has_finished()
    record.start_attempt(first_step=0, world_size=1, total_steps=2)
    assert not watcher.has_finished()
    assert not capsys.readouterr().err
    record.end_attempt("finished", 2, "all steps completed")
    assert watcher.has_finished()
