"""Causal attention over several samples packed into one row, and a check that a model supports it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.console import print_line
from verl_ext.data.batching import MicroBatch, Sample, SampleLengths, pack
from verl_ext.distributed import gather_results, on_rank_zero
from verl_ext.errors import UserError

PACKED_SDPA = "packed_sdpa"
"""Name of `packed_sdpa` among the attention functions of transformers."""
MASK_PROBE = "packed_sdpa_mask_probe"
"""Name of `MaskProbe` among the attention functions of transformers."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest accepted relative difference of a token's logits between packed and separate samples."""
TRIAL_LENGTHS = (7, 5, 9)
"""Lengths of the samples for checking a model, in tokens."""
FLASH_TYPES, FLASH_HEAD_DIM, FLASH_CAPABILITY = (torch.bfloat16, torch.float16), 256, (8, 0)
"""Requirements of torch's flash-attention kernel: dtypes, largest head, and minimum compute capability."""
flash_attention: Any = varlen_attn
"""Torch's kernel for samples of different lengths; its parameters differ between releases."""
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Argument that enables fewer key heads than query heads; torch 2.11 does not need it."""


class PackingUnsupportedError(ValueError):
    """A model's attention cannot run over packed samples; the message completes a sentence about the model."""


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sample_lengths: SampleLengths | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention sample by sample, without padding and without a mask of quadratic size.

    Rows without `sample_lengths` use sdpa with their mask.

    Args:
        query: (1, heads, tokens, head_dim).
        key: (1, kv_heads, tokens, head_dim).
        value: (1, kv_heads, tokens, head_dim).
        attention_mask: mask of rows that are not packed; None for packed rows.
        sample_lengths: lengths of the row's samples; None if the row is not packed.
        cu_seq_lens_q: (num_samples + 1,), boundaries of the samples, for the GPU kernel.
        max_length_q: tokens of the longest sample, for the GPU kernel.
        sliding_window: number of tokens that a token attends to, including itself; None for all earlier ones.
        softcap: cap of the scores; sdpa does not support it.
        s_aux: attention sinks; sdpa does not support them.

    Returns:
        The output (1, tokens, heads, head_dim), and no attention weights.

    Raises:
        PackingUnsupportedError: the model does not pass the lengths, or needs what sdpa does not support.
    """
    if softcap is not None or s_aux is not None:
        raise PackingUnsupportedError("caps attention scores or has attention sinks, which sdpa does not support")
    if sample_lengths is None and attention_mask is None:
        raise PackingUnsupportedError("does not pass the boundaries of packed samples to its attention")
    if sample_lengths is not None and attention_mask is not None:  # such as Doge's, which depends on the hidden states
        raise PackingUnsupportedError("computes a mask of its own, which packed rows would ignore")
    if sample_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling)
    if cu_seq_lens_q is not None and not dropout and has_flash_kernel(query):
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (tokens, heads, head_dim)
        borders = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
        return flash_attention(*rows, *borders, scale=scaling, window_size=window, **GROUPED_HEADS).unsqueeze(0), None
    arguments = {"scale": scaling, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    return _sample_by_sample(query, key, value, sample_lengths, sliding_window, arguments), None


def has_flash_kernel(query: torch.Tensor) -> bool:
    """Whether torch has a flash-attention kernel for these queries, which processes all samples of a row at once."""
    head_dim = query.shape[-1]
    fits = query.dtype in FLASH_TYPES and head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM
    return fits and query.is_cuda and _gpu_has_flash_kernel()


@torch.compiler.assume_constant_result
def _gpu_has_flash_kernel() -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= FLASH_CAPABILITY


@torch.compiler.disable  # the number of samples and their lengths differ from row to row
def _sample_by_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sample_lengths: SampleLengths,
    sliding_window: int | None,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """Run sdpa for each sample of a row; `arguments` apply to all samples."""
    parts = [
        F.scaled_dot_product_attention(q, k, v, **_causal(q.shape[2], sliding_window, query.device), **arguments)
        for q, k, v in zip(*(tensor.split(sample_lengths.tokens, dim=2) for tensor in (query, key, value)))
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _causal(length: int, sliding_window: int | None, device: torch.device) -> dict[str, Any]:
    """Return sdpa's arguments for causal attention within a sample of `length` tokens."""
    if sliding_window is None or length <= sliding_window:
        return {"is_causal": True}
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return {"attn_mask": ones.tril() & ones.triu(1 - sliding_window)}


