"""The policy loss: verl's formulas, and the same gradient for any split of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, get_policy_loss_fn, kl_penalty
from verl.workers.config import ActorConfig as VerlActorConfig

from verl_ext.grpo.algorithm import GlobalBatch, LossInputs, kl_estimate, micro_batch_loss
from verl_ext.grpo.config import KLType, LossMode, TokenActorConfig, TokenLossConfig

ACTOR = TokenActorConfig(
    clip_ratio_high=0.28, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"
)
MAX_DECISIONS = 16
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def random_inputs(seed: int, samples: int = 8, decisions: int = 16) -> LossInputs:
    """Ragged float64 samples, far enough off-policy to reach every clip."""
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
        rollout_is_weights=normal(1).abs(),
        entropy_bonus=None,
    )


def part(inputs: LossInputs, rows: slice) -> LossInputs:
    """A subset of the samples."""
    return LossInputs(**{name: value if value is None else value[rows] for name, value in vars(inputs).items()})


def whole(inputs: LossInputs, num_ranks: int = 1) -> GlobalBatch:
    """All samples as one global batch."""
    return GlobalBatch(float(inputs.mask.sum()), float((inputs.mask.sum(-1) > 0).sum()), num_ranks, MAX_DECISIONS)


def dense_loss(inputs: LossInputs, actor: TokenActorConfig) -> torch.Tensor:
    """The loss by the papers' formulas, sample by sample and decision by decision."""
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
            term = -gain * inputs.rollout_is_weights[i, t] + actor.kl_loss_coef * kl
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
    """The gradient with respect to the log-probabilities."""
    return torch.autograd.grad(loss, inputs.log_probs, retain_graph=True)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("seed", "divisor"), [(0, None), (1, None), (2, 7)])
def test_loss_equals_dense_reference(mode: Any, seed: int, divisor: int | None) -> None:
    inputs, actor = random_inputs(seed), replace(ACTOR, loss_agg_mode=mode, loss_scale_factor=divisor)
    loss, _ = micro_batch_loss(inputs, actor, whole(inputs))
    expected = dense_loss(inputs, actor)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient(loss, inputs), gradient(expected, inputs), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", MODES[:3])
def test_vanilla_loss_equals_verl(mode: str) -> None:
    """verl's own normalization is used, on a whole batch at once."""
    inputs = random_inputs(7)
    config = VerlActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28)
    arguments = (inputs.old_log_probs, inputs.log_probs, inputs.advantages, inputs.mask, mode, config)
    expected, measured = compute_policy_loss_vanilla(*arguments)
    plain = replace(ACTOR, loss_agg_mode=mode, entropy_coeff=0.0, kl_loss_coef=0.0)
    bare = replace(inputs, rollout_is_weights=None, reference_log_probs=None)
    ours, sums = micro_batch_loss(bare, plain, whole(inputs))
    torch.testing.assert_close(ours, expected)
    assert measured["actor/pg_clipfrac"] > 0 and measured["actor/pg_clipfrac_lower"] > 0
    num = float(inputs.mask.sum())
    assert sums["clip_fraction"] / num == pytest.approx(measured["actor/pg_clipfrac"])
    assert sums["dual_clip_fraction"] / num == pytest.approx(measured["actor/pg_clipfrac_lower"])
    assert sums["update_kl"] / num == pytest.approx(measured["actor/ppo_kl"])


def split_loss(inputs: LossInputs, actor: TokenActorConfig, num_ranks: int, size: int) -> torch.Tensor:
    """The loss with `size` samples in a micro-batch, as FSDP averages it over the ranks."""
    batch, each = whole(inputs, num_ranks), 8 // num_ranks
    ranks = []
    for rank in range(num_ranks):
        starts = range(rank * each, (rank + 1) * each, size)
        slices = [slice(start, min(start + size, (rank + 1) * each)) for start in starts]
        ranks.append(sum(micro_batch_loss(part(inputs, rows), actor, batch)[0] for rows in slices))
    return sum(ranks) / num_ranks


