"""All metrics by name: unit, meaning, and reduction over ranks.

`METRICS` is the single source of metric names; `docs/reference/metrics.md` is generated from it.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from verl_ext.console import markdown_table
from verl_ext.errors import UserError

SAME, SUM, MEAN, LARGEST, RATE, RANK_0 = "same", "sum", "mean", "max", "rate", "rank 0"
SAMPLES, TOKENS = "samples", "tokens"
_ONE_PROCESS = "one process"

EVAL_PREFIX = "eval/<dataset>/"
ADAPTIVE_PREFIX = "eval/adaptive/"
CONSOLE_FORMATS = {
    "train/loss": "loss {:.4f}",
    "train/reward_total_mean": "reward {:.3f}",
    "train/accuracy_mean": "acc {:.3f}",
    "train/latency_ms_mean": "latency {:.1f} ms",
    "train/seq_completion_len_mean": "length {:.0f}",
    "train/kl": "KL {:z.4f}",
    "train/update_kl": "step KL {:.4f}",
    "train/lr(1e-3)": "lr {:.2e}",
    "train/grad_norm": "grad norm {:.3f}",
    "throughput/train/tokens_per_s": "{:,.0f} tokens/s",
    "val/loss": "val loss {:.4f}",
    "val/perplexity": "val perplexity {:.3f}",
    "time/val/step_s": "{:.1f} s",
    "eval/reward_total_mean": "eval reward {:.3f}",
    "eval/accuracy_mean": "acc {:.3f}",
    "eval/latency_ms_mean": "latency {:.1f} ms",
    "eval/budget_violation_mean": "over budget {:.1%}",
    "eval/seq_completion_len_mean": "length {:.0f}",
    "time/eval/step_s": "{:.1f} s",
}
"""Label and format of the metrics on the console; `train/lr(1e-3)` is shown in units of 1."""
_METHOD_METRICS = ("accuracy", "latency_ms_mean", "latency_ms_p50", "latency_ms_p95", "violation_rate", "complexity")


@dataclass(frozen=True)
class Metric:
    """Description of a metric.

    Attributes:
        unit: unit of the value; `1` for a plain number.
        meaning: one sentence.
        reduction: how the values of all ranks are reduced, in a term that the page explains.
    """

    unit: str
    meaning: str
    reduction: str


@dataclass(frozen=True)
class Section:
    """A table of the page.

    Attributes:
        text: text above the table.
        metrics: metrics by name; `{a,b}` in a name stands for one metric with each word.
    """

    text: str
    metrics: Mapping[str, Metric]

    def by_name(self) -> dict[str, Metric]:
        """Return each metric by its full name."""
        return {name: metric for pattern, metric in self.metrics.items() for name in names_of(pattern)}


def names_of(pattern: str) -> list[str]:
    """Expand a pattern to metric names: `train/adv_{mean,std}` stands for two."""
    parts = re.split(r"{([^}]*)}", pattern)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return list(map("".join, itertools.product(*choices)))


_TRAINING = Section(
    "Every training stage logs these at each step. `train/perplexity`, `train/num_loss_tokens` and `train/time(s)` "
    "come from the SFT stages only. Without any loss token (grpo: any reward), a step makes no update, and has no "
    "loss, perplexity or gradient norm.",
    {
        "train/loss": Metric(
            "nat/token",
            "Cross-entropy; grpo: clipped policy loss; budget: `train/policy_gradient_loss`.",
            TOKENS,
        ),
        "train/perplexity": Metric("1", "exp(`train/loss`).", "of the reduced loss"),
        "train/lr(1e-3)": Metric("1e-3", "Learning rate times 1000.", SAME),
        "train/grad_norm": Metric("1", "L2 norm of the whole gradient before clipping.", "all shards"),
        "train/num_loss_tokens": Metric("token", "Tokens that contribute to the loss.", SUM),
        "train/epoch": Metric("epoch", "Passes over the training data since the run began, such as 1.5.", SAME),
        "train/skipped_steps": Metric(
            "update", "Updates skipped so far because of a non-finite loss or gradient.", SAME
        ),
        "train/time(s)": Metric(
            "s", "Forward, backward and update, without waiting for data (named as in verl).", LARGEST
        ),
    },
)
_VALIDATION = Section(
    "Both SFT stages log these at each validation.",
    {
        "val/loss": Metric("nat/token", "Cross-entropy over the whole validation set.", TOKENS),
        "val/perplexity": Metric("1", "exp(`val/loss`).", "of the reduced loss"),
        "val/num_loss_tokens": Metric("token", "Tokens that contribute to the loss.", SUM),
    },
)
_THROUGHPUT = Section(
    "`throughput/train/tokens_per_s` and `throughput/train/mfu` come from the SFT stages only.",
    {
        "throughput/train/tokens_per_s": Metric("token/s", "Tokens, without padding.", RATE),
        "throughput/train/samples_per_s": Metric("sample/s", "Samples.", RATE),
        "throughput/train/mfu": Metric(
            "1",
            "Model FLOPs utilization by verl's count: six FLOPs per token and weight, even with LoRA; GPUs only.",
            MEAN,
        ),
    },
)
_TIME = Section(
    "`time/train/forward_backward_s` and `time/train/optimizer_s` come from the SFT stages only.",
    {
        "time/train/step_s": Metric("s", "The whole training step.", LARGEST),
        "time/train/data_s": Metric("s", "Waiting for the next batch.", LARGEST),
        "time/train/forward_backward_s": Metric("s", "Forward and backward passes of all micro-batches.", LARGEST),
        "time/train/optimizer_s": Metric("s", "Gradient clipping and weight update.", LARGEST),
        "time/train/save_s": Metric("s", "The part of a save that training waits for.", RANK_0),
        "time/checkpoint/write_s": Metric("s", "The whole save until its commit, including background work.", RANK_0),
        "time/val/step_s": Metric("s", "A validation pass.", RANK_0),
    },
)
_STARTUP = Section(
    "The first step after each start logs these, measured on rank 0.",
    {
        f"time/start/{part}_s": Metric("s", meaning, RANK_0)
        for part, meaning in {
            "launcher": "From the command to a checked configuration.",
            "torchrun": "Importing torch for torchrun, and starting a process per rank.",
            "imports": "Starting Python and importing the stage.",
            "process_group": "Initializing the process group.",
            "tokenizer": "Loading the tokenizer.",
            "data": "Reading and tokenizing the data.",
            "model": "Loading and sharding the model, and creating the optimizer.",
            "checkpoint": "Selecting and loading a checkpoint, and waiting for the other ranks.",
            "trackers": "Opening run.json, tables and trackers.",
            "validation": "The validation before the first step.",
            "first_step": "The first step.",
            "total": "The sum of all of these.",
        }.items()
    },
)
_SYSTEM = Section(
    "",
    {
        "system/disk_free_gib": Metric("GiB", "Free disk space for checkpoints, after a save.", RANK_0),
        "system/peak_memory_gib": Metric("GiB", "Peak memory of the device (GPU) or the process (CPU).", LARGEST),
    },
)


# Stages that learn from rewards

_GRPO = Section(
    "The grpo stage logs these, and the budget stage logs some of them. `<reward>` is a reward function's name.",
    {
        "{train,eval}/reward_total_{mean,std,min,max}": Metric("1", "Weighted sum of a sample's rewards.", SAMPLES),
        "{train,eval}/<reward>_mean": Metric("1", "Weighted contribution of one reward function.", SAMPLES),
        "eval/{reward_total,reward_correct,code_tests}_mean_of_<source>": Metric(
            "1",
            "Mean of this reward over the evaluation prompts of a `data_source`, for the 20 largest of several.",
            SAMPLES,
        ),
        "{train,eval}/samples_without_reward": Metric("sample", "Samples dropped because a reward failed.", SUM),
        "{train,eval}/reward_failures": Metric("call", "Reward calls that returned no reward.", SUM),
        "{train,eval}/seq_prompt_len_{mean,max}": Metric("token", "Length of a prompt.", SAMPLES),
        "{train,eval}/seq_completion_len_{mean,max}": Metric("token", "Length of a completion.", SAMPLES),
        "{train,eval}/seq_total_len_{mean,max}": Metric("token", "Length of prompt and completion.", SAMPLES),
        "{train,eval}/total_valid_token_count": Metric("token", "Tokens of all completions.", SUM),
        "train/adv_{mean,std,min,max}": Metric("1", "Advantages.", SAMPLES),
        "train/entropy": Metric("nat/token", "Entropy of the sampling distributions.", TOKENS),
        "train/policy_gradient_loss": Metric(
            "nat", "-log-probability times advantage; its gradient equals that of the step's first update.", TOKENS
        ),
        "train/kl": Metric(
            "nat/token",
            "KL divergence from the reference, by `actor.kl_loss_type`; `low_var_kl` and `k3` are clamped to 10 per "
            "token and have no gradient where clamped (`low_var_kl+` and `k2` do).",
            TOKENS,
        ),
        "train/update_kl": Metric("nat/token", "KL divergence of the updated policy from the sampling policy.", TOKENS),
        "train/clip_fraction": Metric(
            "1", "Fraction of tokens with a clipped ratio; of excluded tokens with `clip_cov`.", TOKENS
        ),
        "train/dual_clip_fraction": Metric(
            "1", "Fraction of tokens with a ratio beyond `clip_ratio_c`; only with `vanilla`.", TOKENS
        ),
        "train/rollout_logprob_diff_mean": Metric(
            "nat", "Log-probability difference of a token between engine and trainer, before the update.", TOKENS
        ),
        "train/rollout_logprob_diff_max": Metric("nat", "The largest such difference.", LARGEST),
        "train/ratio_deviation_max": Metric(
            "1",
            "Largest deviation of a probability ratio from 1 at the step's first update. With one update per step, the "
            "ratio is relative to the engine's probability.",
            LARGEST,
        ),
        "train/num_groups": Metric("group", "Groups of samples: the prompts of the step.", SUM),
        "train/groups_without_signal": Metric("group", "Groups whose rewards are all equal.", SUM),
        "train/groups_replaced": Metric("group", "Such groups replaced by dynamic sampling.", SUM),
        "throughput/{train,eval}/valid_tokens_per_s": Metric("token/s", "Completion tokens.", RATE),
        "throughput/train/valid_tokens_per_s_update": Metric(
            "token/s", "Completion tokens per second of update.", RATE
        ),
        "time/{train,eval}/rollout_s": Metric("s", "Generating completions.", LARGEST),
        "time/{train,eval}/reward_s": Metric("s", "Waiting for rewards after the last completion.", LARGEST),
        "time/train/advantages_s": Metric("s", "Computing advantages.", LARGEST),
        "time/train/shard_s": Metric("s", "Building tensors from completions.", LARGEST),
        "time/train/update_s": Metric("s", "Forward and backward passes and optimizer.", LARGEST),
        "time/eval/step_s": Metric("s", "An evaluation pass.", LARGEST),
        "weights/sync_s": Metric("s", "Sending the weights to the rollout engine.", RANK_0),
        "weights/bytes": Metric("byte", "Size of the weights sent; 0 if the engine already had them.", SAME),
        "weights/version": Metric("step", "Step whose weights generated the completions.", SAME),
    },
)
_BUDGET = Section(
    "The budget stage logs these. The x-axis of `Train/` and `Val/` is the epoch. `Val/` comes "
    "from the epoch's last validation.",
    {
        "{train,eval}/accuracy_{mean,std}": Metric("1", "Accuracy of the answers, from 0 to 1.", SAMPLES),
        "{train,eval}/latency_ms_{mean,std}": Metric("ms", "Latency of a configuration.", SAMPLES),
        "{train,eval}/budget_violation_{mean,std}": Metric("1", "1 if latency exceeds the budget, else 0.", SAMPLES),
        "{train,eval}/budget_ms_{mean,max}": Metric("ms", "Latency budget.", SAMPLES),
        "{train,eval}/num_active_{mean,max}": Metric("block", "Active transformer blocks.", SAMPLES),
        "{train,eval}/tier_{mean,max}": Metric("1", "Index of the tier, from 0.", SAMPLES),
        "{train,eval}/topk_{mean,max}": Metric("expert", "Experts per token in an active block.", SAMPLES),
        "{train,eval}/num_configs": Metric("configuration", "Configurations chosen.", SUM),
        "throughput/{train,eval}/configs_per_s": Metric("configuration/s", "Configurations.", RATE),
        "throughput/train/configs_per_s_update": Metric(
            "configuration/s", "Configurations per second of update.", RATE
        ),
        "throughput/train/cache_hit_rate": Metric(
            "1", "Fraction of configurations whose result for the sample was cached.", SAMPLES
        ),
        "Train/Loss": Metric("1", "Mean loss of an epoch's steps.", SAME),
        "{Train,Val}/Reward_{Mean,Std}": Metric("1", "Reward.", SAMPLES),
        "{Train,Val}/Accuracy_{Mean,Std}": Metric("1", "Accuracy.", SAMPLES),
        "{Train,Val}/Latency_{Mean,Std}": Metric("ms", "Latency.", SAMPLES),
        "{Train,Val}/Budget_Violation_Rate": Metric("1", "Fraction with a latency above the budget.", SAMPLES),
    },
)


# Evaluation of checkpoints and of budget controllers


def _evaluated(prefix: str, metrics: Mapping[str, tuple[str, str]]) -> dict[str, Metric]:
    return {f"{prefix}{name}": Metric(unit, meaning, _ONE_PROCESS) for name, (unit, meaning) in metrics.items()}


_EVALUATION = Section(
    "The evaluation of a checkpoint logs these for each dataset. Rates have 95% confidence intervals.",
    _evaluated(
        EVAL_PREFIX,
        {
            "num_problems": ("problem", "Problems in the dataset."),
            "exec_success_rate": ("1", "Fraction of answers that ran: `success` and `wrong_answer`."),
            "accepted_at_1": ("1", "Fraction of answers that solve their problem: pass@1."),
            "num_samples": ("answer", "Answers per problem, if more than one."),
            "pass_at_<k>": ("1", "Unbiased pass@k, with several answers per problem."),
            "pass_ratio_{mean,p50,p90}": ("1", "Fraction of tests passed: mean and percentiles over problems."),
            "avg_gen_tokens": ("token", "Mean length of an answer."),
            "avg_judge_time": ("s", "Mean time to judge an answer."),
            "throughput": ("problem/s", "Problems generated and judged per second."),
            "truncation_rate": ("1", "Fraction of answers truncated at the maximum number of new tokens."),
            "cost_per_solved_tokens": ("token", "Generated tokens of all answers per solved problem."),
            "cost_per_solved_judge_time": ("s", "Judging time of all answers per solved problem."),
            "{success,wrong_answer,syntax_error,runtime_error,timeout,api_error}_rate": (
                "1",
                "Fraction of answers of this error type.",
            ),
            "<rate>_{low,high}": ("1", "Bounds of a rate's confidence interval."),
        },
    ),
)
_ADAPTIVE = Section(
    "`bash eval_pipeline/run.sh adaptive` logs these. The metrics of a `<method>` are logged for each budget.",
    _evaluated(
        ADAPTIVE_PREFIX,
        {
            "budget_ms": ("ms", "Latency budget, the x-axis for metrics of a `<method>`."),
            "<method>_accuracy": ("1", "Mean accuracy of the answers, from 0 to 1."),
            "<method>_latency_ms_{mean,p50,p95}": ("ms", "Latency; the controller's includes its decision."),
            "<method>_violation_rate": ("1", "Fraction of questions with a latency above the budget."),
            "<method>_complexity": ("1", "Mean fraction of the model that ran."),
            "controller_minus_lookup_table": (
                "1",
                "Controller's accuracy minus the lookup table's, mean over budgets.",
            ),
            "controller_minus_lookup_table_{low,high}": ("1", "Bounds of its 95% confidence interval."),
            "gap_closed": ("1", "Fraction of the accuracy gap from lookup table to oracle that the controller closes."),
            "num_gap_budgets": (
                "budget",
                "Budgets with a gap of at least one point; `gap_closed` averages over them.",
            ),
            "worst_violation_rate": ("1", "The controller's highest violation rate over the budgets."),
            "worst_violation_budget_ms": ("ms", "The budget with that rate."),
            "decision_ms": ("ms", "Mean time that the decision adds to the latency."),
            "features_ms": ("ms", "Part of `decision_ms`: pooling image and question."),
            "network_ms": ("ms", "Part of `decision_ms`: the controller's forward pass."),
            "choice_ms": ("ms", "Part of `decision_ms`: selecting the most likely configuration."),
            "full_ms": ("ms", "Mean measured latency of the full model."),
            "network_share": ("1", "`network_ms` / `full_ms`."),
            "retries_per_run": ("1", "Retries per measured run, caused by other load on the CPU."),
        },
    ),
)


# All of them

SECTIONS: dict[str, Section] = {
    "Training": _TRAINING,
    "Validation": _VALIDATION,
    "Throughput": _THROUGHPUT,
    "Time": _TIME,
    "Startup": _STARTUP,
    "System": _SYSTEM,
    "GRPO": _GRPO,
    "Budget controller": _BUDGET,
    "Checkpoint evaluation": _EVALUATION,
    "Budget controller evaluation": _ADAPTIVE,
}
"""Sections by heading in `docs/reference/metrics.md`."""
START, EVALUATION = _STARTUP.by_name(), _EVALUATION.by_name()
METRICS: dict[str, Metric] = {name: metric for each in SECTIONS.values() for name, metric in each.by_name().items()}


def lookup_metric(name: str) -> Metric:
    """Return the entry of a metric.

    Args:
        name: a logged name, such as `train/loss` or `eval/humaneval/accepted_at_1`. Names of datasets, methods,
            rewards and sources match patterns such as `eval/<dataset>/...` and `<reward>_mean`.

    Raises:
        UserError: no metric has this name.
    """
    pattern = _pattern(name)
    if pattern not in METRICS:
        near = difflib.get_close_matches(pattern, METRICS, n=3)
        hint = f"similar names are {', '.join(near)}" if near else "docs/reference/metrics.md lists all metrics"
        raise UserError(f"no metric is named '{name}'; {hint}")
    return METRICS[pattern]


def _pattern(name: str) -> str:
    """Return the pattern that a name may match."""
    parts = name.split("/")
    if name.startswith(ADAPTIVE_PREFIX):
        return name if name in METRICS else re.sub(rf"/\w+?_({'|'.join(_METHOD_METRICS)})$", r"/<method>_\1", name)
    if len(parts) == 3 and parts[0] == "eval":
        if bound := re.search(r"_(?:low|high)$", parts[2]):
            return f"{EVAL_PREFIX}<rate>{bound[0]}"
        return EVAL_PREFIX + re.sub(r"^pass_at_\d+$", "pass_at_<k>", parts[2])
    if len(parts) == 2 and parts[0] in ("train", "eval") and name not in METRICS:
        if source := re.fullmatch(r"(eval/(?:reward_total|reward_correct|code_tests)_mean_of_)[\w-]+", name):
            return f"{source[1]}<source>"
        return re.sub(r"/\w+_mean$", "/<reward>_mean", name)
    return name


_MEASURES = ("nat", "nat/token", "token", "byte", "ms", "s", "problem/s")
"""Units that the page shows, except for metrics whose names match `_SHOWS_UNIT`."""
_SHOWS_UNIT = re.compile(r"_(s|ms)(_|$)|\(s\)$|num_|count$")
_INTRODUCTION = """# Metrics

