"""The distribution over configurations equals an enumeration of all configurations of a small model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import pytest
import torch

from verl_ext.controller.distribution import (
    BlockMaskDistribution,
    Choices,
    ConfigurationDistribution,
    categorical_entropy,
    num_uniforms,
)
from verl_ext.controller.inference import TracedController
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.controller.vlm import load_controller
from verl_ext.errors import UserError

SPACES = {
    "experts": ConfigurationSpace(("low", "high"), 5, 2, 4, (1, 2)),
    "one number of blocks": ConfigurationSpace(("low", "medium", "high"), 5, 3, 3, (4, 6, 8)),
    "block 0 alone": ConfigurationSpace(("low", "high"), 4, 1, 1, (1, 2)),
    "all blocks": ConfigurationSpace(("only",), 4, 4, 4, (1, 2, 4)),
    "dense": ConfigurationSpace(("low", "medium", "high"), 6, 1, 6),
}


def every(space: ConfigurationSpace) -> list[Configuration]:
    """All configurations of a space, each once."""
    found = set()
    for mask in itertools.product([False, True], repeat=space.num_blocks - 1):
        if space.min_active <= 1 + sum(mask) <= space.max_active:
            for tier, topk in itertools.product(
                range(len(space.tiers)), itertools.product(space.topk_choices or (0,), repeat=space.num_blocks - 1)
            ):
                found.add(space.configuration(tier, (True, *mask), (0, *topk)))
    return sorted(found, key=lambda each: (each.tier, each.blocks, each.topk))


def distribution_of(
    space: ConfigurationSpace, rows: int, seed: int = 0, scale: float = 2.0
) -> tuple[ConfigurationDistribution, list[torch.Tensor]]:
    """A distribution with random logits, the same in each row, and the logits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(len(space.tiers),), (space.num_blocks - 1,), (space.num_blocks, len(space.topk_choices))]
    logits = [(scale * torch.randn(1, *shape, generator=generator)).requires_grad_() for shape in shapes]
    return ConfigurationDistribution(space, *(part.expand(rows, *part.shape[1:]) for part in logits)), logits


def entropy_of(distribution: ConfigurationDistribution) -> torch.Tensor:
    """Entropy of the first row, with its whole gradient."""
    topk = None if distribution._topk is None else categorical_entropy(distribution._topk)
    return (categorical_entropy(distribution._tiers) + distribution._masks.entropy(topk))[0]


@pytest.fixture(params=SPACES)
def space(request: pytest.FixtureRequest) -> ConfigurationSpace:
    return SPACES[request.param]


def test_configuration_probabilities_sum_to_one(space: ConfigurationSpace) -> None:
    configurations = every(space)
    distribution, _ = distribution_of(space, len(configurations))
    choices = Choices.of(configurations, space)
    assert choices.configurations(space) == configurations
    assert float(distribution.log_prob(choices).detach().exp().sum()) == pytest.approx(1, abs=1e-12)


def test_entropy_and_gradient_equal_enumeration(space: ConfigurationSpace) -> None:
    configurations = every(space)
    distribution, logits = distribution_of(space, len(configurations))
    log_probs = distribution.log_prob(Choices.of(configurations, space))
    enumerated = -(log_probs.exp() * log_probs).sum()
    entropy = entropy_of(distribution)
    torch.testing.assert_close(entropy, enumerated, rtol=1e-10, atol=1e-10)
    wanted = torch.autograd.grad(enumerated, logits, retain_graph=True, allow_unused=True)
    found = torch.autograd.grad(entropy, logits, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_entropy_bonus_does_not_reward_more_blocks(space: ConfigurationSpace) -> None:
    distribution, logits = distribution_of(space, 1)
    tiers = logits[0][0].double().softmax(-1)
    of_tiers = -(tiers * tiers.log()).sum()
    bonus, entropy = distribution.entropy_bonus(3.0)[0], entropy_of(distribution)
    torch.testing.assert_close(bonus, entropy + 2 * of_tiers, rtol=1e-10, atol=1e-10)
    of_masks = BlockMaskDistribution(logits[1], space.min_active - 1, space.max_active - 1).entropy()[0]
    [wanted] = torch.autograd.grad(of_masks, logits[1], retain_graph=True)
    of_topk = torch.autograd.grad(entropy, logits[2], retain_graph=True, allow_unused=True)[0]
    found = torch.autograd.grad(bonus, logits[1:], allow_unused=True)
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=1e-6)
    if space.topk_choices:
        torch.testing.assert_close(found[1], of_topk, rtol=1e-5, atol=1e-6)


