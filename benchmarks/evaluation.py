"""Evaluating a model on HumanEval's 164 problems: how well generation and judging overlap, and the seconds by part.

DIR is an export, by default the quickstart's model of random weights
(`python -m verl_ext.data.prepare quickstart --output data/quickstart`).

In one process with a loaded engine, the evaluation's own worker processes one batch of all problems in several ways,
which alternate: `generation` generates every answer and judges none; `judging` judges existing answers and generates
none; `whole` does both, like an evaluation. `ratio` is whole / the longer of the other two. The judge gets the
`generated` answers and, in separate rounds, the `canonical` solutions, each submitted when the model's answer to its
problem is complete: most answers of a small model fail immediately, and cost a judge less than correct ones. `tail_s`
is the time of a whole round after its last answer.

If both need every CPU, no overlap can make the whole shorter than their CPU time divided by the number of CPUs:
`cpu_bound_s`. `over_cpu_bound` is whole / the longest of generation, judging and that bound.

`command` is `python -m eval_pipeline run`, from its start to metrics.json, by part: `start_s` until the engine is
ready, `answering_s` until the last verdict, `writing_s` until the results are published. Results are medians, with
their `ranges`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    ROOT,
    CPUClock,
    Numbers,
    Results,
    bench_parser,
    columns,
    in_rounds,
    medians,
    ranges,
    run,
    spread,
    write_results,
)
from eval_pipeline.config import EvalConfig, SamplingConfig
from eval_pipeline.engines import Engine, GeneratedAnswer, GenerateRequest
from eval_pipeline.problems.datasets import load_problems
from eval_pipeline.recipe import load_eval_config
from eval_pipeline.report.results import read_evaluation
from eval_pipeline.worker import (
    AnswerJudged,
    AnswerKey,
    AnswerReceived,
    Batch,
    BatchFailed,
    BatchId,
    BatchLost,
    EvalWorker,
    Event,
    key_of,
    split_into_batches,
)
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError

MODEL = ROOT / "data" / "quickstart" / "model"
VARIANTS = ("generated", "canonical")
KINDS = ("generation", *(f"{part} {variant}" for part in ("judging", "whole") for variant in VARIANTS))
COMMAND = "the command"


# One worker


class ReplacingEngine(Engine):
    """An engine that replaces the texts of its answers; answers to problems without a replacement are unchanged.

    Args:
        engine: a started engine.
        texts: replacement texts by `problem_id`.
    """

    def __init__(self, engine: Engine, texts: Mapping[str, str]) -> None:
        self._engine, self._texts = engine, texts
        self.protocol, self.seconds = engine.protocol, engine.seconds

    def __enter__(self) -> ReplacingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass  # the worker closes the engine

    def answers(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Iterator[tuple[GenerateRequest, GeneratedAnswer]]:
        for request, answer in self._engine.answers(requests, sampling):
            text = self._texts.get(request.problem_id)
            yield request, answer if text is None else replace(answer, text=text, error=None)


class ReplacingWorker(EvalWorker):
    """A worker that submits replacement texts to the judge, each when the answer that it replaces is complete."""

    texts: Mapping[str, str] = {}

    def _open_engine(self, batch: Batch) -> Engine:
        return ReplacingEngine(super()._open_engine(batch), self.texts)


class RoundEvents:
    """Collects what a worker emits in one round."""

    def __init__(self) -> None:
        self.answers: dict[AnswerKey, GeneratedAnswer] = {}
        self.error_types: Counter[str] = Counter()
        self.last_answer = time.perf_counter()
        self.failure: str | None = None

    def add(self, event: Event) -> None:
        """Add an event; several threads may call this."""
        if isinstance(event, AnswerReceived):
            self.answers[event.key] = event.answer
            self.last_answer = time.perf_counter()
        elif isinstance(event, AnswerJudged):
            self.error_types[event.verdict.error_type] += 1
        elif isinstance(event, BatchFailed):
            self.failure = event.error
        elif isinstance(event, BatchLost):
            self.failure = event.reason


class WorkerRounds:
    """A context with one engine and one judge, which are kept from round to round.

    Args:
        recipe: a recipe with HumanEval, whose `batch_size` allows one batch of all problems.
        export: Hugging Face model directory.

    Raises:
        UserError: `batch_size` is too small.
    """

    def __init__(self, recipe: EvalConfig, export: Path) -> None:
        problems = load_problems(recipe.sources["humaneval"])
        self.num_problems = len(problems)
        self._canonical = {each.problem_id: f"```python\n{each.canonical_solution}\n```" for each in problems}
        batches = split_into_batches(problems, recipe.sampling, recipe.batch_size)
        if len(batches) != 1:
            raise UserError(f"batch_size is {recipe.batch_size}; at least {len(problems)} make all problems one batch")
        by_id = {problem.problem_id: problem for problem in problems}
        self._batch = Batch(BatchId(claim=1, number=0), export, by_id, batches[0], recipe.sampling)
        self._recipe = recipe
        self._answers: dict[AnswerKey, GeneratedAnswer] = {}
        self._error_types: dict[str, dict[str, int]] = {}

    def __enter__(self) -> WorkerRounds:
        """Start judge and engine, and generate the answers once."""
        self._clock = CPUClock()  # created before the processes that it measures
        self._worker = ReplacingWorker(self._recipe)
        self.run("generation")
        return self

    def __exit__(self, *_: object) -> None:
        """Close both."""
        self._worker.__exit__(None, None, None)

    def run(self, kind: str) -> dict[str, float]:
        """Run one round; returns its wall-clock and CPU seconds, and the seconds after its last answer.

        Args:
            kind: one of `KINDS`.

        Raises:
            UserError: the worker failed.
        """
        part, _, variant = kind.partition(" ")
        self._worker.texts = self._canonical if variant == "canonical" else {}
        batch, events = self.batch_for(part, variant), RoundEvents()
        cpu, started = self._clock.seconds(), time.perf_counter()
        self._worker.run(batch, events.add)
        end = time.perf_counter()
        seconds = {"wall_s": end - started, "cpu_s": self._clock.seconds() - cpu}
        if events.failure is not None:
            raise UserError(f"{kind}: {events.failure}")
        if part == "generation":
            self._answers = events.answers
        else:
            self._error_types[variant] = dict(events.error_types)
        return seconds | ({"tail_s": end - events.last_answer} if part == "whole" else {})

    def batch_for(self, part: str, variant: str) -> Batch:
        """The batch that an evaluation would submit, with the answers and verdicts that already exist."""
        if part == "generation":
            return replace(self._batch, judged=frozenset(map(key_of, self._batch.requests)))
        if part == "whole":
            return self._batch
        texts = self._canonical if variant == "canonical" else {}
        answers = {key: replace(each, text=texts.get(key[0], each.text)) for key, each in self._answers.items()}
        return replace(self._batch, answers=answers)

    def answers_info(self) -> Results:
        """Statistics of the answers, and their verdicts."""
        lengths = [answer.num_tokens for answer in self._answers.values()]
        return {
            "mean_tokens": sum(lengths) / len(lengths),
            "max_tokens": max(lengths),
            "truncated": sum(answer.truncated for answer in self._answers.values()),
            "verdicts": self._error_types,
        }


# The command


def command_parts(model: Path, overrides: list[str]) -> dict[str, float]:
    """Run the command once in a fresh directory; seconds of each part, from the start of the process.

    Args:
        model: Hugging Face model directory.
        overrides: overrides of the recipe humaneval.

    Raises:
        UserError: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_evaluation_") as directory:
        words = ["run", "--checkpoint", str(model), "--recipe", "humaneval", "--no-wandb", "--output", directory]
        started = time.time()
        run([sys.executable, "-m", "eval_pipeline", *words, *overrides])
        return parts_of(Path(directory), started, time.time())


