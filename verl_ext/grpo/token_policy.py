"""A causal language model as the policy: an action is a completion, a decision is a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.data.batching import packed_arguments
from verl_ext.errors import Stop
from verl_ext.grpo.protocols import LogProbs, Metrics, MicroBatch, Policy, Trajectory
from verl_ext.grpo.sampling import RolloutEngine, SampleRequest, SamplingArgs, sample_seed
from verl_ext.verl_api import entropy_from_logits, logprobs_from_logits

LOG_PROB_DIGITS = 6
"""Decimal places of log-probabilities in `sample_tokens.jsonl`."""
PADDING, PROMPT = -1, 0
"""Segments of a row; a completion's segment is its number in the row, from 1."""
SHARED_PREFIX_ARCHITECTURES = (
    "gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
"""Architectures whose attention depends only on the mask and the positions given; a test covers each."""
Row = list[Trajectory]
Cost = Callable[[int, int], float]
"""FLOPs of a forward pass by number of rows and their length in tokens."""
ReferenceModel = Callable[[], AbstractContextManager[PreTrainedModel]]


class TokenPolicy(Policy):
    """Generates completions with an engine, and evaluates them with the trained model.

    Args:
        model: the trained model, as FSDP2 modules.
        tokenizer: the model's tokenizer.
        engine: generates completions.
        batcher: builds the rows of forward passes.
        sampling: sampling parameters of training.
        seed: `trainer.seed`.
        autocast: returns the context for a forward pass.
        device: device of the model's inputs.
        entropy_gradient: whether the entropy is part of the loss.
        reference: context manager that yields the frozen initial model; None if nothing needs it.
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
        entropy_gradient: bool,
        reference: ReferenceModel | None,
    ) -> None:
        self._model, self._reference, self._tokenizer = model, reference, tokenizer
        self._engine, self._batcher, self._sampling, self._seed = engine, batcher, sampling, seed
        self._autocast, self._device, self._entropy_gradient = autocast, device, entropy_gradient
        self.engine_dtype = engine.dtype

    @contextmanager
    def sampling(self, version: int) -> Iterator[Metrics]:
        """Sync the weights; release the engine's memory at the end of the block.

        After an error other than `Stop`, it is not released, because the engine may be dead, or only this rank may have
        failed.
        """
        metrics = self._engine.sync_weights(version)
        try:
            yield metrics
        except Stop:  # the run saves now, which needs the memory
            self._engine.release_memory()
            raise
        self._engine.release_memory()

    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        greedily = replace(self._sampling, temperature=0.0, top_p=1.0, top_k=-1)
        return self._generate(trajectories, step, greedily if greedy else self._sampling)

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
        return self._batcher.collate(trajectories)

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        return self._log_probs(self._model, micro_batch)

    @torch.no_grad()
    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        assert self._reference is not None, "built with actor.use_kl_loss"
        with self._reference() as model:
            return self._log_probs(model, micro_batch).values

    def _log_probs(self, model: PreTrainedModel, micro_batch: MicroBatch) -> LogProbs:
        # the lengths of packed samples are read on the CPU
        tensors = {
            name: tensor if name == "sample_lengths" else tensor.to(self._device)
            for name, tensor in micro_batch.items()
        }
        with self._autocast():
            return completion_log_probs(model, tensors, self._sampling.temperature, self._entropy_gradient)

    def sort_by_cost(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return self._batcher.sort(trajectories)

    def num_decisions(self, trajectory: Trajectory) -> int:
        return len(trajectory.action.token_ids)

    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        """Lengths in tokens."""
        total, completion = num_tokens(trajectory), len(trajectory.action.token_ids)
        return dict(zip(self.metric_names, (total - completion, completion, total)))

    def table_row(self, trajectory: Trajectory) -> dict[str, str | float]:
        return {"prompt": trajectory.prompt.fields["prompt_text"], "answer": trajectory.action.text}

    @torch.no_grad()
    def token_rows(self, trajectories: Sequence[Trajectory], micro_batch_size: int) -> list[dict[str, Any]]:
        """Tokens of prompts and completions with both log-probabilities, which prompts do not have; collective.

        Both are at the sampling temperature, before top_p and top_k.

        Args:
            trajectories: trajectories of this rank; every rank has the same number.
            micro_batch_size: samples in a forward pass.
        """
        rows = []
        for start in range(0, len(trajectories), micro_batch_size):
            chosen = trajectories[start : start + micro_batch_size]
            for trajectory, values in zip(chosen, self.log_probs(self.collate(chosen)).values.tolist()):
                rows.append(self._token_row(trajectory, values[: self.num_decisions(trajectory)]))
        return rows

    def _token_row(self, trajectory: Trajectory, trainer_log_probs: Sequence[float]) -> dict[str, Any]:
        prompt, completion = _prompt_ids(trajectory), trajectory.action
        tokens = [*prompt, *completion.token_ids]
        is_trained = int(trajectory.total_reward is not None)
        return {
            "sample_id": trajectory.prompt.sample_id,
            "number": trajectory.number,
            "token_ids": tokens,
            "texts": [self._tokenizer.decode([token]) for token in tokens],
            "loss_mask": [0] * len(prompt) + [is_trained] * len(completion.token_ids),
            "rollout_log_probs": [None] * len(prompt) + _rounded(completion.log_probs.tolist()),
            "trainer_log_probs": [None] * len(prompt) + _rounded(trainer_log_probs),
        }

    def close(self) -> None:
        self._engine.close()


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, LOG_PROB_DIGITS) if math.isfinite(value) else None for value in values]


# Rows of a forward pass


@dataclass(frozen=True)
class TokenBatcher:
    """Builds rows from trajectories: one prompt and completion per row, or one prompt with all its completions.

    Completions that share a row attend only to the prompt and to themselves, and each starts at the position after
    the prompt, so their log-probabilities are the same as in separate rows. Separate rows are padded to one length, or
    packed into a single row, whose samples attend only to themselves.

    Attributes:
        pad_token_id: pads rows.
        cost: decides whether sharing a prompt is cheaper; None if the model cannot share it.
        packs: whether separate rows are packed.
    """

    pad_token_id: int
    cost: Cost | None = None
    packs: bool = False

    def rows(self, trajectories: Sequence[Trajectory]) -> list[Row]:
        """Build the cheaper layout; only consecutive trajectories of one prompt can share a row."""
        separate = [[trajectory] for trajectory in trajectories]
        if (cost := self.cost) is None:
            return separate
        shared = [list(group) for _, group in groupby(trajectories, key=lambda each: each.prompt.index)]
        if self.packs:
            cost_of_separate = sum(cost(1, num_tokens(trajectory)) for trajectory in trajectories)
        else:
            cost_of_separate = cost(len(separate), _width(separate))
        return shared if cost(len(shared), _width(shared)) < cost_of_separate else separate

    def sort(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Sort longest first, so that micro-batches need little padding; trajectories of a shared row stay together."""
        longest: dict[int, int] = {}
        if self.shares_prefix(trajectories):
            for trajectory in trajectories:
                index = trajectory.prompt.index
                longest[index] = max(longest.get(index, 0), num_tokens(trajectory))

        def key(trajectory: Trajectory) -> tuple[int, int, int]:
            index = trajectory.prompt.index if longest else 0
            return -longest.get(index, 0), index, -num_tokens(trajectory)

        return sorted(trajectories, key=key)

    def shares_prefix(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether any of the trajectories would share a row."""
        return len(self.rows(trajectories)) < len(trajectories)

    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """Build the rows of a forward pass.

        Returns:
            Shape (rows, tokens): `input_ids`, `position_ids`. Shape (trajectories, completion tokens):
            `completion_ids`, `response_mask`, `rollout_log_probs`, and `predicted_at`, the index of the preceding token
            in the flattened rows. Packed rows also have `sample_lengths` (trajectories,), and padded ones `segments`
            (rows, tokens).
        """
        rows = self.rows(trajectories)
        if self.packs and len(rows) == len(trajectories):
            inputs, predicted_at = _packed(trajectories)
        else:
            inputs, predicted_at = self._padded(rows)
        completions = [torch.tensor(trajectory.action.token_ids) for trajectory in trajectories]
        return {
            **inputs,
            "completion_ids": _pad_right(completions, self.pad_token_id),
            "predicted_at": _pad_right(predicted_at, 0),
            "response_mask": _pad_right([torch.ones_like(tokens) for tokens in completions], 0),
            "rollout_log_probs": _pad_right([trajectory.action.log_probs for trajectory in trajectories], 0),
        }

    def _padded(self, rows: list[Row]) -> tuple[MicroBatch, list[torch.Tensor]]:
        """Pad prompts on the left, so that all completions start at the same column, and rows on the right."""
        longest = max(len(_prompt_ids(row[0])) for row in rows)
        ids, positions, segments, predicted_at = zip(*(_pack_row(row, longest) for row in rows))
        width = max(map(len, ids))
        inputs = {
            "input_ids": _pad_right(ids, self.pad_token_id),
            "position_ids": _pad_right(positions, 0),
            "segments": _pad_right(segments, PADDING),
        }
        return inputs, [at + number * width for number, of_row in enumerate(predicted_at) for at in of_row]


def _packed(trajectories: Sequence[Trajectory]) -> tuple[MicroBatch, list[torch.Tensor]]:
    """Concatenate prompts and completions into one row without padding."""
    samples = [torch.tensor([*_prompt_ids(each), *each.action.token_ids]) for each in trajectories]
    lengths = torch.tensor([len(sample) for sample in samples])
    inputs = {
        "input_ids": torch.cat(samples)[None],
        "position_ids": torch.cat([torch.arange(len(sample)) for sample in samples])[None],
        "sample_lengths": lengths,
    }
    ends = zip(trajectories, (lengths.cumsum(0) - 1).tolist())  # a completion's last token predicts nothing
    return inputs, [torch.arange(end - len(each.action.token_ids), end) for each, end in ends]


def num_tokens(trajectory: Trajectory) -> int:
    """Number of tokens of prompt and completion."""
    return len(_prompt_ids(trajectory)) + len(trajectory.action.token_ids)


def _pack_row(row: Row, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens, positions and segments of a row, and for each completion the index before each of its tokens."""
    prompt, padding = _prompt_ids(row[0]), longest - len(_prompt_ids(row[0]))
    ids, positions = [0] * padding + list(prompt), [0] * padding + list(range(len(prompt)))
    segments = [PADDING] * padding + [PROMPT] * len(prompt)
    predicted_at = []
    for number, trajectory in enumerate(row, start=1):
        tokens = trajectory.action.token_ids
        # the prompt's last token predicts each completion's first
        predicted_at.append(torch.tensor([longest - 1, *range(len(ids), len(ids) + len(tokens) - 1)][: len(tokens)]))
        ids += tokens
        positions += range(len(prompt), len(prompt) + len(tokens))
        segments += [number] * len(tokens)
    return torch.tensor(ids), torch.tensor(positions), torch.tensor(segments), predicted_at


def _prompt_ids(trajectory: Trajectory) -> Sequence[int]:
    return trajectory.prompt.fields["prompt_ids"]


def _width(rows: list[Row]) -> int:
    """Tokens of a row, as `TokenBatcher.collate` pads them."""
    completions = max(sum(len(trajectory.action.token_ids) for trajectory in row) for row in rows)
    return max(len(_prompt_ids(row[0])) for row in rows) + completions


def _pad_right(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def forward_flops(model: PreTrainedModel | PeftModel) -> Cost | None:
    """Return the cost of a forward pass, for a model whose rows may hold several completions.

    Each token costs 2 x parameters. Each pair of tokens in a row costs 4 x layers x total head width, because a custom
    mask skips no pair (Kaplan et al. 2020, arXiv 2001.08361, table 1).

    Returns:
        None if the model does not support a custom mask, or uses sliding-window attention.
    """
    config = unwrap_peft(model).config
    by_sdpa = config._attn_implementation.endswith("sdpa")  # also that for packed rows
    kinds = getattr(config, "layer_types", None)  # one per layer
    if kinds is None:
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    if not by_sdpa or config.model_type not in SHARED_PREFIX_ARCHITECTURES or set(kinds) - {"full_attention"}:
        return None
    per_token = 2 * unwrap_peft(model).num_parameters(exclude_embeddings=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return lambda num_rows, length: num_rows * length * (per_token + per_pair * length)


# Forward passes


def completion_log_probs(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool
) -> LogProbs:
    """Compute log-probabilities and entropies of completions at a temperature, without logits of prompts.

    Args:
        model: the model; all ranks call it together.
        micro_batch: see `TokenBatcher.collate`; on the model's device.
        temperature: logits are divided by it.
        entropy_gradient: whether the entropy has a gradient, which doubles the memory of the logits.
    """
    mask = micro_batch["response_mask"].bool()
    logits = _logits_at(model, micro_batch, micro_batch["predicted_at"][mask]).float()
    if temperature != 1:
        logits = logits / temperature
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits)
    # in place, flash-attention's kernel would overwrite logits that the entropy's gradient needs
    tokens = micro_batch["completion_ids"][mask]
    values = logprobs_from_logits(logits[None], tokens[None], inplace_backward=not entropy_gradient)[0]
    return LogProbs(_scatter(values, mask), _scatter(entropy, mask))


def _logits_at(model: PreTrainedModel, micro_batch: MicroBatch, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits (positions, vocabulary) at positions of the flattened rows."""
    inputs: dict[str, Any] = {name: micro_batch[name] for name in ("input_ids", "position_ids")}
    supports_keep, width = unwrap_peft(model)._supports_logits_to_keep(), inputs["input_ids"].shape[1]
    if "sample_lengths" in micro_batch:
        inputs |= packed_arguments(micro_batch["sample_lengths"], positions.device)
        if supports_keep:
            return model(**inputs, use_cache=False, logits_to_keep=positions).logits[0]
        return model(**inputs, use_cache=False).logits[0, positions]
    first = int((positions % width).min())
    if supports_keep:
        inputs["logits_to_keep"] = width - first
    logits = model(**inputs, attention_mask=attention_mask(micro_batch["segments"]), use_cache=False).logits
    rows, columns = positions // width, positions % width - first
    return logits[:, first - width :].flatten(0, 1)[rows * (width - first) + columns]


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """Return the mask that lets each token attend to earlier tokens of the prompt and of its own segment.

    Args:
        segments: (rows, tokens), see `PADDING`.

    Returns:
        With one completion per row: (rows, tokens), 0 for padding; the model adds its causal mask. With several:
        (rows, 1, tokens, tokens), true where a token attends to another.
    """
    if int(segments.max()) <= 1:
        return (segments != PADDING).long()
    position = torch.arange(segments.shape[1], device=segments.device)
    key, query = segments[:, None, :], segments[:, :, None]
    attends = ((key == PROMPT) | (key == query)) & (position[None, :] <= position[:, None])
    # padding attends to itself, because the softmax of a row without keys is NaN
    attends &= (key != PADDING) | (position[None, :] == position[:, None])
    return attends[:, None]


def _scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scatter (tokens,) values to their positions in (trajectories, completion tokens)."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
