"""Activation memory, counted by running a model's own layers without data.

Tensors on torch's meta device have shapes but no memory, so a forward and a backward pass take milliseconds. Each
tensor that autograd saves counts once. The attention kernel is replaced by an operator that saves what kernels save:
queries, keys, values, the output, and the logarithm of the softmax's denominator (Dao 2023, arXiv 2307.08691, section
3.1), but no scores.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from verl_ext.errors import UserError, first_line_of
from verl_ext.plan.workload import SEE_SUPPORTED, Attention, RankWorkload

DTYPES = {4: torch.float32, 2: torch.bfloat16}
"""Dtype of the forward pass by bytes of an element."""
COMPILED_ROWS, COMPILED_TOKENS = 2, 64
"""Rows, and tokens per row, of a compiled layer, which takes seconds; torch would specialize its graph for one row."""
QUADRATIC = ("masked", "eager")
"""Attention that saves tensors whose size is quadratic in the tokens of a row. Otherwise, all sizes are linear."""


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one micro-batch.

    Attributes:
        layer: what a decoder layer saves for its backward pass.
        others: what the rest of the model saves, without logits.
        layer_backward: what the backward pass of a layer needs at most beyond saved tensors: gradients of activations,
            and of the layer's own weights.
    """

    layer: int
    others: int
    layer_backward: int


class ActivationCounter:
    """Counts the activations of a model.

    Args:
        model: a model without memory for its parameters.
        layers: its decoder layers, which must be equal.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, layers: list[nn.Module]) -> None:
        self._model, self._num_layers = model, len(layers)
        self._last_layer = next(name for name, each in model.named_modules() if each is layers[-1])
        self._eager = functools.cache(self._count_eager)
        self._saved_if_compiled = functools.cache(self._count_compiled)

    def count(self, work: RankWorkload) -> Activations:
        """Return the activations of the largest micro-batch.

        A compiled layer saves less, because `torch.compile` recomputes elementwise operations in the backward pass. To
        count it, all compiled functions of the process are dropped (`torch.compiler.reset`).

        Raises:
            UserError: the model does not run without data.
        """
        window = getattr(self._model.config.get_text_config(), "sliding_window", None) or math.inf
        # beyond a sliding window, transformers gives sdpa a mask
        attention: Attention = "masked" if work.attention == "causal" and work.row_tokens > window else work.attention
        settings = (attention, work.compute_bytes)
        try:
            found = self._eager(work.rows, work.row_tokens, *settings)
            if work.compiled:
                row_tokens = work.row_tokens if attention in QUADRATIC else COMPILED_TOKENS
                saved = self._saved_if_compiled(row_tokens, *settings)
                found = replace(found, layer=saved * work.tokens // (COMPILED_ROWS * row_tokens))
        except Exception as error:  # architectures fail in different ways
            raise UserError(
                f"the planner cannot run {self._model.config.model_type} without data ({first_line_of(error)}); "
                f"{SEE_SUPPORTED}"
            ) from error
        return found

    def _count_eager(self, rows: int, row_tokens: int, attention: Attention, compute_bytes: int) -> Activations:
        run = ModelRun(self._model, self._last_layer, attention, DTYPES[compute_bytes], rows, row_tokens)
        layer = run.saved_by_layer(run.layer)
        mask = rows * row_tokens**2 if attention == "masked" else 0  # a byte per pair of tokens
        others = run.saved_by_model() - self._num_layers * layer + mask
        return Activations(layer, others, run.backward_of_layer())

    def _count_compiled(self, row_tokens: int, attention: Attention, compute_bytes: int) -> int:
        """Return the bytes that a compiled layer saves of `COMPILED_ROWS` rows."""
        run = ModelRun(self._model, self._last_layer, attention, DTYPES[compute_bytes], COMPILED_ROWS, row_tokens)
        torch.compiler.reset()  # after several compilations of one function, torch runs it eagerly
        return run.saved_by_layer(torch.compile(run.layer, backend="aot_eager_decomp_partition", dynamic=True))


class ModelRun:
    """A copy of a model, with inputs that have shapes only.

    Args:
        model: the model.
        layer: name of the decoder layer that runs alone.
        attention: the attention kernel.
        dtype: dtype of the forward pass.
        rows: rows of the micro-batch.
        row_tokens: tokens per row.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        layer: str,
        attention: Attention,
        dtype: torch.dtype,
        rows: int,
        row_tokens: int,
    ) -> None:
        model = copy.deepcopy(model).to(device="meta", dtype=dtype).eval()  # without dropout, as in training
        self.layer = model.get_submodule(layer)
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        base.set_attn_implementation(IMPLEMENTATIONS[attention])
        self._decoder, self._output = base.get_decoder(), base.get_output_embeddings()
        self._hidden = torch.empty(rows, row_tokens, base.config.hidden_size, dtype=dtype, device="meta")
        self._arguments = {
            "inputs_embeds": self._hidden,
            "attention_mask": self._hidden.new_empty(1, 1, row_tokens, row_tokens),
            "position_ids": torch.empty(rows, row_tokens, dtype=torch.long, device="meta"),
            "use_cache": False,
        }
        self._shared: dict[str, Any] = {}  # arguments that all layers share, such as the rotary embedding
        handle = self.layer.register_forward_pre_hook(
            lambda _, positional, named: self._shared.update(named), with_kwargs=True
        )
        with torch.no_grad():
            self._decoder(**self._arguments)
        handle.remove()
        tensors = [each for each in tree_leaves(self._shared) if torch.is_tensor(each)]
        self._of_model = {storage_id(each) for each in (*model.parameters(), *model.buffers())}
        self._of_others = self._of_model | {storage_id(each) for each in tensors}

    def saved_by_model(self) -> int:
        """Bytes that all layers, the last norm and the output projection save in the forward pass."""
        of_decoder = saved_bytes(
            lambda: self._decoder(**self._arguments | {"inputs_embeds": self._new_hidden()}), self._of_model
        )
        return of_decoder + (self._hidden.nbytes if self._output.weight.requires_grad else 0)

    def saved_by_layer(self, layer: Callable[..., Any]) -> int:
        """Bytes that the layer saves in the forward pass, or its compiled version."""
        return saved_bytes(lambda: layer(self._new_hidden(), **self._shared), self._of_others)

    def backward_of_layer(self) -> int:
        """Maximum bytes of the backward pass of the layer, beyond what its forward pass has saved."""
        live = LiveTensors(without=self._of_others)
        with live:
            [hidden] = [
                each for each in tree_leaves(self.layer(self._new_hidden(), **self._shared)) if torch.is_tensor(each)
            ]
            saved = live.num_bytes
            gradient = torch.empty_like(hidden)
            live.peak_bytes = 0
            hidden.backward(gradient)
        return live.peak_bytes - saved

    def _new_hidden(self) -> torch.Tensor:
        """Return hidden states that nothing but the graph holds."""
        return torch.empty_like(self._hidden).requires_grad_() * 1