def parts_of(directory: Path, started: float, ended: float) -> dict[str, float]:
    """The parts, from the modification times of files; they add up to `total_s`, and `exit_s` follows.

    Args:
        directory: directory of the evaluation.
        started: when the process started, in seconds since 1970.
        ended: when the process ended, in seconds since 1970.
    """
    [protocol] = directory.glob("work/humaneval/protocol-*.json")
    [verdicts] = directory.glob("work/humaneval/verdicts-*.jsonl")
    metrics = directory / "metrics.json"
    ready, judged, published = (path.stat().st_mtime for path in (protocol, verdicts, metrics))
    result = read_evaluation(directory).datasets["humaneval"]
    num_problems = result.metrics["num_problems"]
    assert num_problems is not None
    return {
        "start_s": ready - started,
        "answering_s": judged - ready,
        "writing_s": published - judged,
        "total_s": published - started,
        "exit_s": ended - published,
        "engine_import_s": result.seconds["import_s"],
        "engine_load_s": result.seconds["load_s"],
        "problems_per_s": num_problems / (published - started),
    }


# Summary


def overlap_of(generation: Numbers, judging: Numbers, whole: Numbers, num_cpus: int) -> dict[str, float]:
    """How well generation and judging overlapped.

    Args:
        generation: wall-clock and CPU seconds, `wall_s` and `cpu_s`, of generation alone.
        judging: the same for judging alone.
        whole: the same for both together.
        num_cpus: number of CPUs that both share.
    """
    longer = max(generation["wall_s"], judging["wall_s"])
    bound = (generation["cpu_s"] + judging["cpu_s"]) / num_cpus
    return {
        "ratio": whole["wall_s"] / longer,
        "one_after_the_other_ratio": (generation["wall_s"] + judging["wall_s"]) / longer,
        "cpu_bound_s": bound,
        "over_cpu_bound": whole["wall_s"] / max(longer, bound),
    }