SPLITS = [(1, 1), (1, 3), (2, 4), (2, 2), (2, 3), (4, 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_ranks", "size"), SPLITS)
def test_gradient_is_same_for_any_split(mode: str, num_ranks: int, size: int) -> None:
    """The total is the mean over ranks of each rank's sum over micro-batches."""
    inputs, actor = random_inputs(1), replace(ACTOR, loss_agg_mode=mode)
    expected, _ = micro_batch_loss(inputs, actor, whole(inputs))
    split = split_loss(inputs, actor, num_ranks, size)
    torch.testing.assert_close(split, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient(split, inputs), gradient(expected, inputs), rtol=1e-9, atol=1e-12)


def test_verl_sum_norm_grows_with_batch_size() -> None:
    """Duplicating the samples doubles verl's gradient, so this pipeline uses another factor."""
    once, mask = torch.ones(2, 4), torch.ones(2, 4)
    mode: Any = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 4}
    assert agg_loss(once.repeat(2, 1), mask.repeat(2, 1), **mode) == 2 * agg_loss(once, mask, **mode)


def test_samples_without_decisions_are_ignored() -> None:
    """Such samples occur as padding of a batch."""
    inputs = random_inputs(2)
    mask = inputs.mask.clone()
    mask[5] = 0
    kept = [row for row in range(8) if row != 5]
    for mode in MODES:
        actor = replace(ACTOR, loss_agg_mode=mode)
        padded, dropped = replace(inputs, mask=mask), part(inputs, kept)  # type: ignore[arg-type]
        with_padding, _ = micro_batch_loss(padded, actor, whole(padded))
        torch.testing.assert_close(with_padding, micro_batch_loss(dropped, actor, whole(dropped))[0])


def test_entropy_bonus_may_differ_from_logged_entropy() -> None:
    inputs = random_inputs(4)
    weighted = replace(inputs, entropy_bonus=3 * inputs.entropy)
    values, sums = zip(*(micro_batch_loss(each, ACTOR, whole(inputs)) for each in (inputs, weighted)))
    assert sums[0] == sums[1]
    alone, _ = micro_batch_loss(inputs, replace(ACTOR, entropy_coeff=0.0), whole(inputs))
    torch.testing.assert_close(values[1] - alone, 3 * (values[0] - alone))


def test_entropy_and_kl_sums_cover_masked_tokens() -> None:
    inputs = random_inputs(3)
    _, sums = micro_batch_loss(inputs, ACTOR, whole(inputs))
    assert inputs.entropy is not None and inputs.reference_log_probs is not None
    assert sums["entropy"] == pytest.approx(float((inputs.entropy * inputs.mask).sum()))
    difference = (inputs.reference_log_probs - inputs.log_probs).detach()
    assert sums["kl"] == pytest.approx(float(((difference.exp() - difference - 1) * inputs.mask).sum()))
    bare = replace(inputs, entropy=None, reference_log_probs=None)
    assert not {"entropy", "kl"} & micro_batch_loss(bare, replace(ACTOR, entropy_coeff=0.0), whole(bare))[1].keys()


@pytest.mark.parametrize("kind", get_args(KLType))
def test_kl_estimators_equal_verl(kind: str) -> None:
    """The value and gradient equal verl's; a trailing + takes the gradient of k2."""
    inputs = random_inputs(4)
    assert inputs.reference_log_probs is not None
    actor = replace(ACTOR, entropy_coeff=0.0, kl_loss_coef=1.0, kl_loss_type=kind)
    # no advantage: the KL term is the whole loss
    value, sums = micro_batch_loss(replace(inputs, advantages=inputs.mask * 0), actor, whole(inputs))
    arguments: Any = inputs.log_probs, inputs.reference_log_probs
    expected, with_gradient = (
        kl_penalty(*arguments, name) for name in (kind.strip("+"), "k2" if "+" in kind else kind)
    )
    num = inputs.mask.sum()
    torch.testing.assert_close(value, (expected * inputs.mask).sum() / num)
    assert sums["kl"] == pytest.approx(float((expected * inputs.mask).sum().detach()))
    of_loss = gradient(value, inputs)
    torch.testing.assert_close(of_loss, gradient((with_gradient * inputs.mask).sum() / num, inputs))
    assert of_loss.count_nonzero() > 0


@pytest.mark.parametrize(
    ("kind", "value", "slope"), [("low_var_kl", 10, 0), ("k3", 10, 0), ("low_var_kl+", 10, -3.5), ("k2", 6.125, -3.5)]
)
def test_only_low_var_kl_and_k3_lose_their_gradient_at_ten(kind: str, value: float, slope: float) -> None:
    """The descriptions of `actor.kl_loss_type` and `train/kl` say so."""
    log_prob = torch.tensor(-4.0, requires_grad=True)
    kl = kl_estimate(log_prob, torch.tensor(-0.5), kind)
    assert (float(kl.detach()), float(torch.autograd.grad(kl, log_prob)[0])) == (value, slope)


# Other policy losses of verl, each by its paper


def with_loss(mode: str, **changes: Any) -> TokenActorConfig:
    """The settings of a policy loss without other terms."""
    names = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    loss = TokenLossConfig(loss_mode=mode, **{name: changes.pop(name) for name in names if name in changes})  # type: ignore[arg-type]
    if mode in ("gspo", "sapo"):
        changes["loss_agg_mode"] = "seq-mean-token-mean"
    return TokenActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, policy_loss=loss, **changes)


