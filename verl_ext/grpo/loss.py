"""The clipped policy loss with its KL and entropy terms, normalised over the whole global batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from verl_ext.grpo.config import ActorConfig
from verl_ext.verl_api import VerlActorConfig, agg_loss, compute_policy_loss_vanilla, kl_penalty

_SUM_NORM = "seq-mean-token-sum-norm"


@dataclass(frozen=True)
class GlobalBatch:
    """What one update averages over, on all ranks together.

    Attributes:
        num_decisions: that count in the loss.
        num_samples: with at least one such decision.
        num_ranks: whose gradients are averaged.
        max_decisions: most decisions that a sample can have.
    """

    num_decisions: float
    num_samples: float
    num_ranks: int
    max_decisions: int

    def normalisation(self, actor: ActorConfig) -> dict[str, Any]:
        """The arguments of verl's `agg_loss` with which the ranks' gradients average to the global one."""
        if actor.loss_agg_mode == _SUM_NORM:
            # verl divides by nothing else there, so that a batch of twice the size would have twice the gradient
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
        log_probs: of the drawn decisions by the model as it is, with gradient.
        old_log_probs: the same by the model that is to be improved, before this batch's first update.
        advantages: of each sample, at each of its decisions.
        mask: 1 where a decision counts.
        entropy: of the distribution that each decision was drawn from; needed with an entropy bonus.
        reference_log_probs: by the frozen reference; needed with a KL term.
        importance: weights that correct for another distribution than the model's having drawn the decisions.
    """

    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    entropy: torch.Tensor | None = None
    reference_log_probs: torch.Tensor | None = None
    importance: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """What a micro-batch contributes.

    Attributes:
        value: to be differentiated; the mean over ranks of each rank's sum over micro-batches is the loss.
        sums: figures summed over the micro-batch's decisions, without gradient.
    """

    value: torch.Tensor
    sums: dict[str, float] = field(default_factory=dict)


def micro_batch_loss(inputs: LossInputs, actor: ActorConfig, batch: GlobalBatch) -> Loss:
    """Clipped policy loss - entropy bonus + KL term, by verl's formulas."""
    normalisation = batch.normalisation(actor)
    config = _verl_config(actor, normalisation)
    value, measured = compute_policy_loss_vanilla(
        inputs.old_log_probs,
        inputs.log_probs,
        inputs.advantages,
        inputs.mask,
        actor.loss_agg_mode,
        config,
        inputs.importance,
    )
    num_decisions = float(inputs.mask.sum())
    sums = {
        "clip_fraction": measured["actor/pg_clipfrac"] * num_decisions,
        "dual_clip_fraction": measured["actor/pg_clipfrac_lower"] * num_decisions,
        "update_kl": measured["actor/ppo_kl"] * num_decisions,
        # the loss's own value is 0 while the ratios are 1, whatever its gradient is
        "policy_gradient_loss": -float((inputs.log_probs.detach() * inputs.advantages * inputs.mask).sum()),
    }
    if inputs.entropy is not None:
        sums["entropy"] = float((inputs.entropy.detach() * inputs.mask).sum())
        if actor.entropy_coeff:
            bonus = agg_loss(inputs.entropy, inputs.mask, actor.loss_agg_mode, **normalisation)
            value = value - actor.entropy_coeff * bonus
    if inputs.reference_log_probs is not None:
        kl = kl_estimate(inputs.log_probs, inputs.reference_log_probs, actor.kl_loss_type)
        sums["kl"] = float((kl.detach() * inputs.mask).sum())
        value = value + actor.kl_loss_coef * agg_loss(kl, inputs.mask, actor.loss_agg_mode, **normalisation)
    return Loss(value, sums)


def kl_estimate(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate the KL divergence from the reference at each decision.

    A trailing `+` keeps the estimator's value and takes the gradient of k2, whose expectation is the gradient of the KL
    divergence. verl documents these names, but its `kl_penalty` passes the `+` on to a function that does not know it.

    Args:
        log_probs: with gradient.
        reference_log_probs: by the frozen reference, of the same shape.
        kind: `actor.kl_loss_type`.
    """

    def estimate(name: str) -> torch.Tensor:
        # verl asks for FloatTensor, which no tensor is
        return kl_penalty(log_probs, reference_log_probs, name)  # type: ignore[arg-type]

    value = estimate(kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    surrogate = estimate("k2")
    return surrogate - surrogate.detach() + value.detach()


def _verl_config(actor: ActorConfig, normalisation: dict[str, Any]) -> VerlActorConfig:
    """verl's settings of its own loss; what is not of the loss is filled in because it must be."""
    return VerlActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        global_batch_info=normalisation,
    )
