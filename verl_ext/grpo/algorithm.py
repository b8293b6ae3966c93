"""From rewards to a gradient: group advantages, and the policy loss with its KL and entropy terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_ext.grpo.config import ActorConfig, AlgorithmConfig
from verl_ext.verl_api import (
    PolicyLossConfig,
    VerlActorConfig,
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_rollout_correction_weights,
    get_policy_loss_fn,
    kl_penalty,
)

SUM_NORM = "seq-mean-token-sum-norm"
ROUNDING_ERROR = 1e-12
"""Largest relative difference of rewards that counts as none; a reward is a sum of a few float64 numbers."""
MAX_LOG_RATIO = 20.0
"""Largest absolute log ratio in a loss, as in verl's `vanilla`; the exponential of a larger one may overflow."""
UNBOUNDED_LOSSES = ("clip_cov", "kl_cov", "geo_mean")
"""verl's losses that take the exponential of any log ratio."""


# Advantages


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether the rewards of a group, except None, differ by more than rounding errors, such as that of 0.1 + 0.2."""
    known = [reward for reward in rewards if reward is not None]
    return bool(known) and max(known) - min(known) > ROUNDING_ERROR * max(map(abs, known))


def group_advantages(rewards: Sequence[float | None], group_size: int, divide_by_std: bool) -> list[float]:
    """Subtract the group's mean from each reward, and optionally divide by the group's standard deviation.

    The formula is verl's `compute_grpo_outcome_advantage`: GRPO (arXiv 2402.03300, equation in section 4.1.2) with the
    division, Dr. GRPO (arXiv 2503.20783) without it.

    Args:
        rewards: rewards, group by group; None for a sample without a reward, which its group ignores.
        group_size: samples per group, at least two.
        divide_by_std: `algorithm.norm_adv_by_std_in_grpo`.

    Returns:
        One advantage per sample, computed in float64; 0 for samples without a reward and in groups without signal.
    """
    assert group_size > 1 and len(rewards) % group_size == 0, "groups are complete and have at least two samples"
    rewarded = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
    # float32 would round away the differences of rewards that share a large offset
    known = torch.tensor([reward for reward in rewards if reward is not None], dtype=torch.float64)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    if len(known):
        groups = np.arange(len(rewards))[rewarded.numpy()] // group_size
        values, _ = compute_grpo_outcome_advantage(
            known[:, None], torch.ones_like(known)[:, None], groups, norm_adv_by_std_in_grpo=divide_by_std
        )
        advantages[rewarded] = values[:, 0]
    for start in range(0, len(rewards), group_size):
        # the mean's rounding error, divided by a tiny standard deviation, would be a large advantage
        if not has_signal(rewards[start : start + group_size]):
            advantages[start : start + group_size] = 0.0
    return advantages.tolist()


# The loss


@dataclass(frozen=True)
class GlobalBatch:
    """Sizes that normalize the loss of one update, over all ranks.

    Attributes:
        num_decisions: number of decisions with mask 1.
        num_samples: number of samples with at least one such decision.
        num_ranks: number of ranks whose gradients are averaged.
        max_decisions: maximum number of decisions in a sample.
    """

    num_decisions: float
    num_samples: float
    num_ranks: int
    max_decisions: int

    def normalization(self, actor: ActorConfig) -> dict[str, Any]:
        """Arguments of verl's `agg_loss` that make the mean of the ranks' gradients the global gradient."""
        if actor.loss_agg_mode == SUM_NORM:
            # verl divides by this divisor only, so doubling the batch would double the gradient
            divisor = actor.loss_scale_factor or self.max_decisions
            return {"loss_scale_factor": divisor * self.num_samples / self.num_ranks}
        return {
            "dp_size": self.num_ranks,
            "batch_num_tokens": self.num_decisions,
            "global_batch_size": self.num_samples,
        }


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch; every tensor is (samples, decisions).

    Attributes:
        log_probs: log-probabilities of the sampled decisions under the current model, with gradient.
        old_log_probs: log-probabilities under the model before the step's first update.
        advantages: advantage of the sample, repeated for each of its decisions.
        mask: 1 where a decision counts; the loss is normalized by its sum over the global batch.
        entropy: entropy of each decision's distribution; needed for an entropy bonus.
        reference_log_probs: log-probabilities under the frozen reference; needed for a KL term.
        rollout_is_weights: importance weights that correct for a sampling distribution that differs from the model's.
        entropy_bonus: see `LogProbs`.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    entropy: torch.Tensor | None
    reference_log_probs: torch.Tensor | None
    rollout_is_weights: torch.Tensor | None
    entropy_bonus: torch.Tensor | None


def micro_batch_loss(
    inputs: LossInputs, actor: ActorConfig, batch: GlobalBatch
) -> tuple[torch.Tensor, dict[str, float]]:
    """Policy loss of `actor.policy_loss.loss_mode` - entropy bonus + KL term, by verl's formulas.

    Returns:
        The value to differentiate, and metrics summed over the micro-batch's decisions, without gradient. The loss is
        the mean over ranks of each rank's sum over micro-batches.
    """
    normalization = batch.normalization(actor)
    value, sums = _policy_loss(inputs, actor, batch, normalization)
    mask = inputs.mask
    # while all ratios are 1, the value of the loss is 0 whatever its gradient
    sums["policy_gradient_loss"] = -float((inputs.log_probs.detach() * inputs.advantages * mask).sum())
    if inputs.entropy is not None:
        sums["entropy"] = float((inputs.entropy.detach() * mask).sum())
        if actor.entropy_coeff:
            bonus = inputs.entropy if inputs.entropy_bonus is None else inputs.entropy_bonus
            bonus = agg_loss(bonus, mask, actor.loss_agg_mode, **normalization)
            value = value - actor.entropy_coeff * bonus
    if inputs.reference_log_probs is not None:
        kl = kl_estimate(inputs.log_probs, inputs.reference_log_probs, actor.kl_loss_type)
        sums["kl"] = float((kl.detach() * mask).sum())
        value = value + actor.kl_loss_coef * agg_loss(kl, mask, actor.loss_agg_mode, **normalization)
    return value, sums


def _policy_loss(
    inputs: LossInputs, actor: ActorConfig, batch: GlobalBatch, normalization: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, float]]:
    mode, mask, log_probs = actor.policy_loss.loss_mode, inputs.mask, inputs.log_probs
    if mode in UNBOUNDED_LOSSES:
        difference = log_probs - inputs.old_log_probs
        bounded = inputs.old_log_probs + difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_probs = torch.where(difference.abs() > MAX_LOG_RATIO, bounded, log_probs)  # others stay exactly the same
    value, metrics = get_policy_loss_fn(mode)(
        old_log_prob=inputs.old_log_probs,
        log_prob=log_probs,
        advantages=inputs.advantages,
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=_verl_config(actor, normalization),
        rollout_is_weights=inputs.rollout_is_weights,
    )
    num_decisions, log_ratio = float(mask.sum()), inputs.log_probs.detach() - inputs.old_log_probs
    sums = {
        # kl_cov and gpg clip nothing
        "clip_fraction": metrics.get("actor/pg_clipfrac", 0.0) * num_decisions,
        "dual_clip_fraction": metrics.get("actor/pg_clipfrac_lower", 0.0) * num_decisions,
        # verl averages absolute values for kl_cov, and reports no KL for gpg
        "update_kl": float((-log_ratio * mask).sum()),
    }
    if mode == "geo_mean":
        # verl averages over all rows of the micro-batch, including rows without decisions, which contribute 0
        value = value * len(mask) * batch.num_ranks / batch.num_samples
        # verl counts all tokens beyond a bound, as clipped or dual-clipped by the sign of the advantage
        excess = log_ratio - log_ratio.clamp(-actor.clip_ratio_low, actor.clip_ratio_high)
        sums |= {"clip_fraction": float((mask * (inputs.advantages * excess > 0)).sum()), "dual_clip_fraction": 0.0}
    return value, sums


def kl_estimate(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate the KL divergence from the reference at each decision.

    A trailing `+` keeps the estimator's value and takes the gradient of k2, whose expectation is the gradient of the KL
    divergence. verl documents these names, but its `kl_penalty` passes the `+` to a function that does not support it.

    Args:
        log_probs: log-probabilities under the model, with gradient.
        reference_log_probs: log-probabilities under the frozen reference, of the same shape.
        kind: `actor.kl_loss_type`.
    """

    def estimate(name: str) -> torch.Tensor:
        # verl annotates FloatTensor, which mypy does not accept a Tensor for
        return kl_penalty(log_probs, reference_log_probs, name)  # type: ignore[arg-type]

    value = estimate(kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    surrogate = estimate("k2")
    return surrogate - surrogate.detach() + value.detach()


def rollout_is_weights(log_ratio: torch.Tensor, mask: torch.Tensor, algorithm: AlgorithmConfig) -> torch.Tensor | None:
    """Truncated importance weights of `algorithm.rollout_correction`; None without it.

    Args:
        log_ratio: (samples, decisions), log-probability under the model minus that under the engine.
        mask: (samples, decisions), 1 where a decision counts.
        algorithm: gives the level and the threshold.
    """
    correction = algorithm.rollout_correction
    if correction.rollout_is is None or not bool(mask.any()):  # verl refuses a batch without tokens
        return None
    weights, _ = compute_rollout_correction_weights(
        log_ratio, mask, correction.rollout_is, correction.rollout_is_threshold
    )
    return weights


def _verl_config(actor: ActorConfig, normalization: dict[str, Any]) -> VerlActorConfig:
    """Settings of verl's losses; required fields that no loss reads have arbitrary values."""
    return VerlActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        policy_loss=PolicyLossConfig(**vars(actor.policy_loss)),
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        loss_agg_mode=actor.loss_agg_mode,
        global_batch_info=normalization,
    )
