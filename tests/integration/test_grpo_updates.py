"""The updates of a step match a float64 reference for any number of ranks, micro-batches and rows per forward pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.commands import torchrun

if TYPE_CHECKING:
    import torch

    from tests.helpers.grpo_reference import Case

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def make_cases() -> dict[str, Case]:
    """All loss modes, and every option of an update at least once."""
    from tests.helpers.grpo_reference import Case
    from verl_ext.grpo.config import TokenActorConfig

    plain = TokenActorConfig(clip_ratio_high=0.28, loss_scale_factor=12)
    kl: Any = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
    penalized = TokenActorConfig(entropy_coeff=0.02, ppo_epochs=2, **kl)
    return {
        **{mode: Case(replace(plain, loss_agg_mode=mode)) for mode in MODES},
        "separate prompts": Case(plain, share_prompts=False, micro_batch_size=16),
        "packed": Case(plain, share_prompts=False, packs=True),
        "packed or shared, penalized": Case(penalized, num_mini_batches=2, micro_batch_size=8, lr=0.1, packs=True),
        "many updates": Case(replace(plain, ppo_epochs=3), num_mini_batches=2),
        "gathered once per update": Case(replace(plain, ppo_epochs=3), num_mini_batches=2, keeps_gathered=True),
        "penalized": Case(penalized, num_mini_batches=2, micro_batch_size=8, lr=0.1),
        "penalized, gathered once": Case(penalized, num_mini_batches=2, lr=0.1, keeps_gathered=True),
    }


def updated_on(
    num_ranks: int, cases: dict[str, Case], directory: Path
) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """Parameters and metrics after the updates of each case."""
    import torch

    path, output = directory / "cases.json", directory / f"{num_ranks}.pt"
    path.write_text(json.dumps({name: case.fields() for name, case in cases.items()}))
    torchrun(num_ranks, "tests.ranks.updates", path, output)
    return torch.load(output)


def change(parameters: dict[str, Any]) -> torch.Tensor:
    """The change of all parameters by the updates, as one vector."""
    import torch

    from tests.helpers.grpo_reference import make_model

    before = dict(make_model().named_parameters())
    differences = [value.double() - before[name].double() for name, value in parameters.items()]
    return torch.cat([difference.flatten() for difference in differences]).detach()


def test_updates_match_float64_reference(tmp_path: Path) -> None:
    """On one and two ranks, within 1e-4. The first of several updates has ratio 1, and later ones are clipped."""
    from tests.helpers.grpo_reference import reference_update

    cases = make_cases()
    one, two = (updated_on(num_ranks, cases, tmp_path) for num_ranks in (1, 2))
    for name, case in cases.items():
        expected = change(reference_update(case))
        for results in (one, two):
            parameters, metrics = results[name]
            error = (change(parameters) - expected).norm() / expected.norm()
            assert error < 1e-4, (name, error)
            if case.num_mini_batches * case.actor.ppo_epochs > 1:
                assert metrics["train/ratio_deviation_max"] < 1e-5, name
        for metric, value in one[name][1].items():
            assert abs(two[name][1][metric] - value) < 1e-4 * max(1.0, abs(value)), (name, metric)
    assert one["many updates"][1]["train/clip_fraction"] > 0.05
    assert one["penalized"][1]["train/kl"] > 0
