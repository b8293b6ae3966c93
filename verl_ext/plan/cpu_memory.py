"""Compares the plan of a run on CPUs with free memory, before the ranks load the model.

Unlike `python -m verl_ext.plan`, it knows the data, so it predicts the largest micro-batch of the run instead of one of
maximum length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from verl_ext.console import warn
from verl_ext.data.batching import MicroBatchPlan, attention_share, plan_micro_batches
from verl_ext.data.dataset import TokenDataset
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import GIB
from verl_ext.grpo.protocols import Prompt, Trajectory
from verl_ext.grpo.sampling import Completion
from verl_ext.grpo.token_policy import TokenBatcher, forward_flops
from verl_ext.hardware import process_memory
from verl_ext.plan.model_shape import empty_model, find_model, settle, shape_of
from verl_ext.plan.planner import RunPlan, make_plan
from verl_ext.plan.step_time import HARDWARE, Cluster
from verl_ext.plan.workload import (
    Attention,
    DataLengths,
    LargestMicroBatch,
    PlannedConfig,
    attention_of,
    packs,
    require_formulas,
    samples_per_update,
)
from verl_ext.trainer.device import auto_precision_on_cpus, has_bf16_units
from verl_ext.trainer.fsdp import keeps_gathered
from verl_ext.trainer.stages import GRPOConfig, RunConfig, SFTConfig
from verl_ext.verl_api import PrecisionType

NUM_CHECKED_BATCHES = 64
"""Number of global batches whose micro-batches are compared, those with most tokens per micro-batch; assigning a batch
takes about a millisecond."""
LIBRARY_BYTES = 0.5 * GIB
"""Memory of a rank for libraries that it loads later, such as vLLM; 0.4 to 0.6 GiB in measured runs."""
KEPT_SHARE = 0.75
"""`DeviceSpec.kept_share` of ranks that `keep_freed_memory`; 0.8 to 4 in measured runs, more if lengths vary. The lower
end, so that no run that fits is warned about."""


def check_memory(config: RunConfig, dataset: Any, num_ranks: int, num_ranks_here: int) -> None:
    """Warn if the ranks of this machine will probably need more memory than is free.

    Does nothing if the plan has no formulas for the configuration, the model or the optimizer.

    Args:
        dataset: training data of the stage.
        num_ranks: number of all ranks.
        num_ranks_here: number of ranks on this machine.
    """
    try:
        free = process_memory().available / num_ranks_here
        plan = plan_with_data(config, dataset, num_ranks, num_ranks_here, free)
    except UserError:  # no formulas
        return
    except Exception as error:  # formulas that fail for an unusual model must not end its run
        warn(
            f"the memory of this run cannot be predicted ({first_line_of(error)}); training continues without the "
            "memory check"
        )
        return
    if not plan.fits:
        warn(
            f"training may take {plan.memory.peak_bytes / GIB:.1f} GiB on each of {num_ranks_here} ranks, but only "
            f"{free / GIB:.1f} GiB of memory is free for each; {plan.fix.removesuffix('.')}"
        )


def plan_with_data(
    config: RunConfig, dataset: Any, num_ranks: int, num_ranks_here: int, memory_bytes: float
) -> RunPlan:
    """Plan a run on CPUs with the lengths of its data.

    Args:
        memory_bytes: memory of a rank.

    Raises:
        UserError: the plan has no formulas for the configuration or the model.
    """
    settled = deepcopy(require_formulas(config))
    model_config, _ = find_model(settled)
    settle(settled, model_config, is_gpu=False)
    model = empty_model(model_config, settled.model)
    shape = shape_of(model_config, model)
    if settled.model.mixed_precision == "auto":
        settled.model.mixed_precision = auto_precision_on_cpus(settled, has_bf16_units())
    fsdp, precision = settled.model.fsdp_config, PrecisionType.to_dtype(settled.model.mixed_precision)
    fsdp.keep_gathered = keeps_gathered(fsdp, model, precision, "cpu")  # depends on the total memory, not the free one
    if isinstance(settled, GRPOConfig):
        prompts = sorted((item["prompt_ids"] for item in dataset), key=len, reverse=True)
        settled.data.max_prompt_length = len(prompts[0])
        largest = largest_of_prompts(prompts, model, num_ranks)
    else:
        largest = largest_of_samples(settled, dataset, shape.hidden, num_ranks)
    hardware = replace(HARDWARE["cpu"], memory_bytes=memory_bytes, library_bytes=LIBRARY_BYTES, kept_share=KEPT_SHARE)
    return make_plan(settled, shape, Cluster(hardware, num_ranks, num_ranks_here), DataLengths(largest=largest))


def largest_of_prompts(
    prompts: Sequence[Sequence[int]], model: PreTrainedModel, num_ranks: int
) -> Callable[[PlannedConfig], LargestMicroBatch]:
    """Return a function for GRPO: the micro-batch of the longest prompts, with completions of maximum length.

    Args:
        prompts: token ids of all prompts, longest first.
        model: the model, whose parameters may be empty.
    """

    def largest(config: PlannedConfig) -> LargestMicroBatch:
        assert isinstance(config, GRPOConfig)
        samples, length = samples_per_update(config, num_ranks), config.data.max_response_length
        size, is_eager = min(config.data.micro_batch_size_per_gpu, samples), config.model.attn_implementation == "eager"
        completion = Completion((0,) * length, torch.zeros(length), truncated=True)
        trajectories = []
        for number in range(size):
            index = number // config.rollout.n % len(prompts)
            prompt = Prompt("", index, {"prompt_ids": prompts[index]})
            trajectories.append(Trajectory(prompt, number).act(completion))
        cost = forward_flops(model) if config.actor.share_prompts and not is_eager else None
        tensors = TokenBatcher(0, cost, packs=not is_eager).collate(trajectories)
        rows, row_tokens = tensors["input_ids"].shape
        attention: Attention = "packed" if "sample_lengths" in tensors else "eager" if is_eager else "masked"
        return LargestMicroBatch(rows, row_tokens, size * length, size * length, attention, math.ceil(samples / size))

    return largest


def largest_of_samples(
    settled: SFTConfig, dataset: TokenDataset, hidden: int, num_ranks: int
) -> Callable[[PlannedConfig], LargestMicroBatch]:
    """Return a function for SFT: the largest micro-batch of the first epoch, except that some batches are not checked.

    Args:
        settled: the configuration of the run.
        hidden: width of the model's hidden states.
    """
    lengths = dataset.lengths
    batches = list(GlobalBatchSampler(len(dataset), settled.data.train_batch_size, 0, 1, settled.trainer.seed))
    totals = np.array([lengths[rows].sum() for rows in batches])
    with_longest = int(np.argmax([lengths[rows].max() for rows in batches]))

    def largest(config: PlannedConfig) -> LargestMicroBatch:
        assert isinstance(config, SFTConfig)
        plan = plan_micro_batches(config.data, lengths, packs(config), attention_share(hidden))
        per_micro_batch = totals / np.ceil(totals / plan.max_tokens / num_ranks)
        fullest = np.argsort(-per_micro_batch, kind="stable")[:NUM_CHECKED_BATCHES].tolist()
        chosen = [with_longest, int(totals.argmax()), *fullest]
        ranks = [of_rank for number in chosen for of_rank in plan.assign(batches[number], num_ranks)]
        micro_batches = [micro_batch for of_rank in ranks for micro_batch in of_rank]
        samples = max(micro_batches, key=lambda samples: math.prod(row_shape(plan, samples)))
        rows, row_tokens = row_shape(plan, samples)
        loss_tokens = sum(int(dataset[row]["loss_mask"][1:].sum()) for row in samples)
        attention = attention_of(config, is_padded=len({*lengths[samples].tolist()}) > 1, by_flash=False)
        return LargestMicroBatch(rows, row_tokens, rows * row_tokens, loss_tokens, attention, max(map(len, ranks)))

    return largest


def row_shape(plan: MicroBatchPlan, samples: Sequence[int]) -> tuple[int, int]:
    """Return the rows of a micro-batch, and the tokens of a row, including padding."""
    lengths = plan.lengths[samples]
    return (1, int(lengths.sum())) if plan.packs else (len(samples), int(lengths.max()))
