"""vLLM inside each rank; it receives the trained weights before it generates. This module imports vLLM lazily."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import PreTrainedModel

from verl_ext.checkpoint.hf_tensors import ExportedTensor, exported_tensors, merge_rows
from verl_ext.distributed import is_failure_of_peer, is_sharded, on_rank_zero, shard_rows, to_full, to_local
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import format_bytes
from verl_ext.grpo.config import RolloutConfig
from verl_ext.grpo.sampling import Completion, RolloutEngine, SampleRequest, SamplingArgs, require_finite
from verl_ext.model_files import config_of
from verl_ext.vllm_setup import (
    auto_dtype_on_gpu,
    is_memory_error,
    prepare_vllm_environment,
    require_vllm_arguments,
    safe_vllm_arguments,
    small_model_arguments,
)

Bucket = list[tuple[str, torch.Tensor]]
STEPS_PER_LOOK = 16
"""Engine steps between two looks at signals, for which ranks that share an engine wait for each other."""
SETUP_TIMEOUT_S = 600
"""Time in which all ranks must have loaded vLLM; its default of half an hour would hide a rank that hangs."""


@dataclass(frozen=True)
class TensorParallelGroup:
    """Ranks that share one engine; each rank runs the requests of all of them.

    Attributes:
        group: torch process group; None for a rank with its own engine.
    """

    group: dist.ProcessGroup | None = None

    @staticmethod
    def build(size: int) -> TensorParallelGroup:
        """This rank's group of consecutive ranks, as vLLM's external launcher groups them; collective."""
        if size == 1:
            return TensorParallelGroup()
        group, _ = dist.new_subgroups(size)
        return TensorParallelGroup(group)

    def gather_requests(self, requests: Sequence[SampleRequest]) -> tuple[list[SampleRequest], range]:
        """Return the requests of the group in rank order, and the indices of this rank's requests."""
        if self.group is None:
            return list(requests), range(len(requests))
        everyone: list[list[SampleRequest]] = [[] for _ in range(self.group.size())]
        dist.all_gather_object(everyone, list(requests), group=self.group)
        start = sum(map(len, everyone[: self.group.rank()]))
        return [request for share in everyone for request in share], range(start, start + len(requests))


