"""A causal language model as the policy: an action is a completion, a decision is a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.errors import Stop
from verl_ext.grpo.protocols import LogProbs, Metrics, MicroBatch, Policy, Trajectory
from verl_ext.grpo.sampling import RolloutEngine, SampleRequest, SamplingArgs, sample_seed
from verl_ext.grpo.token_batch import PADDING, PROMPT, TokenBatcher, num_tokens
from verl_ext.verl_api import entropy_from_logits, logprobs_from_logits

UNFILTERED_TOKENS = 16
"""Longest completion that is generated only to compare engine and model."""
ReferenceModel = Callable[[], AbstractContextManager[PreTrainedModel]]


class TokenPolicy(Policy):
    """Generates completions with an engine, and evaluates them with the trained model.

    Args:
        model: the trained model, as FSDP2 modules.
        tokenizer: of the model.
        engine: generates.
        batcher: makes the rows of forward passes.
        sampling: of training.
        seed: `trainer.seed`.
        autocast: makes the context of a forward pass.
        device: of the model's inputs.
        entropy_gradient: whether the entropy is part of the loss.
        reference: context in which its value is the frozen initial model; None if nothing needs it.
    """

    metric_names = ("seq_prompt_len", "seq_completion_len", "seq_total_len")

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        engine: RolloutEngine,
        batcher: TokenBatcher,
        sampling: SamplingArgs,
        *,
        seed: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        device: str,
        entropy_gradient: bool = False,
        reference: ReferenceModel | None = None,
    ) -> None:
        self._model, self._reference, self._tokenizer = model, reference, tokenizer
        self._engine, self._batcher, self._sampling, self._seed = engine, batcher, sampling, seed
        self._autocast, self._device, self._entropy_gradient = autocast, device, entropy_gradient
        self.engine_dtype = engine.dtype

    @contextmanager
    def sampling(self, version: int) -> Iterator[Metrics]:
        """See `Policy.sampling`.

        An error other than `Stop` leaves the engine as it is: it may be dead, and the error that of one rank alone.
        """
        metrics = self._engine.sync_weights(version)
        try:
            yield metrics
        except Stop:  # the run saves now, which needs the memory
            self._engine.release_memory()
            raise
        self._engine.release_memory()

    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        """See `Policy.generate`."""
        greedily = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=-1)
        return self._generate(trajectories, step, greedily if greedy else self._sampling)

    def generate_unfiltered(self, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """See `Policy.generate_unfiltered`; with top_p or top_k, short completions are generated without them."""
        if not self._sampling.is_filtered:
            return list(trajectories)
        max_tokens = min(UNFILTERED_TOKENS, self._sampling.max_tokens)
        unfiltered = replace(self._sampling, top_p=1.0, top_k=-1, max_tokens=max_tokens)
        return list(self._generate([Trajectory(each.prompt, each.number) for each in trajectories], step, unfiltered))

    def _generate(self, trajectories: Sequence[Trajectory], step: int, sampling: SamplingArgs) -> Iterator[Trajectory]:
        requests = [
            SampleRequest(
                trajectory.prompt.fields["prompt_ids"] if trajectory.observation is None else trajectory.observation,
                sample_seed(self._seed, step, trajectory.prompt.sample_id, trajectory.number),
            )
            for trajectory in trajectories
        ]
        for index, completion in self._engine.generate(requests, sampling):
            text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            yield trajectories[index].act(replace(completion, text=text))

    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """See `Policy.collate`."""
        return self._batcher.collate(trajectories)

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """See `Policy.log_probs`."""
        return self._log_probs(self._model, micro_batch)

    @torch.no_grad()
    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """See `Policy.reference_log_probs`."""
        assert self._reference is not None, "built with actor.use_kl_loss"
        with self._reference() as model:
            return self._log_probs(model, micro_batch).values

    def _log_probs(self, model: PreTrainedModel, micro_batch: MicroBatch) -> LogProbs:
        tensors = {name: tensor.to(self._device) for name, tensor in micro_batch.items()}
        with self._autocast():
            return completion_log_probs(model, tensors, self._sampling.temperature, self._entropy_gradient)

    def sort_by_cost(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """See `Policy.sort_by_cost`."""
        return self._batcher.sort(trajectories)

    def num_decisions(self, trajectory: Trajectory) -> int:
        """See `Policy.num_decisions`."""
        return len(trajectory.action.token_ids)

    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        """See `Policy.sample_metrics`: lengths in tokens."""
        total, completion = num_tokens(trajectory), len(trajectory.action.token_ids)
        return dict(zip(self.metric_names, (total - completion, completion, total)))

    def table_row(self, trajectory: Trajectory) -> dict[str, str]:
        """See `Policy.table_row`."""
        return {"prompt": trajectory.prompt.fields["prompt_text"], "answer": trajectory.action.text}

    def close(self) -> None:
        """See `Policy.close`."""
        self._engine.close()


# Forward passes


def completion_log_probs(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool
) -> LogProbs:
    """Log-probabilities in the distribution that tokens are sampled from at this temperature; no logits of prompts.

    Args:
        model: all ranks call it together.
        micro_batch: see `TokenBatcher.collate`; on the model's device.
        temperature: logits are divided by it.
        entropy_gradient: whether the entropy has a gradient, which doubles the memory of the logits.
    """
    mask = micro_batch["response_mask"].bool()
    width = micro_batch["input_ids"].shape[1]
    positions = micro_batch["predicted_at"][mask]
    first = int((positions % width).min())
    inputs = {name: micro_batch[name] for name in ("input_ids", "position_ids")}
    keep = {"logits_to_keep": width - first} if unwrap_peft(model)._supports_logits_to_keep() else {}
    logits = model(**inputs, attention_mask=attention_mask(micro_batch["segments"]), use_cache=False, **keep).logits[
        :, first - width :
    ]
    rows, columns = positions // width, positions % width - first
    logits = logits.flatten(0, 1)[rows * (width - first) + columns]  # (tokens, vocabulary)
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits)
    # in place, flash-attention's kernel would overwrite logits that the entropy's gradient needs
    tokens = micro_batch["completion_ids"][mask]
    values = logprobs_from_logits(logits[None], tokens[None], inplace_backward=not entropy_gradient)[0]
    return LogProbs(_scatter(values, mask), _scatter(entropy, mask))


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """The mask with which each token attends to earlier tokens of the prompt and of its own segment.

    Args:
        segments: (rows, tokens), see `token_batch`.

    Returns:
        With one completion per row (rows, tokens), 0 for padding; the model adds its causal mask. With several
        (rows, 1, tokens, tokens), true where a token attends to another.
    """
    if int(segments.max()) <= 1:
        return (segments != PADDING).long()
    position = torch.arange(segments.shape[1], device=segments.device)
    key, query = segments[:, None, :], segments[:, :, None]
    attends = ((key == PROMPT) | (key == query)) & (position[None, :] <= position[:, None])
    # padding attends to itself, because a row of the softmax without any key is NaN
    attends &= (key != PADDING) | (position[None, :] == position[:, None])
    return attends[:, None]


def _scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(tokens,) to their positions in (trajectories, completion tokens)."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