def summary_of(rounds: Mapping[str, Sequence[Numbers]], num_problems: int, num_cpus: int) -> Results:
    """Medians, ranges, ratios and rates of each variant."""
    generation = medians(rounds["generation"])
    summary: Results = {"generation": generation}
    for variant in VARIANTS:
        judging, whole = (medians(rounds[f"{part} {variant}"]) for part in ("judging", "whole"))
        summary[variant] = {
            "judging": judging,
            "whole": whole,
            "problems_per_s": num_problems / whole["wall_s"],
            **overlap_of(generation, judging, whole, num_cpus),
        }
    summary["ranges"] = {kind: ranges(found) for kind, found in rounds.items()}
    return summary


def table_of(summary: Results, rounds: Mapping[str, Sequence[Numbers]]) -> str:
    """The results as text."""
    seconds = {kind: spread(columns(found)["wall_s"]) for kind, found in rounds.items()}
    lines = [f"{kind:<20}{text} s" for kind, text in seconds.items()]
    lines.append(f"{'':<12}{'tail':>7}{'ratio':>7}{'CPU bound':>11}{'over it':>9}")
    for variant in VARIANTS:
        each = summary[variant]
        lines.append(
            f"{variant:<12}{each['whole']['tail_s']:>7.2f}{each['ratio']:>7.2f}{each['cpu_bound_s']:>11.2f}"
            f"{each['over_cpu_bound']:>9.2f}"
        )
    return "\n".join(lines)


@clean_exit()
def main() -> int:
    """Measure, print and write the results."""
    more = "--model models/mine --repeats 3 --output FILE.json sampling.max_tokens=256"
    parser = bench_parser("evaluation", __doc__, "", more)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe humaneval")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", default=MODEL, help="export (default: the quickstart's random model)"
    )
    parser.add_argument("--repeats", type=IntArg(), default=5, help="measured rounds of each kind")
    parser.add_argument("--commands", type=IntArg(0), default=3, help="runs of the command, after a warm-up run")
    arguments = parser.parse_args()
    model, overrides = arguments.model.resolve(), arguments.overrides
    with WorkerRounds(load_eval_config("humaneval", overrides), model) as worker:
        sides = {kind: partial(worker.run, kind) for kind in KINDS}
        rounds = in_rounds(sides, arguments.repeats, "measuring", warm_up=1)
        info = {"answers": worker.answers_info(), "num_problems": worker.num_problems}
    summary = summary_of(rounds, worker.num_problems, len(os.sched_getaffinity(0)))
    print_line(table_of(summary, rounds))
    if arguments.commands:
        run_command = {COMMAND: partial(command_parts, model, overrides)}
        commands = in_rounds(run_command, arguments.commands, COMMAND, warm_up=1)[COMMAND]
        summary["command"], summary["ranges"][COMMAND] = medians(commands), ranges(commands)
        print_line("command: " + ", ".join(f"{name} {spread(values)}" for name, values in columns(commands).items()))
    job = {"model": arguments.model.name, "overrides": overrides, **info, "repeats": arguments.repeats}
    write_results({**job, **summary, "turns": rounds}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
