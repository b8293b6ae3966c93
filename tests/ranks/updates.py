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

from tests.helpers.bandit import Machine, grpo_step
from tests.helpers.grpo_reference import GROUP_SIZE, REFERENCE, SAMPLING, Case, make_model, make_trajectories
from tests.helpers.trainer import sharded
from verl_ext.grpo.algorithm import group_advantages
from verl_ext.grpo.config import TokenAlgorithmConfig
from verl_ext.grpo.hf_engine import HFEngine
from verl_ext.grpo.token_policy import TokenBatcher, TokenPolicy, forward_flops
from verl_ext.trainer.fsdp import FSDPReshardPolicy
from verl_ext.trainer.packed_attention import attend_within_samples


def updated(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The parameters after the updates of one step, and its metrics."""
    model, frozen = sharded(make_model(0.0)), sharded(make_model(REFERENCE))
    if case.packs:
        attend_within_samples(model)
        attend_within_samples(frozen)
    policy = TokenPolicy(
        model,
        None,  # type: ignore[arg-type]
        HFEngine(model, 0, [], 4, nullcontext),
        TokenBatcher(0, forward_flops(model) if case.share_prompts else None, case.packs),
        SAMPLING,
        seed=0,
        autocast=nullcontext,
        device="cpu",
        entropy_gradient=case.actor.entropy_coeff != 0,
        reference=lambda: nullcontext(frozen),
    )

    def descend(loss: float) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= case.lr * parameter.grad
                parameter.grad = None
        return 0.0

    ranks, rank = dist.get_world_size(), dist.get_rank()
    # a rank's share of each mini-batch: an update has the same prompts for any number of ranks
    mine = [trajectory for trajectory in make_trajectories() if trajectory.prompt.index % ranks == rank]
    advantages = group_advantages([trajectory.total_reward for trajectory in mine], GROUP_SIZE, divide_by_std=True)
    for trajectory, advantage in zip(mine, advantages):
        trajectory.advantage = advantage
    step = grpo_step(
        policy,
        Machine(),
        TokenAlgorithmConfig(),
        case.actor,
        group_size=GROUP_SIZE,
        num_mini_batches=case.num_mini_batches,
        micro_batch_size=case.micro_batch_size,
        max_decisions=SAMPLING.max_tokens,
        num_ranks=ranks,
        optimizer_step=descend,
        before_micro_batch=FSDPReshardPolicy(model, case.keeps_gathered).before_micro_batch,
        is_interrupted=lambda: False,
        wait=lambda is_waiting: None,
    )
    metrics = step.update(mine)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}, metrics


if __name__ == "__main__":
    dist.init_process_group("gloo")
    results = {name: updated(Case.of(fields)) for name, fields in json.loads(Path(sys.argv[1]).read_text()).items()}
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[2])
    dist.destroy_process_group()
