"""Metrics of learning from rewards: by GRPO, and of a budget controller."""

from __future__ import annotations

from verl_ext.metrics.registry.metric import LARGEST, RANK_0, RATE, SAME, SUM, Metric

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
        f"{kind}/samples_without_reward": Metric("sample", "Samples left out because a reward function failed.", SUM),
        f"{kind}/reward_failures": Metric("sample", "Reward functions that gave nothing for a sample.", SUM),
        **_spread(f"{kind}/seq_prompt_len", "length of a prompt", "mean", "max", unit="token"),
        **_spread(f"{kind}/seq_completion_len", "length of a completion", "mean", "max", unit="token"),
        **_spread(f"{kind}/seq_total_len", "length of prompt and completion", "mean", "max", unit="token"),
        f"{kind}/total_valid_token_count": Metric("token", "Tokens of all completions.", SUM),
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
    "train/rollout_logprob_diff_max": Metric("nat", "The largest such distance.", LARGEST),
    "train/ratio_deviation_max": Metric(
        "1",
        "Largest distance of a probability ratio from 1 at the step's first update; with one update per step, the "
        "ratio is to the engine's probability.",
        LARGEST,
    ),
    "train/groups_without_signal": Metric("group", "Groups whose rewards are all the same.", SUM),
    "train/groups_replaced": Metric("group", "Groups that dynamic sampling put in the place of such.", SUM),
    **_rewards("eval"),
    "throughput/train/valid_tokens_per_s": Metric("token/s", "Tokens of completions per second of the step.", RATE),
    "throughput/train/valid_tokens_per_s_update": Metric("token/s", "The same per second of the updates.", RATE),
    "throughput/eval/valid_tokens_per_s": Metric("token/s", "Tokens of completions per second measured.", RATE),
    "time/train/rollout_s": Metric("s", "Drawing completions.", LARGEST),
    "time/train/reward_s": Metric("s", "Waiting for rewards after the last completion.", LARGEST),
    "time/train/advantages_s": Metric("s", "Comparing rewards within groups.", LARGEST),
    "time/train/shard_s": Metric("s", "Making tensors of the completions.", LARGEST),
    "time/train/update_s": Metric("s", "Forward and backward passes and the optimizer.", LARGEST),
    "time/eval/rollout_s": Metric("s", "Drawing completions of a measurement.", LARGEST),
    "time/eval/reward_s": Metric("s", "Waiting for their rewards.", LARGEST),
    "time/eval/step_s": Metric("s", "A whole measurement.", LARGEST),
    "weights/sync_s": Metric("s", "Sending the weights to the rollout engine.", RANK_0),
    "weights/bytes": Metric("byte", "Size of the weights that were sent; 0 where the engine had them already.", SAME),
    "weights/version": Metric("step", "Step whose weights drew the completions.", SAME),
}


def _configurations(kind: str) -> dict[str, Metric]:
    return {
        **_spread(f"{kind}/accuracy", "of the accuracy of the answers, from 0 to 1", "mean", "std"),
        **_spread(f"{kind}/latency_ms", "of the latency of a configuration that was run", "mean", "std", unit="ms"),
        **_spread(f"{kind}/budget_violation", "of 1 where the latency is above the budget, else 0", "mean", "std"),
        **_spread(f"{kind}/budget_ms", "latency budget", "mean", "max", unit="ms"),
        **_spread(f"{kind}/num_active", "number of transformer blocks that run", "mean", "max", unit="block"),
        **_spread(f"{kind}/tier", "place of the tier, from 0", "mean", "max"),
        **_spread(f"{kind}/topk", "experts of a token in a running block", "mean", "max", unit="expert"),
        f"{kind}/num_configs": Metric("configuration", "Configurations that were chosen.", SUM),
        f"throughput/{kind}/configs_per_s": Metric("configuration/s", "Configurations per second of the step.", RATE),
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
    "throughput/train/configs_per_s_update": Metric("configuration/s", "The same per second of the update.", RATE),
    "throughput/train/cache_hit_rate": Metric(
        "1", "Share of the configurations whose result for the sample was known already.", "over all ranks"
    ),
    "Train/Loss": Metric("1", "Mean loss of an epoch's steps; its axis is the epoch, as for the next.", SAME),
    **_epoch("Train", "an epoch's configurations"),
    **_epoch("Val", "the samples that are measured at its end"),
}