<!-- Generated by `python -m verl_ext.docgen metrics`. -->

Look up what a run or an evaluation logs. `metrics.jsonl`, the CSV tables, TensorBoard and W&B use the same names; the
console [abbreviates them](#on-the-console):

```python
import pandas as pd

rows = pd.read_json("checkpoints/rlvr_coding_model/sft_quickstart/metrics.jsonl", lines=True)
rows.plot(x="step", y="train/loss")
```

In a name, `{train,eval}` stands for either word. Units are in parentheses unless the name shows them. Each value is
reduced over all ranks before rank 0 logs it:

| over ranks | value |
| --- | --- |
| sum, mean, max | of the ranks' values |
| samples | the statistic over the samples of all ranks |
| tokens | mean over the tokens of all ranks; for losses, over the loss tokens |
| rate | sum over the ranks divided by the seconds of the slowest rank |
| rank 0 | measured on rank 0 |
| same | identical on every rank |
"""
_CONSOLE = """## On the console

The console and `train.log` abbreviate metrics. If a GRPO run has several reward functions, the line of a validation
also shows each function's mean, `eval/NAME_mean`, as `NAME`. The values after the progress bar are training metrics;
its `ms` is `train/latency_ms_mean`.
"""


def render_metrics_page() -> str:
    """Return the text of `docs/reference/metrics.md`, with one Markdown table per section."""
    parts, header = [_INTRODUCTION], ("metric", "meaning", "over ranks")
    for title, section in SECTIONS.items():
        rows = [(f"`{name}`", _meaning_of(name, each), each.reduction) for name, each in section.metrics.items()]
        columns = 3 if len({row[-1] for row in rows}) > 1 else 2
        table = markdown_table(header[:columns], (row[:columns] for row in rows))
        parts.append("\n\n".join(filter(None, [f"## {title}", section.text, table])) + "\n")
    metrics_of: dict[str, list[str]] = {}
    for name, form in CONSOLE_FORMATS.items():
        label = re.sub(r"{:[^}%]*(%?)}", r"N\1", form)
        metrics_of.setdefault(label, []).append(f"`{name}`" + " times 0.001" * name.endswith("(1e-3)"))
    shown = [(f"`{label}`", ", ".join(names)) for label, names in metrics_of.items()]
    return "\n".join([*parts, f"{_CONSOLE}\n{markdown_table(('console', 'metric'), shown)}\n"])


def _meaning_of(name: str, metric: Metric) -> str:
    """The meaning and, unless the name shows it, the unit."""
    text = metric.meaning.removesuffix(".")
    return f"{text} ({metric.unit})" if metric.unit in _MEASURES and not _SHOWS_UNIT.search(name) else text
