"""Run by torchrun: the updates of one step on a small model, each rank with its share of the same rollouts.

Arguments: file of the cases, file for the results.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.grpo_reference import REFERENCE, SAMPLING, Case, make_model, samples_of
from tests.helpers.trainer import sharded
from verl_ext.grpo.advantages import group_advantages
from verl_ext.grpo.environment import Reward
from verl_ext.grpo.experience import Experience
from verl_ext.grpo.rollout.hf_engine import HfRollout
from verl_ext.grpo.tokens.layout import Layout
from verl_ext.grpo.tokens.model import forward_cost
from verl_ext.grpo.tokens.policy import TokenModel, TokenPolicy
from verl_ext.grpo.update import Updater, UpdateSettings
from verl_ext.metrics.timing import StepTimer
from verl_ext.trainer.fsdp import FSDPReshardPolicy


def updated(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The parameters after the updates of one step, and its metrics."""
    model, frozen = sharded(make_model(0.0)), sharded(make_model(REFERENCE))
    layout = Layout(0, forward_cost(model) if case.share_prompts else None)
    token_model = TokenModel(
        model, lambda evaluate: evaluate(frozen), nullcontext, "cpu", case.actor.entropy_coeff != 0, layout
    )
    policy = TokenPolicy(token_model, None, HfRollout(model, 0, [], 4, nullcontext), None, SAMPLING, 0)  # type: ignore[arg-type]

    def descend(loss: float) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= case.lr * parameter.grad
                parameter.grad = None
        return 0.0

    every, rewards, groups = samples_of()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # a rank's share of each mini-batch: an update has the same prompts for any number of ranks
    mine = [n for n in range(len(every)) if groups[n] % ranks == rank]
    advantages = group_advantages([rewards[n] for n in mine], [groups[n] for n in mine], divide_by_std=True)
    experience = Experience([every[n] for n in mine], [Reward({"r": rewards[n]}) for n in mine], advantages)
    settings = UpdateSettings(
        case.actor, case.num_mini_batches, case.num_epochs, case.micro_batch_size, SAMPLING.max_tokens
    )
    gather = FSDPReshardPolicy(model, case.keeps_gathered).before_micro_batch
    found = Updater(policy, settings, ranks, descend, StepTimer(), "cpu", gather).update(experience)
    parameters = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return parameters, {"loss": found.loss, **found.means, **found.maxima}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {name: updated(Case.of(fields)) for name, fields in json.loads(Path(sys.argv[1]).read_text()).items()}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[2])
    dist.destroy_process_group()
