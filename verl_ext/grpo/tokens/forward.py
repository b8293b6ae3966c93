"""Log-probabilities of completions by a causal language model, with nothing computed for prompts that need not be."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from verl_ext.grpo.policy import LogProbs, MicroBatch
from verl_ext.grpo.tokens.layout import PADDING, PROMPT
from verl_ext.grpo.tokens.model import logits_of_last
from verl_ext.verl_api import entropy_from_logits, logprobs_from_logits


def completion_log_probs(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool
) -> LogProbs:
    """Of the distribution that tokens are drawn from at this temperature.

    Args:
        model: takes part with all ranks.
        micro_batch: see `Layout.micro_batch`; on the model's device.
        temperature: logits are divided by it.
        entropy_gradient: whether the entropy is differentiated too, which takes as much memory again.
    """
    mask = micro_batch["mask"].bool()
    width = micro_batch["input_ids"].shape[1]
    places = micro_batch["predicted_at"][mask]
    first = int((places % width).min())
    inputs = {name: micro_batch[name] for name in ("input_ids", "position_ids")}
    logits = model(
        **inputs,
        attention_mask=attention_mask(micro_batch["segments"]),
        use_cache=False,
        **logits_of_last(model, width - first),
    ).logits[:, first - width :]
    logits = logits.flatten(0, 1)[places // width * (width - first) + places % width - first]  # (tokens, vocabulary)
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = entropy_from_logits(logits)
    # in place flash-attention's kernel would write its gradient over logits that the entropy's needs
    tokens = micro_batch["completion_ids"][mask]
    values = logprobs_from_logits(logits[None], tokens[None], inplace_backward=not entropy_gradient)[0]
    return LogProbs(_spread(values, mask), _spread(entropy, mask))


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """What each token of each row sees: what came before it of its own segment and of the prompt.

    Args:
        segments: (rows, tokens), see `Layout`.

    Returns:
        (rows, tokens), 1 but for padding, where the model's own causal mask does the rest. With several completions in
        a row (rows, 1, tokens, tokens): true where a token sees another.
    """
    if int(segments.max()) <= 1:
        return (segments != PADDING).long()
    position = torch.arange(segments.shape[1], device=segments.device)
    seen, own = segments[:, None, :], segments[:, :, None]
    sees = ((seen == PROMPT) | (seen == own)) & (position[None, :] <= position[:, None])
    sees &= (seen != PADDING) | (position[None, :] == position[:, None])  # a row of nothing seen would be no number
    return sees[:, None]


def _spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(tokens,) back at their places in (samples, completion)."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