class VLLMRolloutEngine(RolloutEngine):
    """A vLLM engine in this rank's process.

    Attributes:
        weight_sync: sends the weights, which are random until the first `sync_weights`. It needs the engine's `dtype`,
            so it is set after the engine is built.
    """

    dtype: torch.dtype
    weight_sync: WeightSync

    def __init__(
        self,
        rollout: RolloutConfig,
        model: str,
        *,
        max_model_len: int,
        end_tokens: list[int],
        trust_remote_code: bool,
    ) -> None:
        """Build the engine with random weights; collective, and needs the process group.

        Args:
            rollout: the configuration of generation.
            model: directory with the model's configuration; no weights are read from it.
            max_model_len: maximum length of prompt and completion together, in tokens.
            end_tokens: tokens that end a completion.
            trust_remote_code: whether the model's own code may run.

        Raises:
            UserError: vLLM is not installed, a GPU has too little free memory, or vLLM refuses the model or the
                configuration.
        """
        on_gpu = prepare_vllm_environment() != "cpu"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM 0.32's default on GPUs takes other logits processors
        try:
            from vllm import LLM

            from verl_ext.grpo.vllm_sampling import SeededLogitsProcessor, sampling_params
        except ImportError as error:
            raise UserError(
                f"rollout.engine=vllm needs vLLM, which cannot be imported ({first_line_of(error)}); install it, or "
                "set rollout.engine=hf"
            ) from error
        rollout.check_device(on_gpu)
        self._releases_memory = rollout.free_cache_engine and on_gpu
        self._version: int | None = None
        self._end_tokens, self._sampling_params = end_tokens, sampling_params
        if on_gpu:
            require_free_memory(rollout.gpu_memory_utilization)
        try:
            small = small_model_arguments(config_of(model), max_model_len, rollout.max_num_seqs) if on_gpu else {}
            require_vllm_arguments(rollout.vllm, "rollout.vllm")
            arguments = _arguments(rollout, on_gpu, self._releases_memory, small)
            arguments |= {
                "model": model,
                "max_model_len": max_model_len,
                "trust_remote_code": trust_remote_code,
                "logits_processors": [SeededLogitsProcessor],
            }
            self._llm = LLM(**safe_vllm_arguments(arguments))
            self._engine = self._llm.llm_engine
            self.dtype = self._engine.vllm_config.model_config.dtype
            self._tp_group = TensorParallelGroup.build(rollout.tensor_model_parallel_size)
            self._llm.apply_model(leave_to_trainer)
            # some kernels refuse a model only here
            list(self.generate([SampleRequest((0,), 0)], SamplingArgs(0.0, 1.0, -1, 2)))
        except UserError:
            raise
        except Exception as error:  # vLLM and transformers share no exception type
            if is_failure_of_peer(error):
                raise
            raise UserError(f"vLLM cannot use {model} ({first_line_of(error)}); {remedy_of(error)}") from error
        (self._missing,) = self._llm.apply_model(lambda model: {name for name, _ in model.named_parameters()})
        self._packs, self._is_reloading = not on_gpu, False  # on CPUs vLLM computes with packed copies of weights

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingArgs) -> Iterator[tuple[int, Completion]]:
        """Ranks that share an engine begin and end together."""
        requests, own = self._tp_group.gather_requests(requests)
        try:
            for index, request in enumerate(requests):
                prompt = {"prompt_token_ids": list(request.prompt_ids)}
                self._engine.add_request(str(index), prompt, self._sampling_params(request, sampling, self._end_tokens))
            for number in count():
                if not self._engine.has_unfinished_requests():
                    break
                if number % STEPS_PER_LOOK == 0 and self.is_interrupted(self._tp_group.group):
                    break
                for output in self._engine.step():
                    if output.finished and int(output.request_id) in own:
                        yield int(output.request_id) - own.start, _completion(output.outputs[0])
        finally:
            self._engine.abort_request([str(index) for index in range(len(requests))])

    def sync_weights(self, version: int) -> dict[str, float]:
        started, num_bytes = time.perf_counter(), 0
        if self._releases_memory:
            torch.cuda.empty_cache()  # vLLM cannot use memory that torch caches
            self._llm.wake_up()
        if self._version != version:
            num_bytes = self.weight_sync.num_bytes
            for bucket in self.weight_sync.buckets():
                self.load_weights(bucket)
            self.finish_weight_sync()
        self._version = version
        return {
            "weights/sync_s": time.perf_counter() - started,
            "weights/bytes": float(num_bytes),
            "weights/version": float(version),
        }

    def load_weights(self, bucket: Bucket) -> None:
        """Load some full tensors by their names in the exported model."""
        if self._packs and not self._is_reloading:
            self._llm.apply_model(_begin_reload)
            self._is_reloading = True
        for loaded in self._llm.apply_model(lambda model: set(model.load_weights(iter(bucket)))):
            self._missing -= loaded

    def finish_weight_sync(self) -> None:
        """End a weight sync, and invalidate everything computed with the old weights.

        Raises:
            UserError: the engine did not receive all of its weights.
        """
        if self._is_reloading:
            (stale,) = self._llm.apply_model(lambda model: _end_reload(model, self._engine.vllm_config.model_config))
            self._is_reloading = False
            if stale:
                raise UserError(
                    f"vLLM's class for this model does not update the weights of {', '.join(stale[:3])} on CPUs; set "
                    "rollout.engine=hf"
                )
        elif not self._packs:
            self._llm.apply_model(lambda model: process_attention_weights(model, self.dtype))
        # a model class whose names do not match would generate with random weights
        if self._missing:
            raise UserError(
                f"vLLM's class for this model did not receive its weights {', '.join(sorted(self._missing)[:3])}; set "
                "rollout.engine=hf"
            )
        self._engine.reset_prefix_cache()  # cached blocks of prompts are from the old weights

    def release_memory(self) -> None:
        if self._releases_memory:
            self._llm.sleep(level=2)  # discards the weights; the next sync sends them again
            self._version = None

    def close(self) -> None:
        """Free the engine's memory without vLLM's shutdown.

        vLLM's own shutdown, including the one at process exit, would destroy the trainer's process group. A sleeping
        engine has released its memory, which a shutdown would release again.
        """
        self._engine.engine_core._finalizer.detach()
        if not self._releases_memory:
            self._engine.model_executor.shutdown()