def plain_inputs(seed: int) -> LossInputs:
    return replace(random_inputs(seed), entropy=None, reference_log_probs=None)


def aggregated(terms: list[torch.Tensor], mode: str) -> torch.Tensor:
    """The aggregate of per-token terms, given as one tensor per sample."""
    if mode == "token-mean":
        return torch.cat(terms).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([term.mean() for term in terms]).mean()
    sums = torch.stack([term.sum() for term in terms]).mean()
    return sums if mode == "seq-mean-token-sum" else sums / MAX_DECISIONS


def samples_of(inputs: LossInputs) -> list[tuple[torch.Tensor, ...]]:
    """Log-probability, its old value, advantage and importance weight of each sample, without padding."""
    assert inputs.rollout_is_weights is not None
    columns = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.rollout_is_weights)
    return [tuple(column[row][inputs.mask[row] > 0] for column in columns) for row in range(len(inputs.mask))]


def gspo(inputs: LossInputs, actor: TokenActorConfig) -> torch.Tensor:
    """GSPO-token (arXiv 2507.18071): one ratio for a sample, with the gradient of each token."""
    terms = []
    for log_prob, old, advantage, weight in samples_of(inputs):
        ratio = (log_prob - old).mean().detach().exp() * (log_prob - log_prob.detach()).exp()
        clipped = ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
        terms.append(-torch.minimum(ratio * advantage, clipped * advantage) * weight)
    return aggregated(terms, "seq-mean-token-mean")


def sapo(inputs: LossInputs, actor: TokenActorConfig) -> torch.Tensor:
    """SAPO (arXiv 2511.20347): a sigmoid gate in place of the clip."""
    terms = []
    for log_prob, old, advantage, weight in samples_of(inputs):
        tau = torch.full_like(advantage, actor.tau_neg).masked_fill(advantage > 0, actor.tau_pos)
        gate = 4 / tau / (1 + torch.exp(-tau * ((log_prob - old).exp() - 1)))
        terms.append(-gate * advantage * weight)
    return aggregated(terms, "seq-mean-token-mean")


def gpg(inputs: LossInputs, actor: TokenActorConfig) -> torch.Tensor:
    """The policy gradient without ratio (arXiv 2504.02546)."""
    terms = [-log_prob * advantage * weight for log_prob, _, advantage, weight in samples_of(inputs)]
    return aggregated(terms, actor.loss_agg_mode)


def cispo(inputs: LossInputs, actor: TokenActorConfig) -> torch.Tensor:
    """CISPO (arXiv 2506.13585): the clipped ratio weighs the policy gradient."""
    terms = []
    for log_prob, old, advantage, weight in samples_of(inputs):
        ratio = (log_prob - old).exp().clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high).detach()
        terms.append(-ratio * advantage * log_prob * weight)
    return aggregated(terms, actor.loss_agg_mode)


def geo_mean(inputs: LossInputs, actor: TokenActorConfig) -> torch.Tensor:
    """GMPO (arXiv 2507.20673): the geometric mean of a sample's ratios, clipped token by token."""
    terms = []
    for log_prob, old, advantage, weight in samples_of(inputs):
        sign, log_ratio = advantage.sign(), log_prob - old
        clipped = log_ratio.clamp(-actor.clip_ratio_low, actor.clip_ratio_high)
        kept = sign * torch.minimum(sign * log_ratio, sign * clipped)
        terms.append(-kept.mean().exp() * advantage.mean() * weight.log().mean().exp())
    return torch.stack(terms).mean()


REFERENCES = {"vanilla": None, "gspo": gspo, "sapo": sapo, "gpg": gpg, "cispo": cispo, "geo_mean": geo_mean}
COVARIANCES = ("clip_cov", "kl_cov")
LOSSES = [
    (loss, mode)
    for loss in (*REFERENCES, *COVARIANCES)
    for mode in (MODES if loss in ("vanilla", "gpg", "cispo", *COVARIANCES) else MODES[:1])
]