def test_sample_frequencies_match_probabilities(space: ConfigurationSpace) -> None:
    configurations, rows = every(space), 40_000
    exact = distribution_of(space, len(configurations))[0].log_prob(Choices.of(configurations, space)).exp().detach()
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(rows, num_uniforms(space), generator=generator, dtype=torch.float64)
    drawn = distribution_of(space, rows)[0].sample(uniform).configurations(space)
    assert set(drawn) <= set(configurations)
    counts = torch.tensor([drawn.count(each) for each in set(drawn)])
    expected = torch.tensor([float(exact[configurations.index(each)]) * rows for each in set(drawn)])
    often = expected >= 5  # where the statistic is approximately chi-squared
    statistic = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    cells = int(often.sum())
    assert statistic < cells + 5 * (2 * cells) ** 0.5 + 5


def likeliest(knob: Callable[[Configuration], Hashable], weighted: Sequence[tuple[Configuration, float]]) -> Hashable:
    """The most likely value of a knob, from configurations with their probabilities."""
    total: dict[Hashable, float] = defaultdict(float)
    for configuration, probability in weighted:
        total[knob(configuration)] += probability
    return max(total, key=total.__getitem__)


def test_mode_has_most_likely_value_of_each_setting(space: ConfigurationSpace) -> None:
    configurations = every(space)
    choices = Choices.of(configurations, space)
    for seed in range(20):
        distribution, _ = distribution_of(space, len(configurations), seed)
        probabilities = distribution.log_prob(choices).exp().tolist()
        mode = distribution.mode().configurations(space)[0]

        weighted = list(zip(configurations, probabilities, strict=True))
        assert mode.tier == likeliest(lambda each: each.tier, weighted)
        assert mode.blocks == likeliest(lambda each: each.blocks, weighted)
        same_blocks = [pair for pair in weighted if pair[0].blocks == mode.blocks]
        assert mode.topk == likeliest(lambda each: each.topk, same_blocks)


def test_extreme_logits_give_finite_results(space: ConfigurationSpace) -> None:
    configurations = every(space)
    distribution, logits = distribution_of(space, len(configurations), scale=300.0)
    log_probs = distribution.log_prob(Choices.of(configurations, space))
    assert float(log_probs.detach().exp().sum()) == pytest.approx(1, abs=1e-9)
    (log_probs.sum() + entropy_of(distribution)).backward()
    assert all(part.grad is None or bool(part.grad.isfinite().all()) for part in logits)


def test_topk_of_skipped_blocks_is_ignored() -> None:
    space = SPACES["experts"]
    distribution, logits = distribution_of(space, 1)
    masks = torch.tensor([[True, False, False, True]])
    one, other = (Choices(torch.tensor([0]), masks, torch.tensor([[1, k, k, 0]])) for k in (0, 1))
    assert torch.equal(distribution.log_prob(one), distribution.log_prob(other))
    assert one.configurations(space) == other.configurations(space)
    distribution.log_prob(one).sum().backward()
    assert not logits[2].grad[0, [0, 2, 3]].any() and logits[2].grad[0, [1, 4]].any()


