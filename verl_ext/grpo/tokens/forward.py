"""Log-probabilities of completions by a causal language model, with nothing computed for prompts that need not be."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

from verl_ext.grpo.policy import LogProbs, MicroBatch, Sample

_KEEP = "logits_to_keep"


def padded(samples: Sequence[Sample], pad_token_id: int) -> MicroBatch:
    """Prompts padded on their left and completions on their right, so that all completions begin at one place.

    Returns:
        `input_ids`, `attention_mask` and `position_ids` of (samples, prompt + completion); `mask` and
        `rollout_log_probs` of (samples, completion).
    """
    prompts = [torch.tensor(sample.prompt.content["prompt_ids"]) for sample in samples]
    completions = [torch.tensor(sample.action.token_ids) for sample in samples]
    longest = max(map(len, prompts))
    input_ids = torch.cat(
        [
            torch.stack([F.pad(ids, (longest - len(ids), 0), value=pad_token_id) for ids in prompts]),
            _right(completions, pad_token_id),
        ],
        dim=1,
    )
    mask = _right([torch.ones(len(ids), dtype=torch.long) for ids in completions], 0)
    before = torch.arange(longest) >= longest - torch.tensor([len(ids) for ids in prompts])[:, None]
    attention_mask = torch.cat([before.long(), mask], dim=1)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "mask": mask,
        "rollout_log_probs": _right([sample.action.log_probs for sample in samples], 0),
    }


def _right(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def completion_log_probs(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool
) -> LogProbs:
    """Of the distribution that tokens are drawn from at this temperature.

    Args:
        model: takes part with all ranks.
        micro_batch: see `padded`; on the model's device.
        temperature: logits are divided by it.
        entropy_gradient: whether the entropy is differentiated too, which takes as much memory again.
    """
    mask = micro_batch["mask"].bool()
    inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    length = mask.shape[1]
    if _KEEP in inspect.signature(type(_base_of(model)).forward).parameters:
        inputs[_KEEP] = length + 1
    logits = model(**inputs, use_cache=False).logits[:, -length - 1 : -1][mask]  # (tokens, vocabulary)
    logits = logits.float() / temperature
    tokens = micro_batch["input_ids"][:, -length:][mask]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits)
    # in place flash-attention's kernel would write its gradient over logits that the entropy's needs
    values = logprobs_from_logits(logits[None], tokens[None], inplace_backward=not entropy_gradient)[0]
    return LogProbs(_spread(values, mask), _spread(entropy, mask))


def _base_of(model: PreTrainedModel) -> torch.nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(tokens,) back at their places in (samples, completion)."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