def assert_same(found: torch.Tensor, expected: torch.Tensor, inputs: LossInputs, rtol: float = 1e-6) -> None:
    """Check that values and nonzero gradients are equal."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-9)
    wanted = gradient(expected, inputs)
    torch.testing.assert_close(gradient(found, inputs), wanted, rtol=rtol, atol=1e-9)
    assert wanted.count_nonzero() > 20


def test_every_loss_mode_is_tested() -> None:
    assert {*REFERENCES, *COVARIANCES} == {*get_args(LossMode)}


@pytest.mark.parametrize(("loss", "mode"), [each for each in LOSSES if REFERENCES.get(each[0])])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_equals_published_formula(loss: str, mode: Any, seed: int) -> None:
    inputs, actor = plain_inputs(seed), with_loss(loss, loss_agg_mode=mode, tau_pos=1.3, tau_neg=1.7)
    reference: Any = REFERENCES[loss]
    assert_same(micro_batch_loss(inputs, actor, whole(inputs))[0], reference(inputs, actor), inputs)


@pytest.mark.parametrize("loss", get_args(LossMode))
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_large_log_ratios_do_not_overflow(loss: str, log_ratio: float) -> None:
    inputs = plain_inputs(3)
    inputs = replace(
        inputs, **{name: getattr(inputs, name).float() for name in ("old_log_probs", "advantages", "mask")}
    )
    log_probs = inputs.log_probs.detach().float()
    log_probs[0, 0] = inputs.old_log_probs[0, 0] + log_ratio
    for sign in (-1.0, 1.0):
        signed = replace(inputs, log_probs=log_probs.clone().requires_grad_(), advantages=sign * inputs.advantages)
        value, _ = micro_batch_loss(signed, with_loss(loss), whole(signed))
        assert value.isfinite() and gradient(value, signed).isfinite().all()


@pytest.mark.parametrize("loss", ["gspo", "sapo", "gpg", "cispo", "geo_mean"])
def test_losses_agree_before_first_update(loss: str) -> None:
    """With one update per step, all give the policy gradient, averaged over tokens and then over samples."""
    inputs = replace(plain_inputs(2), rollout_is_weights=None)
    inputs = replace(inputs, old_log_probs=inputs.log_probs.detach())
    mode: Any = {"loss_agg_mode": "seq-mean-token-mean"}
    found, expected = (
        micro_batch_loss(inputs, with_loss(each, **mode), whole(inputs))[0] for each in (loss, "vanilla")
    )
    torch.testing.assert_close(gradient(found, inputs), gradient(expected, inputs), rtol=1e-6, atol=1e-9)


def covariances(inputs: LossInputs) -> torch.Tensor:
    """Covariance of advantage and log-probability per decision (arXiv 2505.22617); NaN where masked."""
    kept = inputs.mask > 0
    centered = [each.detach() - each.detach()[kept].mean() for each in (inputs.advantages, inputs.log_probs)]
    return torch.where(kept, centered[0] * centered[1], torch.nan)


@pytest.mark.parametrize("mode", MODES)
def test_kl_cov_penalizes_tokens_of_highest_covariance(mode: Any) -> None:
    """The definition is in arXiv 2505.22617."""
    inputs, actor = plain_inputs(3), with_loss("kl_cov", loss_agg_mode=mode, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    assert inputs.rollout_is_weights is not None
    covariance = covariances(inputs)
    num_picked = int(0.2 * int(inputs.mask.sum()))
    picked = covariance >= covariance.nan_to_num(-torch.inf).flatten().topk(num_picked).values[-1]
    assert int(picked.sum()) == num_picked > 5
    log_ratio = inputs.log_probs - inputs.old_log_probs
    term = -inputs.advantages * log_ratio.exp() + 0.7 * picked * log_ratio.abs()
    terms = [(term * inputs.rollout_is_weights)[row][inputs.mask[row] > 0] for row in range(8)]
    assert_same(micro_batch_loss(inputs, actor, whole(inputs))[0], aggregated(terms, mode), inputs)


@pytest.mark.parametrize("mode", MODES)
def test_clip_cov_excludes_tokens_of_high_covariance(mode: Any) -> None:
    """It picks at random (arXiv 2505.22617). Here, it may pick all candidates, so all are picked."""
    settings: Any = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 5.0}
    inputs, actor = plain_inputs(4), with_loss("clip_cov", loss_agg_mode=mode, **settings)
    assert inputs.rollout_is_weights is not None
    ratio, covariance = (inputs.log_probs - inputs.old_log_probs).exp(), covariances(inputs)
    losses = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(0.8, 1.28)
    excluded = (covariance > 0.5) & (covariance < 5.0) & (clipped <= losses)
    assert 5 < int(excluded.sum()) < int(inputs.mask.sum()) / 2
    term = torch.maximum(losses, clipped) * ~excluded * inputs.rollout_is_weights
    terms = [term[row][inputs.mask[row] > 0] for row in range(8)]
    assert_same(micro_batch_loss(inputs, actor, whole(inputs))[0], aggregated(terms, mode), inputs)


def test_clip_cov_excludes_configured_share() -> None:
    inputs = plain_inputs(4)
    actor = with_loss("clip_cov", clip_cov_ratio=0.05, clip_cov_lb=0.5, clip_cov_ub=5.0)
    _, sums = micro_batch_loss(inputs, actor, whole(inputs))
    assert sums["clip_fraction"] == pytest.approx(int(0.05 * float(inputs.mask.sum())), rel=1e-5)


@pytest.mark.parametrize(("loss", "mode"), [each for each in LOSSES if each[0] not in COVARIANCES])
@pytest.mark.parametrize(("num_ranks", "size"), SPLITS)
def test_every_loss_has_same_gradient_for_any_split(loss: str, mode: Any, num_ranks: int, size: int) -> None:
    """This includes samples without a reward, which are masked: the denominator is the sum of the final mask."""
    inputs, actor = plain_inputs(1), with_loss(loss, loss_agg_mode=mode)
    mask = inputs.mask.clone()
    mask[[0, 5]] = 0
    inputs = replace(inputs, mask=mask)
    kept = part(inputs, [1, 2, 3, 4, 6, 7])  # type: ignore[arg-type]
    expected, sums = micro_batch_loss(kept, actor, whole(kept))
    split = split_loss(inputs, actor, num_ranks, size)
    assert_same(split, expected, inputs, rtol=1e-9)
    assert sums.keys() >= {"clip_fraction", "dual_clip_fraction", "update_kl", "policy_gradient_loss"}


@pytest.mark.parametrize("loss", COVARIANCES)
def test_split_changes_gradient_of_covariance_losses(loss: str) -> None:
    """Therefore, settings with several micro-batches per rank and update are rejected."""
    inputs = plain_inputs(3)
    actor = with_loss(loss, clip_cov_ratio=1.0, clip_cov_lb=0.5, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    expected, _ = micro_batch_loss(inputs, actor, whole(inputs))
    split = split_loss(inputs, actor, 1, 4)
    assert (gradient(split, inputs) - gradient(expected, inputs)).norm() > 0.01 * gradient(expected, inputs).norm()


@pytest.mark.parametrize("loss", [*REFERENCES, *COVARIANCES])
def test_update_kl_is_same_for_every_loss(loss: str) -> None:
    inputs = plain_inputs(3)
    _, sums = micro_batch_loss(inputs, with_loss(loss), whole(inputs))
    difference = (inputs.old_log_probs - inputs.log_probs.detach()) * inputs.mask
    assert sums["update_kl"] == pytest.approx(float(difference.sum()), rel=1e-5)


def test_clip_fraction_of_geo_mean_counts_tokens_without_gradient() -> None:
    inputs = plain_inputs(1)
    loss, sums = micro_batch_loss(inputs, with_loss("geo_mean"), whole(inputs))
    has_no_gradient = (gradient(loss, inputs) == 0) & (inputs.mask > 0)
    assert sums["clip_fraction"] == float(has_no_gradient.sum()) > 5 and sums["dual_clip_fraction"] == 0


def test_verl_geo_mean_depends_on_micro_batch_size() -> None:
    """Summed over two micro-batches, verl's loss is twice as large, so this pipeline uses a factor."""
    inputs = plain_inputs(1)
    config = VerlActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1)

    def verls(rows: slice) -> torch.Tensor:
        some = part(inputs, rows)
        arguments = (some.old_log_probs, some.log_probs, some.advantages, some.mask, "token-mean", config)
        return get_policy_loss_fn("geo_mean")(*arguments)[0]  # type: ignore[arg-type]

    torch.testing.assert_close(verls(slice(0, 4)) + verls(slice(4, 8)), 2 * verls(slice(0, 8)))
