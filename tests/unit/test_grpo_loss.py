"""The policy loss: verl's formulas, and one gradient for any split of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, kl_penalty
from verl.workers.config import ActorConfig as VerlActorConfig

from verl_ext.grpo.config import KLType, TokenActorConfig
from verl_ext.grpo.loss import GlobalBatch, LossInputs, micro_batch_loss

ACTOR = TokenActorConfig(
    clip_ratio_high=0.28, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"
)
MAX_DECISIONS = 16
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def random_inputs(seed: int, samples: int = 8, decisions: int = 16) -> LossInputs:
    """Ragged samples, in float64, far enough off the policy for every clip to be hit."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(samples, decisions, generator=generator, dtype=torch.float64) * scale

    log_probs = (normal(1) - 2).requires_grad_()
    lengths = torch.randint(1, decisions + 1, (samples, 1), generator=generator)
    return LossInputs(
        log_probs,
        log_probs.detach() + normal(0.7),
        normal(1)[:, :1].expand(-1, decisions),
        (torch.arange(decisions) < lengths).double(),
        entropy=normal(1).abs(),
        reference_log_probs=log_probs.detach() + normal(0.3),
        importance=normal(1).abs(),
    )


def part(inputs: LossInputs, rows: slice) -> LossInputs:
    """Some of the samples."""
    return LossInputs(**{name: value[rows] for name, value in vars(inputs).items()})


def whole(inputs: LossInputs, num_ranks: int = 1) -> GlobalBatch:
    """All of them as one global batch."""
    return GlobalBatch(float(inputs.mask.sum()), float((inputs.mask.sum(-1) > 0).sum()), num_ranks, MAX_DECISIONS)


def dense_loss(inputs: LossInputs, actor: TokenActorConfig) -> torch.Tensor:
    """The same by the papers, sample by sample and decision by decision."""
    total = torch.zeros((), dtype=torch.float64)
    kept = [int(row.sum()) for row in inputs.mask]
    for i, length in enumerate(kept):
        for t in range(length):
            ratio = torch.exp(inputs.log_probs[i, t] - inputs.old_log_probs[i, t])
            advantage = inputs.advantages[i, t]
            clipped = ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            if advantage < 0:
                gain = torch.maximum(gain, actor.clip_ratio_c * advantage)
            difference = inputs.reference_log_probs[i, t] - inputs.log_probs[i, t]
            kl = torch.exp(difference) - difference - 1
            term = -gain * inputs.importance[i, t] + actor.kl_loss_coef * kl
            term = term - actor.entropy_coeff * inputs.entropy[i, t]
            weight = {
                "token-mean": 1 / sum(kept),
                "seq-mean-token-sum": 1 / len(kept),
                "seq-mean-token-mean": 1 / len(kept) / length,
                "seq-mean-token-sum-norm": 1 / len(kept) / (actor.loss_scale_factor or MAX_DECISIONS),
            }[actor.loss_agg_mode]
            total = total + weight * term
    return total


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Of the log-probabilities."""
    return torch.autograd.grad(loss, inputs.log_probs, retain_graph=True)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("seed", "divisor"), [(0, None), (1, None), (2, 7)])
def test_equal_to_a_dense_reference(mode: Any, seed: int, divisor: int | None) -> None:
    """Value and gradient."""
    inputs, actor = random_inputs(seed), replace(ACTOR, loss_agg_mode=mode, loss_scale_factor=divisor)
    loss = micro_batch_loss(inputs, actor, whole(inputs)).value
    expected = dense_loss(inputs, actor)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient(loss, inputs), gradient(expected, inputs), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", MODES[:3])
def test_equal_to_verls(mode: str) -> None:
    """With its own normalisation, on a whole batch at once."""
    inputs = random_inputs(7)
    config = VerlActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28)
    arguments = (inputs.old_log_probs, inputs.log_probs, inputs.advantages, inputs.mask, mode, config)
    expected, measured = compute_policy_loss_vanilla(*arguments)
    plain = replace(ACTOR, loss_agg_mode=mode, entropy_coeff=0.0, kl_loss_coef=0.0)
    ours = micro_batch_loss(replace(inputs, importance=None, reference_log_probs=None), plain, whole(inputs))
    torch.testing.assert_close(ours.value, expected)
    assert measured["actor/pg_clipfrac"] > 0 and measured["actor/pg_clipfrac_lower"] > 0
    num = float(inputs.mask.sum())
    assert ours.sums["clip_fraction"] / num == pytest.approx(measured["actor/pg_clipfrac"])
    assert ours.sums["dual_clip_fraction"] / num == pytest.approx(measured["actor/pg_clipfrac_lower"])
    assert ours.sums["update_kl"] / num == pytest.approx(measured["actor/ppo_kl"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_ranks", "size"), [(1, 1), (1, 3), (2, 4), (2, 2), (4, 1)])
def test_any_split_has_one_gradient(mode: str, num_ranks: int, size: int) -> None:
    """The mean over ranks of each rank's sum over micro-batches."""
    inputs, actor = random_inputs(1), replace(ACTOR, loss_agg_mode=mode)
    expected = micro_batch_loss(inputs, actor, whole(inputs)).value
    batch, each = whole(inputs, num_ranks), 8 // num_ranks
    ranks = []
    for rank in range(num_ranks):
        starts = range(rank * each, (rank + 1) * each, size)
        slices = [slice(start, min(start + size, (rank + 1) * each)) for start in starts]
        ranks.append(sum(micro_batch_loss(part(inputs, rows), actor, batch).value for rows in slices))
    split = sum(ranks) / num_ranks
    torch.testing.assert_close(split, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient(split, inputs), gradient(expected, inputs), rtol=1e-9, atol=1e-12)