def require_free_memory(utilization: float) -> None:
    """Check on every rank that its GPU has the memory that vLLM will use; collective.

    vLLM checks this, too, but rank by rank, while the others wait.

    Args:
        utilization: vLLM's share of the GPU's memory.

    Raises:
        UserError: on all ranks, if one GPU has too little free memory.
    """
    torch.cuda.empty_cache()  # vLLM cannot use memory that torch caches
    everyone = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(everyone, torch.cuda.mem_get_info())
    for rank, (free, total) in enumerate(everyone):
        if free < utilization * total:
            fitting = math.floor(100 * free / total) / 100
            lower = f", or set rollout.gpu_memory_utilization to {fitting} or less" if fitting else ""
            raise UserError(
                f"the GPU of rank {rank} has {format_bytes(free)} of {format_bytes(total)} free, but "
                f"rollout.gpu_memory_utilization={utilization} needs {format_bytes(math.ceil(utilization * total))}; "
                f"end other processes on the GPU{lower}"
            )


def remedy_of(error: Exception) -> str:
    """Return the advice for an error at the start of vLLM."""
    if not is_memory_error(error):
        return "set rollout.engine=hf"
    return (
        "raise rollout.gpu_memory_utilization if vLLM needs more memory, lower it if the GPU has none left, or lower "
        "rollout.max_num_seqs or data.max_response_length"
        if torch.cuda.is_available()
        else "end other processes, or use fewer ranks"
    )


def leave_to_trainer(model: torch.nn.Module) -> None:
    """Keep the trainer's model callable.

    A model without a vLLM class runs as transformers' class. vLLM patches that class for torch.compile, and it then
    expects an attribute on every instance.
    """
    for module in model.modules():
        if "do_not_compile" in vars(module):
            kind: Any = type(module)
            kind.do_not_compile = True


def process_attention_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute what attention layers derive from weights, such as the projections of multi-head latent attention."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    attention: list[Any] = [module for module in model.modules() if is_deferred_attention_layer(module)]
    with torch.no_grad():
        for layer in attention:
            layer.process_weights_after_loading(dtype)


def _begin_reload(model: torch.nn.Module) -> None:
    """Let vLLM collect weights until a layer is complete, then load and pack the layer as at startup.

    vLLM packs experts only if they have no kernel yet; otherwise it copies unpacked weights over packed ones.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _end_reload(model: torch.nn.Module, config: Any) -> list[str]:
    """Load the remaining layers, and repack tied heads, which receive no weights directly.

    Returns:
        Modules that keep their old weights: some model classes copy weights without the loaders that vLLM tracks.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    stale = [
        name
        for name, module in model.named_modules()
        if not isinstance(module, VocabParallelEmbedding)
        and any(True for _ in module.parameters(recurse=False))
        and (info := get_layerwise_info(module)).can_load()
        and not info.load_numel
    ]
    finalize_layerwise_reload(model, config)
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
    return stale


def _arguments(rollout: RolloutConfig, on_gpu: bool, releases_memory: bool, small: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "enforce_eager": not on_gpu,
        **small,
        "seed": 0,
        "max_num_seqs": rollout.max_num_seqs,
        "use_tqdm_on_load": False,
        # the samples of a group share only full blocks, which have 128 tokens on CPUs by default
        "block_size": None if on_gpu else 32,
        # FlashInfer's kernels, the default on Blackwell, reorder the experts' weights at startup only
        "moe_backend": "triton" if on_gpu else "auto",
        **rollout.vllm,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": pick_rollout_dtype(rollout.dtype, on_gpu),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        # uses the GPU of LOCAL_RANK; the default executor would put every rank's engine on the first GPU
        "distributed_executor_backend": "external_launcher" if on_gpu else None,
        "enable_sleep_mode": releases_memory,
        "logprobs_mode": "processed_logits",
        "async_scheduling": False,  # samples a token before the previous one is known
        "cpu_distributed_timeout_seconds": SETUP_TIMEOUT_S if on_gpu else None,
    }


def pick_rollout_dtype(wanted: str, on_gpu: bool) -> str:
    """Return the dtype of vLLM's weights; the setting `auto` is float32 on CPUs, where the trainer uses it, too.

    On a CPU with bfloat16 units, vLLM 0.12's log-probabilities of SmolLM2-135M in bfloat16 were off by 0.12 on
    average: four times the error of transformers in bfloat16, at the same speed.
    """
    if wanted != "auto":
        return wanted
    return auto_dtype_on_gpu() if on_gpu else "float32"


def _completion(output: Any) -> Completion:
    tokens = tuple(output.token_ids)
    log_probs = torch.tensor([step[token].logprob for step, token in zip(output.logprobs, tokens)])
    require_finite(log_probs, "set rollout.dtype=bfloat16 or float32, or check its weights")
    return Completion(tokens, log_probs, truncated=output.finish_reason == "length")