def packed_mask(*arguments: Any, attention_mask: torch.Tensor | None = None, **named: Any) -> torch.Tensor | None:
    """Return sdpa's mask for padded rows, also if nothing is padded, and none for packed rows."""
    if attention_mask is None:
        return None
    return sdpa_mask(*arguments, attention_mask=attention_mask, **{**named, "allow_is_causal_skip": False})


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, packed_mask)


class MaskProbe:
    """Attention functions of transformers that compare a model's masks with the attention of packed rows.

    Packed rows have no masks: a restriction is lost unless the layer also passes it as `sliding_window`. Whether it is
    lost cannot be seen in the logits of short samples. This probe evaluates each mask at the positions of a sample of
    the maximum length instead, without running such a sample.

    Args:
        max_length: tokens of the longest sample.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._probed: list[tuple[torch.Tensor, torch.Tensor]] = []  # masks, each with `_probe` of its function

    def mask(self, *, mask_function: Callable[..., Any], **named: Any) -> torch.Tensor:
        """Return sdpa's mask; see transformers' `sdpa_mask`."""
        named |= {"mask_function": mask_function, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if any(tensor.dim() > 1 for tensor in _tensors_of(mask_function)):  # at other positions, it has no value
            raise PackingUnsupportedError("has masks that depend on the tokens, which packed rows would ignore")
        mask = sdpa_mask(**named)
        last = self._max_length - 1
        places = [{"q_length": 1, "q_offset": place, "kv_length": self._max_length} for place in (0, last)]
        self._probed.append((mask, torch.cat([sdpa_mask(**named | place)[0, 0] for place in places])))
        return mask

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        sliding_window: int | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, None]:
        """Run `packed_sdpa` if it attends to the same tokens as `attention_mask`.

        Raises:
            PackingUnsupportedError: the mask allows other tokens for the first or the last token of a long sample.
        """
        if attention_mask is not None:
            probed = [rows for mask, rows in self._probed if mask is attention_mask]
            position = torch.arange(self._max_length, device=query.device)
            window = self._max_length if sliding_window is None else sliding_window
            expected = torch.stack([position == 0, position >= self._max_length - window])
            if not probed or not torch.equal(probed[0], expected):
                raise PackingUnsupportedError(
                    f"masks attention within samples of {self._max_length} tokens in a way that packed rows would "
                    "ignore"
                )
        return packed_sdpa(module, query, key, value, None, sliding_window=sliding_window, **named)


def _tensors_of(function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """The tensors that a mask function, composed of closures, reads."""
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]  # partials have none
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):  # the functions that transformers' `and_masks` combines
            values += value
        elif callable(value):
            yield from _tensors_of(value)


def trial_samples(vocab_size: int) -> list[Sample]:
    """Return samples of random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, vocab_size, (length,), generator=generator) for length in TRIAL_LENGTHS]
    return [{"input_ids": ids, "loss_mask": torch.ones_like(ids)} for ids in tokens]