# Counting


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors on the same memory share."""
    return tensor.untyped_storage()._cdata


def saved_bytes(forward: Callable[[], Any], without: set[int]) -> int:
    """Return the bytes that autograd saves in a forward pass, except in the given storages."""
    sizes: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if storage_id(tensor) not in without:
            sizes[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        result = forward()
    del result  # until here, it keeps saved tensors alive, so that no storage is counted as another
    return sum(sizes.values())


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that operators create, until they are freed.

    Args:
        without: storages that are not counted.

    Attributes:
        num_bytes: bytes at present.
        peak_bytes: their maximum.
    """

    def __init__(self, without: set[int]) -> None:
        super().__init__()
        self._sizes = dict.fromkeys(without, 0)
        self.num_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count its results."""
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if torch.is_tensor(each) and storage_id(each) not in self._sizes:
                self._add(each.untyped_storage())
        return results

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self.num_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, identity: int) -> None:
        self.num_bytes -= self._sizes.pop(identity)


# Attention


@torch.library.custom_op("verl_ext::attention", mutates_args=())
def attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, extra_bytes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the logarithm of the softmax's denominator, and `extra_bytes` that are saved as well.

    It has no kernel, because it gets tensors without data. It is an operator, because torch.compile would not save what
    a function allocates.
    """
    raise NotImplementedError("only tensors without data have attention here")


@torch.library.custom_op("verl_ext::attention_backward", mutates_args=())
def attention_backward(
    gradient: torch.Tensor, saved: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        gradient: gradient of the output.
        saved: inputs and outputs of `attention_forward`.
    """
    raise NotImplementedError("only tensors without data have attention here")


@attention_forward.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, extra_bytes: int) -> tuple[torch.Tensor, ...]:
    denominator = query.new_empty(query.shape[:3], dtype=torch.float32)
    output = torch.empty_like(query[..., : value.shape[-1]])  # with the strides of the queries, as in kernels
    return output, denominator, query.new_empty(extra_bytes, dtype=torch.uint8)


@attention_backward.register_fake
def _(gradient: torch.Tensor, saved: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(each) for each in saved[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)


def _backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    return *attention_backward(gradient, list(ctx.saved_tensors)), None


attention_forward.register_autograd(_backward, setup_context=_save)


def attend(
    attention: Attention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, without data.

    sdpa accepts grouped keys and values only without a mask; otherwise, transformers repeats them for every head. It
    converts the mask to numbers in every layer and saves them. It runs packed samples one by one, and the concatenated
    results are saved once more.
    """
    batch, heads, tokens, width = query.shape
    extra = 0
    if attention == "masked":
        key, value = (repeat_kv(each, heads // each.shape[1]) for each in (key, value))
        extra = query.element_size() * batch * tokens * tokens
    if attention == "packed":
        extra = query.element_size() * batch * tokens * heads * width
    return attention_forward(query, key, value, extra)[0].transpose(1, 2).contiguous(), None


IMPLEMENTATIONS: dict[Attention, str] = {
    "flash": "verl_ext_plain",
    "causal": "verl_ext_plain",
    "masked": "verl_ext_masked",
    "packed": "verl_ext_packed",
    "eager": "eager",
}
"""Names by which transformers finds an attention function. It looks for a library if a name contains `flash`."""
for kernel in ("causal", "masked", "packed"):
    AttentionInterface.register(IMPLEMENTATIONS[kernel], functools.partial(attend, kernel))