# The trained weights: sharded parameters to full tensors, bucket by bucket


@dataclass(frozen=True)
class _Slot:
    """A tensor's slice of the flat tensor that each rank sends.

    Attributes:
        weights: exported tensors that are built from it.
        shape: shape of the full tensor.
        dtype: dtype in which it is sent.
        rows_per_rank: rows per rank; the last ranks may have fewer.
    """

    weights: list[ExportedTensor]
    shape: torch.Size
    dtype: torch.dtype
    rows_per_rank: int

    @property
    def numel(self) -> int:
        """Elements of one rank's slice, with padding."""
        return self.rows_per_rank * self.shape[1:].numel() if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def exported(self, whole: torch.Tensor) -> Bucket:
        """Build the exported tensors from the full tensor."""
        return [(weight.name, weight.of_rows(whole, 0)[1].reshape(weight.shape(self.shape))) for weight in self.weights]


class WeightSync:
    """Gathers a sharded model's weights as they are exported: LoRA adapters merged, tied tensors once."""

    def __init__(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype, device: str, bucket_bytes: int) -> None:
        """Plan the buckets; collective.

        Args:
            model: the model, as FSDP2 modules over all ranks.
            dtype: dtype in which tensors are sent; integers keep theirs.
            device: device of the tensors that are sent.
            bucket_bytes: maximum size of a bucket, unless a single tensor is larger.
        """
        self._model, self._dtype, self._device = model, dtype, device
        self._num_ranks = dist.get_world_size()
        weights = on_rank_zero(lambda: exported_tensors(model))
        self._buckets = list(self._plan(weights, bucket_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes that an engine receives in a sync."""
        return sum(slot.num_bytes for bucket in self._buckets for slot in bucket)

    @torch.no_grad()
    def buckets(self) -> Iterator[Bucket]:
        """Yield names and full tensors; later buckets do not reuse their memory; collective."""
        state = self._model.state_dict()
        for slots in self._buckets:
            tensors = self._gather(slots, state) if self._num_ranks > 1 else self._own(slots, state)
            yield [named for slot, tensor in zip(slots, tensors) for named in slot.exported(tensor)]

    def _plan(self, weights: list[ExportedTensor], bucket_bytes: int) -> Iterator[list[_Slot]]:
        state, size = self._model.state_dict(), 0
        bucket: list[_Slot] = []
        for source, of_source in groupby(weights, key=lambda weight: weight.source):
            shape, dtype = state[source].shape, state[source].dtype
            rows_per_rank = -(-shape[0] // self._num_ranks) if shape else 1
            slot = _Slot(list(of_source), shape, self._dtype if dtype.is_floating_point else dtype, rows_per_rank)
            num_bytes = slot.numel * self._num_ranks * slot.dtype.itemsize
            if bucket and (size + num_bytes > bucket_bytes or slot.dtype != bucket[-1].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(slot)
            size += num_bytes
        yield bucket

    def _own(self, slots: list[_Slot], state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Copy as little as possible with a single rank."""
        return [self._own_rows(slot, state).to(self._device, slot.dtype) for slot in slots]

    def _gather(self, slots: list[_Slot], state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        dtype = slots[0].dtype
        own = torch.empty(sum(slot.numel for slot in slots), dtype=dtype, device=self._device)
        for slot, part in zip(slots, own.split([slot.numel for slot in slots])):
            rows = self._own_rows(slot, state)
            part[: rows.numel()].copy_(rows.reshape(-1))
        everyone = torch.empty(self._num_ranks, own.numel(), dtype=dtype, device=self._device)
        dist.all_gather_into_tensor(everyone.view(-1), own)
        parts = everyone.split([slot.numel for slot in slots], dim=1)
        return [part.reshape(-1)[: slot.shape.numel()].view(slot.shape) for slot, part in zip(slots, parts)]

    def _own_rows(self, slot: _Slot, state: dict[str, torch.Tensor]) -> torch.Tensor:
        weight = slot.weights[0]  # all share the tensor's adapter
        tensor, adapter = state[weight.source], weight.adapter
        if not tensor.shape:
            return to_local(tensor)
        start, end = shard_rows(tensor.shape[0], self._num_ranks, dist.get_rank())
        rows = to_local(tensor) if is_sharded(tensor) else to_local(tensor)[start:end]
        factors = {name: to_full(state[name]) for name in ((adapter.down, adapter.up) if adapter else ())}
        return merge_rows(adapter, rows, factors, start, end)