def enable_packing(
    model: PreTrainedModel,
    logits_of: Callable[[MicroBatch], torch.Tensor],
    precision: torch.dtype,
    max_length: int,
    recorded: Mapping[str, Any] | None,
    required: bool = False,
) -> str | None:
    """Let a model attend within each sample of a packed row, or report that samples are padded; collective.

    Args:
        model: the sharded model, in evaluation mode.
        logits_of: see `why_not_packed`.
        precision: dtype of the forward pass.
        max_length: tokens of the longest sample.
        recorded: the result of an earlier start as `why_not_packed`; None tests the model's weights.
        required: whether `data.packing` is true.

    Returns:
        None, or why the model cannot, the same on every rank; it then keeps its attention function.

    Raises:
        UserError: packing is required, but the model does not support it.
    """
    base = unwrap_peft(model)
    attention = base.config._attn_implementation
    if recorded is not None:
        reason: str | None = recorded["why_not_packed"]
        attend_within_samples(model)
    elif attention == "eager":
        reason = "runs with eager attention, but packing needs sdpa or flash-attention"
    else:
        attend_within_samples(model)
        vocab_size = base.config.get_text_config().vocab_size
        reason = why_not_packed(logits_of, vocab_size, precision)
        if reason is None and attention == "sdpa":
            reason = why_masks_matter(base.config, logits_of, vocab_size, max_length)
    reason = next(filter(None, gather_results(lambda: reason)), None)
    if reason is not None:
        base.config._attn_implementation = attention
        sentence = f"{type(base).__name__.removeprefix('FSDP')} {reason}"
        if required:
            raise UserError(f"data.packing=true does not work: {sentence}; set data.packing=auto")
        on_rank_zero(lambda: print_line(f"Samples are padded instead of packed: {sentence}.", sys.stderr))
    return reason


def attend_within_samples(model: PreTrainedModel) -> None:
    """Replace sdpa by `packed_sdpa`; flash-attention takes packed rows as it is."""
    config = unwrap_peft(model).config
    if config._attn_implementation == "sdpa":
        config._attn_implementation = PACKED_SDPA


@torch.no_grad()
def why_not_packed(
    logits_of: Callable[[MicroBatch], torch.Tensor], vocab_size: int, precision: torch.dtype
) -> str | None:
    """Say why samples cannot be packed, as the end of a sentence about the model; None if they can; collective.

    This runs the model, because a user's model may carry state from sample to sample, which a list of architectures
    cannot cover.

    Args:
        logits_of: returns the logits (1, tokens, vocab) of a packed micro-batch.

    Returns:
        None if packed samples have the same logits as separate samples.
    """
    samples = trial_samples(vocab_size)
    try:
        alone = torch.cat([logits_of(pack([sample])) for sample in samples], dim=1).float()
        together = logits_of(pack(samples)).float()
    except PackingUnsupportedError as error:
        return str(error)
    except (TypeError, ValueError):  # the model's code has no parameter for the boundaries
        return "does not accept the boundaries of packed samples"
    spread = (alone - alone.mean(-1, keepdim=True)).norm(dim=-1)  # (1, tokens)
    difference = (together - alone).norm(dim=-1) / spread
    if not torch.isfinite(difference).all():
        return "gives logits that are all equal or not finite, so packing cannot be verified"
    # The norm over the vocabulary, because the largest of 150,000 rounding errors in bf16 exceeds any useful tolerance.
    if difference.max() > TOLERANCE[precision]:
        return "does not keep packed samples apart"
    return None


@torch.no_grad()
def why_masks_matter(
    config: PretrainedConfig, logits_of: Callable[[MicroBatch], torch.Tensor], vocab_size: int, max_length: int
) -> str | None:
    """Say which mask packed rows would ignore, as `why_not_packed` does; None if none; collective.

    Args:
        config: configuration of the model, which selects its attention function.
        logits_of: see `why_not_packed`.
        max_length: tokens of the longest sample; a wider window or chunk restricts nothing.
    """
    probe, attention = MaskProbe(max_length), config._attn_implementation
    AttentionInterface.register(MASK_PROBE, probe.attention)
    AttentionMaskInterface.register(MASK_PROBE, probe.mask)
    config._attn_implementation = MASK_PROBE
    try:
        logits_of(pack(trial_samples(vocab_size)[:1]))
    except PackingUnsupportedError as error:
        return str(error)
    finally:
        config._attn_implementation = attention
    return None
