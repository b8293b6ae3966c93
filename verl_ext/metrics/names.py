"""Every metric the pipeline logs: its unit, its meaning, and how the ranks' values become one."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from verl_ext.errors import UserError

DATASET = "<dataset>"
_EVAL_PREFIX = f"eval/{DATASET}/"
_ADAPTIVE_PREFIX = "eval/adaptive/"
_ERROR_TYPES = ("success", "wrong_answer", "syntax_error", "runtime_error", "timeout", "api_error")

_SAME = "the same on every rank"
_SUM = "sum over ranks"
_LARGEST = "largest over ranks"
_RATE = "sum over ranks / seconds of the slowest rank"
_RANK_0 = "rank 0's clock"
_TOKEN_MEAN = "sum of token losses over ranks / sum of loss tokens over ranks"
_JUDGED = "one evaluation process"


@dataclass(frozen=True)
class Metric:
    """What a metric's numbers mean.

    Attributes:
        unit: the unit of the value, `1` for a pure number.
        meaning: one sentence.
        reduction: how the values of all ranks become the logged one.
    """

    unit: str
    meaning: str
    reduction: str


TRAINING: dict[str, Metric] = {
    "train/loss": Metric(
        "nat/token",
        "Cross-entropy over the loss tokens of the whole global batch; in the stage grpo the clipped policy loss, in "
        "the stage budget `train/policy_gradient_loss`.",
        _TOKEN_MEAN,
    ),
    "train/perplexity": Metric("1", "exp(`train/loss`).", "from the reduced loss"),
    "train/lr(1e-3)": Metric("1e-3", "Learning rate used by this step, times 1000.", _SAME),
    "train/grad_norm": Metric("1", "L2 norm of the whole gradient before clipping.", "over all shards"),
    "train/num_loss_tokens": Metric("token", "Tokens of the global batch that have a loss.", _SUM),
    "train/epoch": Metric("epoch", "Passes over the training data since the run began, with its fraction.", _SAME),
    "train/skipped_steps": Metric(
        "step", "Updates since the run began that were left out: loss or gradient was not finite.", _SAME
    ),
    "train/time(s)": Metric("s", "Forward, backward and update, without the wait for data; verl's name.", _LARGEST),
}

_SAMPLES = "over all samples of all ranks"
_DECISIONS = "mean over all tokens of all ranks"


def _spread(name: str, what: str, *figures: str, unit: str = "1") -> dict[str, Metric]:
    """A metric for each of some figures of one quantity."""
    words = {"mean": "Mean", "std": "Standard deviation", "min": "Smallest", "max": "Largest"}
    return {f"{name}_{figure}": Metric(unit, f"{words[figure]} {what}.", _SAMPLES) for figure in figures}


def _rewards(kind: str) -> dict[str, Metric]:
    return {
        **_spread(f"{kind}/reward_total", "of the weighted rewards' sums", "mean", "std", "min", "max"),
        f"{kind}/<reward>_mean": Metric("1", "Mean weighted contribution of one reward function.", _SAMPLES),
        f"{kind}/reward_failures": Metric("sample", "Reward functions that gave nothing for a sample.", _SUM),
        **_spread(f"{kind}/seq_prompt_len", "length of a prompt", "mean", "max", unit="token"),
        **_spread(f"{kind}/seq_completion_len", "length of a completion", "mean", "max", unit="token"),
        **_spread(f"{kind}/seq_total_len", "length of prompt and completion", "mean", "max", unit="token"),
        f"{kind}/total_valid_token_count": Metric("token", "Tokens of all completions.", _SUM),
    }


GRPO: dict[str, Metric] = {
    **_rewards("train"),
    **_spread("train/adv", "of the advantages", "mean", "std", "min", "max"),
    "train/entropy": Metric("nat/token", "Entropy of the distributions that tokens are drawn from.", _DECISIONS),
    "train/policy_gradient_loss": Metric(
        "nat", "-log-probability times advantage, whose gradient is that of a step's first update.", _DECISIONS
    ),
    "train/kl": Metric("nat/token", "KL divergence from the reference, by `actor.kl_loss_type`.", _DECISIONS),
    "train/update_kl": Metric("nat/token", "KL divergence of the updated from the drawing policy.", _DECISIONS),
    "train/clip_fraction": Metric("1", "Share of the tokens whose ratio was clipped.", _DECISIONS),
    "train/dual_clip_fraction": Metric("1", "Share of the tokens whose ratio was beyond `clip_ratio_c`.", _DECISIONS),
    "train/rollout_logprob_diff_mean": Metric(
        "nat",
        "Distance between the engine's and the trainer's log-probability of a token, before the update.",
        _DECISIONS,
    ),
    "train/rollout_logprob_diff_max": Metric("nat", "The largest such distance.", _LARGEST),
    "train/ratio_deviation_max": Metric(
        "1", "Largest distance of a ratio from 1 at the step's first update.", _LARGEST
    ),
    "train/groups_without_signal": Metric("group", "Groups whose rewards are all the same.", _SUM),
    "train/groups_replaced": Metric("group", "Groups that dynamic sampling put in the place of such.", _SUM),
    **_rewards("eval"),
    "throughput/train/valid_tokens_per_s": Metric("token/s", "Tokens of completions per second of the step.", _RATE),
    "throughput/train/valid_tokens_per_s_update": Metric("token/s", "The same per second of the updates.", _RATE),
    "throughput/eval/valid_tokens_per_s": Metric("token/s", "Tokens of completions per second measured.", _RATE),
    "time/train/rollout_s": Metric("s", "Drawing completions.", _LARGEST),
    "time/train/reward_s": Metric("s", "Waiting for rewards after the last completion.", _LARGEST),
    "time/train/advantages_s": Metric("s", "Comparing rewards within groups.", _LARGEST),
    "time/train/shard_s": Metric("s", "Making tensors of the completions.", _LARGEST),
    "time/train/update_s": Metric("s", "Forward and backward passes and the optimizer.", _LARGEST),
    "time/eval/rollout_s": Metric("s", "Drawing completions of a measurement.", _LARGEST),
    "time/eval/reward_s": Metric("s", "Waiting for their rewards.", _LARGEST),
    "time/eval/step_s": Metric("s", "A whole measurement.", _LARGEST),
    "weights/sync_s": Metric("s", "Sending the weights to the rollout engine.", _RANK_0),
    "weights/bytes": Metric("byte", "Size of the weights that were sent; 0 where the engine had them already.", _SAME),
    "weights/version": Metric("step", "Step whose weights drew the completions.", _SAME),
}


def _configurations(kind: str) -> dict[str, Metric]:
    return {
        **_spread(f"{kind}/accuracy", "accuracy of the answers, from 0 to 1", "mean", "std"),
        **_spread(f"{kind}/latency_ms", "latency of a configuration that was run", "mean", "std", unit="ms"),
        **_spread(f"{kind}/budget_violation", "of 1 where the latency is above the budget, else 0", "mean", "std"),
        **_spread(f"{kind}/budget_ms", "latency budget", "mean", "max", unit="ms"),
        **_spread(f"{kind}/num_active", "number of transformer blocks that run", "mean", "max", unit="block"),
        **_spread(f"{kind}/tier", "place of the tier, from 0", "mean", "max"),
        **_spread(f"{kind}/topk", "experts of a token in a running block", "mean", "max", unit="expert"),
        f"{kind}/num_configs": Metric("configuration", "Configurations that were chosen.", _SUM),
        f"throughput/{kind}/configs_per_s": Metric("configuration/s", "Configurations per second of the step.", _RATE),
    }


def _epoch(kind: str, what: str) -> dict[str, Metric]:
    spread = {"Mean": "Mean", "Std": "Standard deviation"}
    quantities = {"Reward": "1", "Accuracy": "1", "Latency": "ms"}
    return {
        **{
            f"{kind}/{name}_{figure}": Metric(unit, f"{words} of the {name.lower()} over {what}.", _SAMPLES)
            for name, unit in quantities.items()
            for figure, words in spread.items()
        },
        f"{kind}/Budget_Violation_Rate": Metric("1", f"Share of {what} whose latency is above the budget.", _SAMPLES),
    }


BUDGET: dict[str, Metric] = {
    **_configurations("train"),
    **_configurations("eval"),
    "throughput/train/configs_per_s_update": Metric("configuration/s", "The same per second of the update.", _RATE),
    "throughput/train/cache_hit_rate": Metric(
        "1", "Share of the configurations whose result for the sample was known already.", "over all ranks"
    ),
    "Train/Loss": Metric("1", "Mean loss of an epoch's steps; its axis is the epoch, as for the next.", _SAME),
    **_epoch("Train", "an epoch's configurations"),
    **_epoch("Val", "the samples that are measured at its end"),
}

VALIDATION: dict[str, Metric] = {
    "val/loss": Metric("nat/token", "Cross-entropy over the loss tokens of the whole validation set.", _TOKEN_MEAN),
    "val/perplexity": Metric("1", "exp(`val/loss`).", "from the reduced loss"),
    "val/num_loss_tokens": Metric("token", "Tokens of the validation set that have a loss.", _SUM),
}

THROUGHPUT: dict[str, Metric] = {
    "throughput/train/tokens_per_s": Metric("token/s", "Tokens, padding left out, processed per second.", _RATE),
    "throughput/train/samples_per_s": Metric("sample/s", "Samples processed per second.", _RATE),
    "throughput/train/mfu": Metric(
        "1", "Model FLOPs per second over the devices' peak FLOPs per second; on GPUs only.", "mean over ranks"
    ),
}

TIME: dict[str, Metric] = {
    "time/train/step_s": Metric("s", "The whole training step.", _LARGEST),
    "time/train/data_s": Metric("s", "Waiting for the next batch.", _LARGEST),
    "time/train/forward_backward_s": Metric("s", "Forward and backward passes of all micro-batches.", _LARGEST),
    "time/train/optimizer_s": Metric("s", "Clipping the gradient and updating the weights.", _LARGEST),
    "time/train/save_s": Metric("s", "Saving a checkpoint, as far as the step waited for it.", _RANK_0),
    "time/checkpoint/write_s": Metric(
        "s", "Writing a checkpoint until it is committed, the part in the background included.", _RANK_0
    ),
    "time/val/step_s": Metric("s", "A whole validation pass.", _RANK_0),
}

_START_PARTS = {
    "launcher": "From the command to a checked configuration.",
    "torchrun": "Importing torch for torchrun, and torchrun's way to a new process for each rank.",
    "imports": "Starting Python and importing the stage.",
    "process_group": "Meeting the other ranks.",
    "tokenizer": "Loading the tokenizer.",
    "data": "Reading and tokenising the data.",
    "model": "Loading the model, sharding it, and making the optimizer.",
    "checkpoint": "Choosing and loading a checkpoint, and waiting for the other ranks.",
    "trackers": "Opening run.json, tables and trackers.",
    "validation": "The validation before the first step.",
    "first_step": "The first step.",
    "total": "All of it.",
}
"""In the order in which they pass."""

START: dict[str, Metric] = {
    f"time/start/{part}_s": Metric("s", meaning, _RANK_0) for part, meaning in _START_PARTS.items()
}

SYSTEM: dict[str, Metric] = {
    "system/disk_free_gib": Metric("GiB", "Free space where checkpoints are written, after a save.", _RANK_0),
    "system/peak_memory_gib": Metric("GiB", "Peak memory: of the device on GPUs, of the process on CPUs.", _LARGEST),
}

_EVAL_FIGURES: dict[str, tuple[str, str]] = {
    "num_problems": ("problem", "Problems asked."),
    "exec_success_rate": ("1", "Share of the answers that ran: `success` and `wrong_answer`."),
    "accepted_at_1": ("1", "Share of the answers that solve their problem."),
    "num_samples": ("answer", "Answers to each problem, where there are several."),
    "pass_at_<k>": ("1", "Chance that one of k answers to a problem solves it, unbiased; with several answers alone."),
    "pass_ratio_mean": ("1", "Mean over the problems of the share of tests passed."),
    "pass_ratio_p50": ("1", "Median over the problems of the share of tests passed."),
    "pass_ratio_p90": ("1", "90th percentile over the problems of the share of tests passed."),
    "avg_gen_tokens": ("token", "Mean length of an answer."),
    "avg_judge_time": ("s", "Mean time to judge an answer."),
    "throughput": ("problem/s", "Problems generated and judged per second."),
    "truncation_rate": ("1", "Share of the answers cut at the largest number of new tokens."),
    "cost_per_solved_tokens": ("token", "Generated tokens of all answers per solved problem."),
    "cost_per_solved_judge_time": ("s", "Judging time of all answers per solved problem."),
}

EVALUATION: dict[str, Metric] = {
    **{_EVAL_PREFIX + name: Metric(unit, text, _JUDGED) for name, (unit, text) in _EVAL_FIGURES.items()},
    **{
        f"{_EVAL_PREFIX}{kind}_rate": Metric("1", f"Share of the answers whose error type is `{kind}`.", _JUDGED)
        for kind in _ERROR_TYPES
    },
    f"{_EVAL_PREFIX}<rate>_low": Metric("1", "Lower bound of a rate's 95 % confidence interval.", _JUDGED),
    f"{_EVAL_PREFIX}<rate>_high": Metric("1", "Upper bound of a rate's 95 % confidence interval.", _JUDGED),
}

_METHOD_FIGURES: dict[str, tuple[str, str]] = {
    "accuracy": ("1", "Mean accuracy of the answers, from 0 to 1."),
    "latency_ms_mean": ("ms", "Mean latency, of the controller with what deciding took."),
    "latency_ms_p50": ("ms", "Median of the same."),
    "latency_ms_p95": ("ms", "95th percentile of the same."),
    "violation_rate": ("1", "Share of the questions whose latency is above the budget."),
    "complexity": ("1", "Mean share of the model that ran."),
}
_SUMMARY_FIGURES: dict[str, tuple[str, str]] = {
    "controller_minus_lookup_table": ("1", "Accuracy of the controller less the lookup table's; mean over budgets."),
    "controller_minus_lookup_table_low": ("1", "Lower bound of its 95 % confidence interval."),
    "controller_minus_lookup_table_high": ("1", "Upper bound of its 95 % confidence interval."),
    "gap_closed": ("1", "Share of the accuracy between lookup table and oracle that the controller has."),
    "num_gap_budgets": ("budget", "Budgets with at least a point between the two, over which that is the mean."),
    "worst_violation_rate": ("1", "The controller's greatest violation rate over the budgets."),
    "worst_violation_budget_ms": ("ms", "The budget where that is."),
    "decision_ms": ("ms", "Mean of what deciding adds to a latency."),
    "features_ms": ("ms", "Mean of pooling image and question for the controller, a part of it."),
    "network_ms": ("ms", "Mean of the controller's forward pass, a part of it."),
    "choice_ms": ("ms", "Mean of taking the likeliest configuration, a part of it."),
    "full_ms": ("ms", "Mean latency of all of the model, as measured."),
    "network_share": ("1", "`network_ms` / `full_ms`."),
    "measured_again": ("1", "Measurements made again, because something else had the processor, over all runs."),
}

ADAPTIVE: dict[str, Metric] = {
    f"{_ADAPTIVE_PREFIX}budget_ms": Metric("ms", "Latency budget, the axis of the figures of methods.", _JUDGED),
    **{
        f"{_ADAPTIVE_PREFIX}<method>_{name}": Metric(unit, text, _JUDGED)
        for name, (unit, text) in _METHOD_FIGURES.items()
    },
    **{_ADAPTIVE_PREFIX + name: Metric(unit, text, _JUDGED) for name, (unit, text) in _SUMMARY_FIGURES.items()},
}

SECTIONS: dict[str, dict[str, Metric]] = {
    "Training": TRAINING,
    "Training by GRPO": GRPO,
    "The budget controller": BUDGET,
    "Validation": VALIDATION,
    "Throughput": THROUGHPUT,
    "Time": TIME,
    "The start, once for each, with its first step": START,
    "System": SYSTEM,
    "Checkpoint evaluation": EVALUATION,
    "The budget controller's evaluation": ADAPTIVE,
}

METRICS: dict[str, Metric] = {name: metric for section in SECTIONS.values() for name, metric in section.items()}


def describe(name: str) -> Metric:
    """Look a metric up.

    Args:
        name: a logged name, such as `train/loss` or `eval/humaneval/accepted_at_1`.

    Returns:
        Its entry; that of the pattern `eval/<dataset>/...` or `eval/adaptive/<method>_...` for an evaluation metric, of
        `<reward>_mean` for a reward.

    Raises:
        UserError: no metric has this name.
    """
    pattern = _pattern(name)
    if pattern not in METRICS:
        near = difflib.get_close_matches(pattern, METRICS, n=3)
        near_it = f"near it are {', '.join(near)}" if near else "docs/metrics.md lists them all"
        raise UserError(f"no metric is named '{name}'; {near_it}")
    return METRICS[pattern]


def _pattern(name: str) -> str:
    """The entry that a name may belong to."""
    parts = name.split("/")
    if name.startswith(_ADAPTIVE_PREFIX):
        methods = "|".join(_METHOD_FIGURES)
        return name if name in METRICS else re.sub(rf"/\w+?_({methods})$", r"/<method>_\1", name)
    if len(parts) == 3 and parts[0] == "eval":
        return _EVAL_PREFIX + _figure_pattern(parts[2])
    if len(parts) == 2 and parts[0] in ("train", "eval") and name not in METRICS:
        return re.sub(r"/\w+_mean$", "/<reward>_mean", name)
    return name


def _figure_pattern(figure: str) -> str:
    """`pass_at_5` as `pass_at_<k>`, and a bound of an interval as `<rate>_low` or `<rate>_high`."""
    for bound in ("_low", "_high"):
        if figure.endswith(bound):
            return f"<rate>{bound}"
    return re.sub(r"^pass_at_\d+$", "pass_at_<k>", figure)