def test_mask_distribution_supports_64_blocks() -> None:
    masks = BlockMaskDistribution(torch.linspace(-3, 3, 64).expand(2, 64), 30, 40)
    drawn = masks.sample(torch.rand(2, 64, dtype=torch.float64))
    assert bool(((drawn.sum(1) >= 30) & (drawn.sum(1) <= 40)).all())
    assert bool((masks.log_prob(drawn) < 0).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 4, 1, 4), "at least one tier"),
        ((("low",), 4, 0, 4), "min_active=0"),
        ((("low",), 4, 3, 2), "must not exceed the second"),
        ((("low",), 4, 1, 5), "the model's 4 blocks"),
        ((("low",), 4, 1, 4, (4, 2)), "ascending"),
        ((("low",), 4, 1, 4, (0, 2)), "at least 1"),
    ],
)
def test_invalid_space_is_rejected(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConfigurationSpace(*arguments)


def controller_of(space: ConfigurationSpace) -> BudgetController:
    knobs = (space.tiers, space.num_blocks, space.min_active, space.max_active, space.topk_choices)
    return BudgetController(BudgetControllerConfig(*knobs, 12, 16, 10.0, 60.0)).eval()


def test_saved_controller_gives_same_logits(space: ConfigurationSpace, tmp_path: Path) -> None:
    controller = controller_of(space)
    for parameter in controller.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    controller.save_pretrained(tmp_path)
    loaded = BudgetController.from_pretrained(tmp_path)
    assert loaded.space == space
    for (name, buffer), (_, other) in zip(loaded.named_buffers(), controller.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    inputs = torch.randn(3, 12), torch.randn(3, 16), torch.tensor([10.0, 30.0, 60.0])
    for one, other in zip(loaded(*inputs), controller(*inputs), strict=True):
        torch.testing.assert_close(one, other)
    decided, before = (
        ConfigurationDistribution(space, *each(*inputs)).mode().configurations(space) for each in (loaded, controller)
    )
    assert decided == before


def test_bf16_export_decides_in_fp32(tmp_path: Path) -> None:
    """This matches training, where features are in fp32, whatever the model's precision."""
    controller = controller_of(SPACES["experts"]).bfloat16()
    controller.config.vlm = {"path": "somewhere", "tier_sizes": [1, 2], "max_new_tokens": 1}
    controller.save_pretrained(tmp_path)
    loaded, _ = load_controller(tmp_path)
    decide = TracedController(loaded)
    with torch.inference_mode():
        logits = decide(torch.randn(1, 12), torch.randn(1, 16), 20.0)
    assert {part.dtype for part in logits} == {torch.float32}


def test_export_of_another_release_loads(tmp_path: Path) -> None:
    controller = controller_of(SPACES["experts"])
    controller.config.vlm = {"path": "somewhere", "tier_sizes": [1, 2], "max_new_tokens": 1, "num_blocks": 4}
    controller.save_pretrained(tmp_path)
    assert load_controller(tmp_path)[1].tier_sizes == (1, 2)


def test_new_controller_is_uniform_and_uses_every_input() -> None:
    space = SPACES["experts"]
    controller = controller_of(space)
    inputs = [torch.randn(3, 12), torch.randn(3, 16), torch.tensor([10.0, 30.0, 60.0])]
    tier_logits, block_logits, topk_logits = controller(*inputs)
    assert (tier_logits.shape, block_logits.shape, topk_logits.shape) == ((3, 2), (3, 4), (3, 5, 2))
    configurations = every(space)
    of_masks = {each.blocks: 0.0 for each in configurations}
    rows = [part[:1].expand(len(configurations), -1) for part in inputs[:2]]
    distribution = ConfigurationDistribution(space, *controller(*rows, torch.full((len(configurations),), 20.0)))
    for each, log_prob in zip(configurations, distribution.log_prob(Choices.of(configurations, space)), strict=True):
        of_masks[each.blocks] += float(log_prob.exp())
    assert max(of_masks.values()) == pytest.approx(min(of_masks.values()))
    for parameter in controller.parameters():  # the heads start at zero, which would hide the gradients below them
        torch.nn.init.normal_(parameter, std=0.1)
    sum(part.sum() for part in controller(*inputs)).backward()
    assert all(parameter.grad is not None for parameter in controller.parameters())
    assert not torch.allclose(
        *(controller(*(part[[0]] for part in inputs[:2]), torch.tensor([b]))[0] for b in (20.0, 21.0))
    )


def test_importance_sets_block_logits_to_z_scores() -> None:
    controller = controller_of(SPACES["experts"])
    controller.init_block_bias({1: 1.0, 2: 1.0, 3: 3.0, 4: 3.0})
    assert controller.block_head.bias.tolist() == [-1, -1, 1, 1]
    controller = controller_of(ConfigurationSpace(("low", "high"), 2, 1, 2))
    controller.init_block_bias({1: 0.7})
    assert controller.block_head.bias.tolist() == [0], "a single block has no spread"


def test_complexity_grows_with_each_setting() -> None:
    space = SPACES["one number of blocks"]
    base = space.configuration(0, [True, True, True, False, False], 4)
    for more in (
        space.configuration(1, base.blocks, 4),
        space.configuration(0, [True] * 4 + [False], 4),
        space.configuration(0, base.blocks, 6),
    ):
        assert space.complexity(more) > space.complexity(base)
    assert space.complexity(space.full) == 1
