"""Every metric by name: unit, meaning, and how the values of the ranks are combined.

`METRICS` is the single source of metric names; `docs/reference/metrics.md` is generated from it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from verl_ext.console import markdown_table
from verl_ext.errors import UserError

SAME = "the same on every rank"
SUM = "sum over ranks"
LARGEST = "largest over ranks"
RATE = "sum over ranks / seconds of the slowest rank"
RANK_0 = "rank 0's clock"
TOKEN_MEAN = "sum of token losses over ranks / sum of loss tokens over ranks"
_SAMPLES = "over all samples of all ranks"
_TOKENS = "mean over all tokens of all ranks"
_ONE_PROCESS = "one evaluation process"

EVAL_PREFIX = "eval/<dataset>/"
ADAPTIVE_PREFIX = "eval/adaptive/"
_ERROR_TYPES = ("success", "wrong_answer", "syntax_error", "runtime_error", "timeout", "api_error")
_STATISTICS = {"mean": "Mean", "std": "Standard deviation", "min": "Smallest", "max": "Largest"}


@dataclass(frozen=True)
class Metric:
    """What the values of a metric mean.

    Attributes:
        unit: of the value, `1` for a plain number.
        meaning: one sentence.
        reduction: how the values of all ranks become the logged one.
    """

    unit: str
    meaning: str
    reduction: str


# Every training stage

TRAINING: dict[str, Metric] = {
    "train/loss": Metric(
        "nat/token",
        "Cross-entropy over the loss tokens of the global batch; in the stage grpo the clipped policy loss, in the "
        "stage budget `train/policy_gradient_loss`.",
        TOKEN_MEAN,
    ),
    "train/perplexity": Metric("1", "exp(`train/loss`).", "from the reduced loss"),
    "train/lr(1e-3)": Metric("1e-3", "Learning rate of this step, times 1000.", SAME),
    "train/grad_norm": Metric("1", "L2 norm of the whole gradient before clipping.", "over all shards"),
    "train/num_loss_tokens": Metric("token", "Tokens of the global batch that contribute to the loss.", SUM),
    "train/epoch": Metric("epoch", "Passes over the training data since the run began, with its fraction.", SAME),
    "train/skipped_steps": Metric(
        "step", "Updates skipped since the run began because the loss or the gradient was not finite.", SAME
    ),
    "train/time(s)": Metric("s", "Forward, backward and update, without the wait for data; verl's name.", LARGEST),
}

VALIDATION: dict[str, Metric] = {
    "val/loss": Metric("nat/token", "Cross-entropy over the loss tokens of the whole validation set.", TOKEN_MEAN),
    "val/perplexity": Metric("1", "exp(`val/loss`).", "from the reduced loss"),
    "val/num_loss_tokens": Metric("token", "Tokens of the validation set that contribute to the loss.", SUM),
}

THROUGHPUT: dict[str, Metric] = {
    "throughput/train/tokens_per_s": Metric("token/s", "Tokens processed per second, without padding.", RATE),
    "throughput/train/samples_per_s": Metric("sample/s", "Samples processed per second.", RATE),
    "throughput/train/mfu": Metric(
        "1", "Model FLOPs per second over the devices' peak FLOPs per second; on GPUs only.", "mean over ranks"
    ),
}

TIME: dict[str, Metric] = {
    "time/train/step_s": Metric("s", "The whole training step.", LARGEST),
    "time/train/data_s": Metric("s", "Waiting for the next batch.", LARGEST),
    "time/train/forward_backward_s": Metric("s", "Forward and backward passes of all micro-batches.", LARGEST),
    "time/train/optimizer_s": Metric("s", "Clipping the gradient and updating the weights.", LARGEST),
    "time/train/save_s": Metric("s", "Saving a checkpoint: only the part that the training step waits for.", RANK_0),
    "time/checkpoint/write_s": Metric(
        "s", "Writing a checkpoint until it is committed, including the part in the background.", RANK_0
    ),
    "time/val/step_s": Metric("s", "A whole validation pass.", RANK_0),
}

_START_PARTS = {
    "launcher": "From the command to a checked configuration.",
    "torchrun": "Importing torch for torchrun, and starting a process for each rank.",
    "imports": "Starting Python and importing the stage.",
    "process_group": "Initializing the process group.",
    "tokenizer": "Loading the tokenizer.",
    "data": "Reading and tokenizing the data.",
    "model": "Loading the model, sharding it, and creating the optimizer.",
    "checkpoint": "Choosing and loading a checkpoint, and waiting for the other ranks.",
    "trackers": "Opening run.json, tables and trackers.",
    "validation": "The validation before the first step.",
    "first_step": "The first step.",
    "total": "All of the above.",
}
"""In the order in which they happen."""

START: dict[str, Metric] = {
    f"time/start/{part}_s": Metric("s", meaning, RANK_0) for part, meaning in _START_PARTS.items()
}

SYSTEM: dict[str, Metric] = {
    "system/disk_free_gib": Metric("GiB", "Free space where checkpoints are written, after a save.", RANK_0),
    "system/peak_memory_gib": Metric("GiB", "Peak memory: of the device on GPUs, of the process on CPUs.", LARGEST),
}


# Stages that learn from rewards


def _statistics(name: str, what: str, *statistics: str, unit: str = "1") -> dict[str, Metric]:
    """One metric for each of some statistics of a quantity."""
    return {f"{name}_{each}": Metric(unit, f"{_STATISTICS[each]} {what}.", _SAMPLES) for each in statistics}


def _rewards(split: str) -> dict[str, Metric]:
    return {
        **_statistics(f"{split}/reward_total", "of the weighted sums of rewards", "mean", "std", "min", "max"),
        f"{split}/<reward>_mean": Metric("1", "Mean weighted contribution of one reward function.", _SAMPLES),
        f"{split}/samples_without_reward": Metric("sample", "Samples dropped because a reward function failed.", SUM),
        f"{split}/reward_failures": Metric("sample", "Calls of reward functions that returned no reward.", SUM),
        **_statistics(f"{split}/seq_prompt_len", "length of a prompt", "mean", "max", unit="token"),
        **_statistics(f"{split}/seq_completion_len", "length of a completion", "mean", "max", unit="token"),
        **_statistics(f"{split}/seq_total_len", "length of prompt and completion", "mean", "max", unit="token"),
        f"{split}/total_valid_token_count": Metric("token", "Tokens of all completions.", SUM),
    }


GRPO: dict[str, Metric] = {
    **_rewards("train"),
    **_statistics("train/adv", "of the advantages", "mean", "std", "min", "max"),
    "train/entropy": Metric("nat/token", "Entropy of the distributions that tokens are sampled from.", _TOKENS),
    "train/policy_gradient_loss": Metric(
        "nat", "-log-probability times advantage, whose gradient is that of a step's first update.", _TOKENS
    ),
    "train/kl": Metric("nat/token", "KL divergence from the reference, by `actor.kl_loss_type`.", _TOKENS),
    "train/update_kl": Metric("nat/token", "KL divergence of the updated policy from the sampling policy.", _TOKENS),
    "train/clip_fraction": Metric("1", "Share of the tokens whose ratio was clipped.", _TOKENS),
    "train/dual_clip_fraction": Metric("1", "Share of the tokens whose ratio was beyond `clip_ratio_c`.", _TOKENS),
    "train/rollout_logprob_diff_mean": Metric(
        "nat", "Distance between the engine's and the trainer's log-probability of a token, before the update.", _TOKENS
    ),
    "train/rollout_logprob_diff_max": Metric("nat", "The largest such distance.", LARGEST),
    "train/ratio_deviation_max": Metric(
        "1",
        "Largest distance of a probability ratio from 1 at the step's first update; with one update per step, the "
        "ratio is to the engine's probability.",
        LARGEST,
    ),
    "train/groups_without_signal": Metric("group", "Groups whose rewards are all the same.", SUM),
    "train/groups_replaced": Metric("group", "Groups without signal that dynamic sampling replaced.", SUM),
    **_rewards("eval"),
    "throughput/train/valid_tokens_per_s": Metric("token/s", "Tokens of completions per second of the step.", RATE),
    "throughput/train/valid_tokens_per_s_update": Metric("token/s", "The same per second of the updates.", RATE),
    "throughput/eval/valid_tokens_per_s": Metric("token/s", "Tokens of completions per second of validation.", RATE),
    "time/train/rollout_s": Metric("s", "Generating completions.", LARGEST),
    "time/train/reward_s": Metric("s", "Waiting for rewards after the last completion.", LARGEST),
    "time/train/advantages_s": Metric("s", "Computing advantages from the rewards of each group.", LARGEST),
    "time/train/shard_s": Metric("s", "Building tensors from the completions.", LARGEST),
    "time/train/update_s": Metric("s", "Forward and backward passes and the optimizer.", LARGEST),
    "time/eval/rollout_s": Metric("s", "Generating completions for validation.", LARGEST),
    "time/eval/reward_s": Metric("s", "Waiting for their rewards.", LARGEST),
    "time/eval/step_s": Metric("s", "A whole validation pass.", LARGEST),
    "weights/sync_s": Metric("s", "Sending the weights to the rollout engine.", RANK_0),
    "weights/bytes": Metric("byte", "Size of the weights sent; 0 if the engine already had them.", SAME),
    "weights/version": Metric("step", "Step whose weights generated the completions.", SAME),
}


def _configurations(split: str) -> dict[str, Metric]:
    return {
        **_statistics(f"{split}/accuracy", "of the accuracy of the answers, from 0 to 1", "mean", "std"),
        **_statistics(f"{split}/latency_ms", "of the latency of a configuration", "mean", "std", unit="ms"),
        **_statistics(f"{split}/budget_violation", "of 1 if the latency exceeds the budget, else 0", "mean", "std"),
        **_statistics(f"{split}/budget_ms", "latency budget", "mean", "max", unit="ms"),
        **_statistics(f"{split}/num_active", "number of transformer blocks that run", "mean", "max", unit="block"),
        **_statistics(f"{split}/tier", "index of the tier, from 0", "mean", "max"),
        **_statistics(f"{split}/topk", "experts per token in a running block", "mean", "max", unit="expert"),
        f"{split}/num_configs": Metric("configuration", "Configurations that were chosen.", SUM),
        f"throughput/{split}/configs_per_s": Metric("configuration/s", "Configurations per second of the step.", RATE),
    }


def _epoch(split: str, what: str) -> dict[str, Metric]:
    quantities = {"Reward": "1", "Accuracy": "1", "Latency": "ms"}
    return {
        **{
            f"{split}/{name}_{each.title()}": Metric(
                unit, f"{_STATISTICS[each]} of the {name.lower()} over {what}.", _SAMPLES
            )
            for name, unit in quantities.items()
            for each in ("mean", "std")
        },
        f"{split}/Budget_Violation_Rate": Metric("1", f"Share of {what} whose latency exceeds the budget.", _SAMPLES),
    }


BUDGET: dict[str, Metric] = {
    **_configurations("train"),
    **_configurations("eval"),
    "throughput/train/configs_per_s_update": Metric("configuration/s", "The same per second of the update.", RATE),
    "throughput/train/cache_hit_rate": Metric(
        "1", "Share of the configurations whose result for the sample was already cached.", "over all ranks"
    ),
    "Train/Loss": Metric(
        "1", "Mean loss of an epoch's steps; the x-axis of this and the following metrics is the epoch.", SAME
    ),
    **_epoch("Train", "an epoch's configurations"),
    **_epoch("Val", "the samples of the validation at its end"),
}


# Evaluation of checkpoints and of budget controllers

_EVAL_METRICS: dict[str, tuple[str, str]] = {
    "num_problems": ("problem", "Problems in the data set."),
    "exec_success_rate": ("1", "Share of the answers that ran: `success` and `wrong_answer`."),
    "accepted_at_1": ("1", "Share of the answers that solve their problem."),
    "num_samples": ("answer", "Answers per problem, if there are several."),
    "pass_at_<k>": ("1", "Unbiased probability that one of k answers solves its problem; needs several answers."),
    "pass_ratio_mean": ("1", "Mean over the problems of the share of tests passed."),
    "pass_ratio_p50": ("1", "Median over the problems of the share of tests passed."),
    "pass_ratio_p90": ("1", "90th percentile over the problems of the share of tests passed."),
    "avg_gen_tokens": ("token", "Mean length of an answer."),
    "avg_judge_time": ("s", "Mean time to judge an answer."),
    "throughput": ("problem/s", "Problems generated and judged per second."),
    "truncation_rate": ("1", "Share of the answers truncated at the maximum number of new tokens."),
    "cost_per_solved_tokens": ("token", "Generated tokens of all answers per solved problem."),
    "cost_per_solved_judge_time": ("s", "Judging time of all answers per solved problem."),
}

EVALUATION: dict[str, Metric] = {
    **{EVAL_PREFIX + name: Metric(unit, text, _ONE_PROCESS) for name, (unit, text) in _EVAL_METRICS.items()},
    **{
        f"{EVAL_PREFIX}{kind}_rate": Metric("1", f"Share of the answers whose error type is `{kind}`.", _ONE_PROCESS)
        for kind in _ERROR_TYPES
    },
    f"{EVAL_PREFIX}<rate>_low": Metric("1", "Lower bound of a rate's 95 % confidence interval.", _ONE_PROCESS),
    f"{EVAL_PREFIX}<rate>_high": Metric("1", "Upper bound of a rate's 95 % confidence interval.", _ONE_PROCESS),
}

_METHOD_METRICS: dict[str, tuple[str, str]] = {
    "accuracy": ("1", "Mean accuracy of the answers, from 0 to 1."),
    "latency_ms_mean": ("ms", "Mean latency; the controller's includes the time of its decision."),
    "latency_ms_p50": ("ms", "Median of the same."),
    "latency_ms_p95": ("ms", "95th percentile of the same."),
    "violation_rate": ("1", "Share of the questions whose latency exceeds the budget."),
    "complexity": ("1", "Mean share of the model that ran."),
}
_SUMMARY_METRICS: dict[str, tuple[str, str]] = {
    "controller_minus_lookup_table": ("1", "Accuracy of the controller minus the lookup table's, mean over budgets."),
    "controller_minus_lookup_table_low": ("1", "Lower bound of its 95 % confidence interval."),
    "controller_minus_lookup_table_high": ("1", "Upper bound of its 95 % confidence interval."),
    "gap_closed": ("1", "Share of the accuracy gap between lookup table and oracle that the controller closes."),
    "num_gap_budgets": ("budget", "Budgets whose gap is at least one point; `gap_closed` is the mean over these."),
    "worst_violation_rate": ("1", "The controller's highest violation rate over the budgets."),
    "worst_violation_budget_ms": ("ms", "The budget of that rate."),
    "decision_ms": ("ms", "Mean time that the decision adds to a latency."),
    "features_ms": ("ms", "Part of `decision_ms`: pooling image and question for the controller."),
    "network_ms": ("ms", "Part of `decision_ms`: the controller's forward pass."),
    "choice_ms": ("ms", "Part of `decision_ms`: taking the likeliest configuration."),
    "full_ms": ("ms", "Mean measured latency of the full model."),
    "network_share": ("1", "`network_ms` / `full_ms`."),
    "measured_again": ("1", "Measurements repeated because another process used the processor, over all runs."),
}

ADAPTIVE: dict[str, Metric] = {
    f"{ADAPTIVE_PREFIX}budget_ms": Metric("ms", "Latency budget, the x-axis of the metrics of methods.", _ONE_PROCESS),
    **{
        f"{ADAPTIVE_PREFIX}<method>_{name}": Metric(unit, text, _ONE_PROCESS)
        for name, (unit, text) in _METHOD_METRICS.items()
    },
    **{ADAPTIVE_PREFIX + name: Metric(unit, text, _ONE_PROCESS) for name, (unit, text) in _SUMMARY_METRICS.items()},
}


# All of them

SECTIONS: dict[str, dict[str, Metric]] = {
    "Training": TRAINING,
    "GRPO": GRPO,
    "Budget controller": BUDGET,
    "Validation": VALIDATION,
    "Throughput": THROUGHPUT,
    "Time": TIME,
    "Startup, logged once per start with its first step": START,
    "System": SYSTEM,
    "Checkpoint evaluation": EVALUATION,
    "Budget controller evaluation": ADAPTIVE,
}
"""By heading of `docs/reference/metrics.md`."""

METRICS: dict[str, Metric] = {name: metric for section in SECTIONS.values() for name, metric in section.items()}


def lookup_metric(name: str) -> Metric:
    """The entry of a metric.

    Args:
        name: a logged name, such as `train/loss` or `eval/humaneval/accepted_at_1`. Names of data sets, methods and
            rewards match the patterns `eval/<dataset>/...`, `eval/adaptive/<method>_...` and `<reward>_mean`.

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
    """The entry that a name may belong to."""
    parts = name.split("/")
    if name.startswith(ADAPTIVE_PREFIX):
        return name if name in METRICS else re.sub(rf"/\w+?_({'|'.join(_METHOD_METRICS)})$", r"/<method>_\1", name)
    if len(parts) == 3 and parts[0] == "eval":
        if bound := re.search(r"_(?:low|high)$", parts[2]):
            return f"{EVAL_PREFIX}<rate>{bound[0]}"
        return EVAL_PREFIX + re.sub(r"^pass_at_\d+$", "pass_at_<k>", parts[2])
    if len(parts) == 2 and parts[0] in ("train", "eval") and name not in METRICS:
        return re.sub(r"/\w+_mean$", "/<reward>_mean", name)
    return name


_INTRODUCTION = """# Metrics

Generated by `python -m verl_ext.metrics.reference`; edit `verl_ext/metrics/registry.py` instead.

Every value is reduced over all ranks before it is logged, and only rank 0 logs. `metrics.jsonl` in the run directory
holds every row of every attempt. The console, TensorBoard and W&B show the same rows; the CSV tables have those of
steps and validations, in the stage budget one row per epoch.
"""


def render_metrics_page() -> str:
    """The text of `docs/reference/metrics.md`: one Markdown table per section."""
    parts, header = [_INTRODUCTION], ("metric", "unit", "meaning", "over ranks")
    for title, metrics in SECTIONS.items():
        rows = ((f"`{name}`", each.unit, each.meaning, each.reduction) for name, each in metrics.items())
        parts.append(f"## {title}\n\n{markdown_table(header, rows)}\n")
    return "\n".join(parts)