def test_verls_own_sum_norm_grows_with_the_batch() -> None:
    """Which is why it gets another factor: the same samples twice would have twice the gradient."""
    once, mask = torch.ones(2, 4), torch.ones(2, 4)
    mode: Any = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 4}
    assert agg_loss(once.repeat(2, 1), mask.repeat(2, 1), **mode) == 2 * agg_loss(once, mask, **mode)


def test_samples_without_decisions_count_for_nothing() -> None:
    """As padding of a batch."""
    inputs = random_inputs(2)
    mask = inputs.mask.clone()
    mask[5] = 0
    kept = [row for row in range(8) if row != 5]
    for mode in MODES:
        actor = replace(ACTOR, loss_agg_mode=mode)
        padded, dropped = replace(inputs, mask=mask), part(inputs, kept)  # type: ignore[arg-type]
        with_padding = micro_batch_loss(padded, actor, whole(padded)).value
        torch.testing.assert_close(with_padding, micro_batch_loss(dropped, actor, whole(dropped)).value)


def test_sums() -> None:
    """Of entropy and KL, over what counts."""
    inputs = random_inputs(3)
    sums = micro_batch_loss(inputs, ACTOR, whole(inputs)).sums
    assert inputs.entropy is not None and inputs.reference_log_probs is not None
    assert sums["entropy"] == pytest.approx(float((inputs.entropy * inputs.mask).sum()))
    difference = (inputs.reference_log_probs - inputs.log_probs).detach()
    assert sums["kl"] == pytest.approx(float(((difference.exp() - difference - 1) * inputs.mask).sum()))
    bare = replace(inputs, entropy=None, reference_log_probs=None)
    assert not {"entropy", "kl"} & micro_batch_loss(bare, replace(ACTOR, entropy_coeff=0.0), whole(bare)).sums.keys()


@pytest.mark.parametrize("kind", get_args(KLType))
def test_every_kl_estimator(kind: str) -> None:
    """verl's value, and verl's gradient or, with a trailing +, that of k2."""
    inputs = random_inputs(4)
    assert inputs.reference_log_probs is not None
    actor = replace(ACTOR, entropy_coeff=0.0, kl_loss_coef=1.0, kl_loss_type=kind)
    # no advantage: the KL term is the whole loss
    found = micro_batch_loss(replace(inputs, advantages=inputs.mask * 0), actor, whole(inputs))
    arguments: Any = inputs.log_probs, inputs.reference_log_probs
    expected, with_gradient = (
        kl_penalty(*arguments, name) for name in (kind.strip("+"), "k2" if "+" in kind else kind)
    )
    num = inputs.mask.sum()
    torch.testing.assert_close(found.value, (expected * inputs.mask).sum() / num)
    assert found.sums["kl"] == pytest.approx(float((expected * inputs.mask).sum().detach()))
    of_loss = gradient(found.value, inputs)
    torch.testing.assert_close(of_loss, gradient((with_gradient * inputs.mask).sum() / num, inputs))
    assert of_loss.count_nonzero() > 0
