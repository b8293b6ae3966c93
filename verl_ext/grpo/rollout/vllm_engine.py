"""vLLM inside each rank, which is sent the trained weights before it draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl_ext.errors import UserError, first_line_of
from verl_ext.grpo.config import RolloutConfig
from verl_ext.grpo.rollout.completion import Completion, Draw, Sampling
from verl_ext.grpo.rollout.engine import WeightKeeper
from verl_ext.grpo.rollout.team import Team
from verl_ext.vllm_setup import prepare_vllm_environment, safe_vllm_arguments


class VllmRollout(WeightKeeper):
    """One engine in this rank's own process; the process group exists before it is built, on all ranks together."""

    def __init__(
        self,
        rollout: RolloutConfig,
        model: str,
        *,
        max_model_len: int,
        end_tokens: list[int],
        trust_remote_code: bool = False,
    ) -> None:
        """Build it with weights of no meaning.

        Args:
            rollout: the engine's rollout.
            model: directory with the model's configuration; no weights are read from it.
            max_model_len: longest prompt and completion together, tokens.
            end_tokens: any of them ends a completion.
            trust_remote_code: whether the model's own code may be run.

        Raises:
            UserError: vLLM is not installed, or does not take the model or the rollout.
        """
        on_gpu = prepare_vllm_environment() != "cpu"
        try:
            from vllm import LLM

            from verl_ext.grpo.rollout.vllm_choosing import Choosing, sampling_params
        except ImportError as error:
            raise UserError(
                f"rollout.engine=vllm needs vLLM, which cannot be imported ({first_line_of(error)}); install it, or "
                "take rollout.engine=hf"
            ) from error
        if rollout.tensor_model_parallel_size > 1 and not on_gpu:
            raise UserError("rollout.tensor_model_parallel_size above 1 needs GPUs; leave it at 1 on CPUs")
        self.forgets_in_sleep = rollout.free_cache_engine and on_gpu
        self.dtype = getattr(torch, pick_rollout_dtype(rollout.dtype, on_gpu))
        self._end_tokens, self._sampling_params = end_tokens, sampling_params
        try:
            arguments = _arguments(rollout, on_gpu, self.forgets_in_sleep)
            arguments |= {
                "model": model,
                "max_model_len": max_model_len,
                "trust_remote_code": trust_remote_code,
                "logits_processors": [Choosing],
            }
            self._llm = LLM(**safe_vllm_arguments(arguments))
            self._engine = self._llm.llm_engine
            self._team = Team.of(rollout.tensor_model_parallel_size)
            self._llm.apply_model(leave_to_trainer)
            list(self.draw([Draw((0,), 0)], Sampling(0.0, 1.0, -1, 2)))  # some kernels refuse a model only here
        except UserError:
            raise
        except Exception as error:  # vLLM and transformers have no exception in common
            raise UserError(f"vLLM cannot use {model} ({first_line_of(error)}); take rollout.engine=hf") from error
        self._missing = self._parameters()
        self._packs, self._is_reloading = not on_gpu, False  # on CPUs vLLM computes with packed copies of weights

    def draw(self, draws: Sequence[Draw], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """See `RolloutEngine.draw`; ranks that share an engine begin and end together."""
        draws, own = self._team.together(draws)
        try:
            for number, draw in enumerate(draws):
                prompt = {"prompt_token_ids": list(draw.prompt_ids)}
                self._engine.add_request(str(number), prompt, self._sampling_params(draw, sampling, self._end_tokens))
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished and int(output.request_id) in own:
                        yield int(output.request_id) - own.start, _completion(output.outputs[0])
        finally:
            self._engine.abort_request([str(number) for number in range(len(draws))])

    def load_bucket(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See `WeightKeeper.load_bucket`."""
        if self._packs and not self._is_reloading:
            self._llm.apply_model(_begin_reload)
            self._is_reloading = True
        for loaded in self._llm.apply_model(lambda model: set(model.load_weights(iter(weights)))):
            self._missing -= loaded

    def end_load(self) -> None:
        """See `WeightKeeper.end_load`."""
        if self._is_reloading:
            (stale,) = self._llm.apply_model(lambda model: _end_reload(model, self._engine.vllm_config.model_config))
            self._is_reloading = False
            if stale:
                raise UserError(
                    f"vLLM's class for this model keeps the old weights of {', '.join(stale[:3])} when new ones are "
                    "sent to a CPU; take rollout.engine=hf"
                )
        # by name once: a model class whose names do not fit would go on with weights of no meaning
        if self._missing:
            raise UserError(
                f"vLLM's class for this model was not given its weights {', '.join(sorted(self._missing)[:3])}; take "
                "rollout.engine=hf"
            )
        self._engine.reset_prefix_cache()  # else a prompt longer than a block is answered from the old weights

    def wake(self) -> None:
        """See `WeightKeeper.wake`."""
        if self.forgets_in_sleep:
            torch.cuda.empty_cache()  # what torch only keeps for later is not free for vLLM
            self._llm.wake_up()

    def sleep(self) -> None:
        """See `WeightKeeper.sleep`."""
        if self.forgets_in_sleep:
            self._llm.sleep(level=2)  # the weights are sent anew anyway

    def close(self) -> None:
        """See `RolloutEngine.close`.

        vLLM's own shutdown, also that at the end of the process, destroys the process group, which is the trainer's.
        """
        self._engine.engine_core._finalizer.detach()
        self._engine.model_executor.shutdown()

    def _parameters(self) -> set[str]:
        (names,) = {frozenset(names) for names in self._llm.apply_model(_names_of)}
        return set(names)


def leave_to_trainer(model: torch.nn.Module) -> None:
    """Have the trainer's model called as before.

    A model that vLLM has no class for runs as that of transformers. vLLM changes its class for torch.compile, which
    then expects an attribute of every instance.
    """
    for module in model.modules():
        if "do_not_compile" in vars(module):
            kind: Any = type(module)
            kind.do_not_compile = True


def _begin_reload(model: torch.nn.Module) -> None:
    """Have vLLM keep what is loaded until a layer is whole, and then load and pack the layer as at the start.

    It packs experts only with a new kernel; with the old one it copies unpacked weights over packed ones.
    """
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _end_reload(model: torch.nn.Module, config: Any) -> list[str]:
    """Load what is left; nothing is loaded into a tied head itself, so its packed copy is made again here.

    Returns:
        Modules that keep their old weights: some model classes copy weights past the loaders that vLLM waits for.
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


def _names_of(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _arguments(rollout: RolloutConfig, on_gpu: bool, sleeps: bool) -> dict[str, Any]:
    return {
        "enforce_eager": not on_gpu,
        "seed": 0,
        "max_num_seqs": rollout.max_num_seqs,
        "use_tqdm_on_load": False,
        # a group's prompts share whole blocks alone, and a CPU's are of 128 tokens unless told otherwise
        "block_size": None if on_gpu else 32,
        **rollout.vllm,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": pick_rollout_dtype(rollout.dtype, on_gpu),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        # it takes the GPU of LOCAL_RANK; the default executor would put every rank's engine on the first one
        "distributed_executor_backend": "external_launcher" if on_gpu else None,
        "enable_sleep_mode": sleeps,
        "logprobs_mode": "processed_logits",
        "async_scheduling": False,  # it would choose a token before it knows the last
    }


def pick_rollout_dtype(wanted: str, on_gpu: bool) -> str:
    """The number type of vLLM's weights; `auto` is float32 on every CPU, as the trainer computes there.

    In bfloat16 vLLM 0.12 on a CPU with units for it told log-probabilities of SmolLM2-135M that were off by 0.12 in the
    mean, four times as far as those of transformers in bfloat16, and took as long.
    """
    if wanted != "auto":
        return wanted
    return "bfloat16" if on_gpu else "float32"


def _completion(output: Any) -> Completion:
    tokens = tuple(output.token_ids)
    log_probs = [step[token].logprob for step, token in zip(output.logprobs, tokens)]
    return Completion(tokens, torch.tensor(log_probs), truncated=output.finish_reason == "length")
