"""A step's updates are those of the formulas, whatever the ranks, the micro-batches and the rows of a forward pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers import ROOT
from tests.helpers.grpo_reference import Case, make_model, reference_update
from verl_ext.grpo.loss import LossSettings

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
PLAIN = LossSettings(0.2, 0.28, 3.0, "token-mean", 12)
REGULARISED = LossSettings(0.2, 0.2, 3.0, "token-mean", 12, entropy_coeff=0.02, kl_loss_coef=0.1, kl_loss_type="k3")
CASES = {
    **{mode: Case(LossSettings(0.2, 0.28, 3.0, mode, 12)) for mode in MODES},
    "prompts apart": Case(PLAIN, share_prompts=False, micro_batch_size=16),
    "many updates": Case(PLAIN, num_mini_batches=2, num_epochs=3),
    "gathered once an update": Case(PLAIN, num_mini_batches=2, num_epochs=3, keeps_gathered=True),
    "regularised": Case(REGULARISED, num_mini_batches=2, num_epochs=2, micro_batch_size=8, lr=0.1),
    "regularised, gathered once": Case(REGULARISED, num_mini_batches=2, num_epochs=2, lr=0.1, keeps_gathered=True),
}
Results = dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]


def updated_on(ranks: int, tmp_path: Path) -> Results:
    """What each case comes to."""
    cases, output = tmp_path / "cases.json", tmp_path / f"{ranks}.pt"
    cases.write_text(json.dumps({name: case.fields() for name, case in CASES.items()}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(Path(__file__).with_name("updates_on_ranks.py")), str(cases), str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *script], check=True, env=environment, timeout=300)
    return torch.load(output)


def change(parameters: dict[str, Any]) -> torch.Tensor:
    """What the updates have added to all parameters."""
    before = dict(make_model().named_parameters())
    return torch.cat(
        [(value.double() - before[name].double()).flatten() for name, value in parameters.items()]
    ).detach()


def test_updates_are_those_of_the_formulas(tmp_path: Path) -> None:
    """On one rank and on two, within 1e-4 of float64; the first ratio is 1 and later ones are clipped."""
    on = {ranks: updated_on(ranks, tmp_path) for ranks in (1, 2)}
    for name, case in CASES.items():
        expected = change(reference_update(case))
        for ranks, results in on.items():
            parameters, figures = results[name]
            error = (change(parameters) - expected).norm() / expected.norm()
            assert error < 1e-4, (name, ranks, error)
            assert figures["ratio_deviation"] < 1e-5, (name, ranks)
        for figure, value in on[1][name][1].items():
            assert abs(on[2][name][1][figure] - value) < 1e-4 * max(1.0, abs(value)), (name, figure)
    assert on[1]["many updates"][1]["clip_fraction"] > 0.05
    assert on[1]["regularised"][1]["kl"] > 0
