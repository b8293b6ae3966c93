"""Run by torchrun: after each update both engines sample, and every token is compared with the trained model.

Arguments: directory of the models, their names with commas between them, file for the results.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.grpo_reference import ENGINE_STEPS
from tests.helpers.trainer import sharded
from verl_ext.errors import STOP_SIGNALS, UserError
from verl_ext.grpo.config import RolloutConfig
from verl_ext.grpo.hf_engine import HFEngine
from verl_ext.grpo.sampling import Completion, RolloutEngine, SampleRequest, SamplingArgs
from verl_ext.grpo.vllm_engine import TensorParallelGroup, VLLMRolloutEngine, WeightSync
from verl_ext.processes import StopSignals
from verl_ext.trainer.preemption import StopVote

LENGTHS = (150, 20, 7, 133)
"""Of prompts, with two samples each; a block of vLLM's cache has 32 tokens."""
BUCKET_BYTES = 200_000
END = 2
ROLLOUT = RolloutConfig(dtype="float32", max_num_seqs=64)


def build(directory: Path, kind: str) -> Any:
    """The model of a directory, sharded over the ranks; `lora` has adapters with weights that are not zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    if kind == "lora":
        adapters = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapters))
    return sharded(model)


def error_of(model: Any, request: SampleRequest, completion: Completion, temperature: float) -> float:
    """Largest error of a token's log-probability; infinite where a greedy token is not the model's most likely one."""
    tokens = torch.tensor(completion.token_ids)
    with torch.no_grad():
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    if temperature == 0 and not torch.equal(logits.argmax(-1), tokens):
        return float("inf")
    log_probs = (logits / (temperature or 1)).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return float((log_probs - completion.log_probs).abs().max())


def main(directory: Path, kinds: str, output: Path) -> None:
    """Write the results of each kind of model, from all ranks."""
    dist.init_process_group("gloo")
    results = {kind: results_of(directory / kind, kind) for kind in kinds.split(",")}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(everyone))
    dist.barrier()
    os._exit(0)


def results_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    """For each step the largest error of each engine and temperature, and whether samples repeat."""
    model = build(directory, kind)
    vllm = VLLMRolloutEngine(ROLLOUT, str(directory), max_model_len=256, end_tokens=[END], trust_remote_code=False)
    vllm.weight_sync = WeightSync(model, torch.float32, "cpu", BUCKET_BYTES)
    hf = HFEngine(model, 0, [END], 3, nullcontext)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    prompts = [tuple(torch.randint(5, 400, (n,), generator=generator).tolist()) for n in LENGTHS]
    requests = [SampleRequest(prompt, seed * len(prompt)) for seed in (1, 2) for prompt in prompts]
    together, own = TensorParallelGroup.build(dist.get_world_size()).gather_requests(requests[dist.get_rank() :])
    assert len(together) == 2 * len(requests) - 1 and together[own.start : own.stop] == requests[dist.get_rank() :]
    results = []
    for step in range(ENGINE_STEPS):
        vllm.sync_weights(step)
        result: dict[str, Any] = {"buckets": len(list(vllm.weight_sync.buckets()))}
        for temperature in (0.0, 0.8):
            sampling, tokens = SamplingArgs(temperature, 1.0, -1, 12), {}
            for name, engine in (("vllm", vllm), ("hf", hf)):
                found = dict(engine.generate(requests, sampling))
                tokens[name] = [found[n].token_ids for n in range(len(requests))]
                errors = [error_of(model, request, found[n], temperature) for n, request in enumerate(requests)]
                result[f"{name} {temperature}"] = max(errors)
                if step == 0:
                    again = dict(engine.generate(requests[::-1], sampling))
                    result[f"{name} {temperature} repeats"] = all(
                        found[n].token_ids == again[len(requests) - 1 - n].token_ids for n in found
                    )
            if step == 0:
                # rank 0 has nothing to sample, as in a measurement of fewer prompts than ranks
                alone = dict(hf.generate(requests if dist.get_rank() else [], sampling))
                result[f"alone {temperature}"] = all(tokens["hf"][n] == alone[n].token_ids for n in alone)
            result[f"same {temperature}"] = sum(a == b for a, b in zip(tokens["vllm"], tokens["hf"]))
            result[f"different {temperature}"] = len({*tokens["vllm"]})
        results.append(result)
        ids = torch.randint(5, 400, (2, 30), generator=generator)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    results[-1]["answers after interruption"] = {
        name: answers_after_interruption(engine, requests) for name, engine in (("vllm", vllm), ("hf", hf))
    }
    results[-1]["finds non-finite"] = finds_non_finite_logits(vllm, requests)
    vllm.close()
    return results


def answers_after_interruption(engine: RolloutEngine, requests: list[SampleRequest]) -> int:
    """Number of completions of up to 100 tokens if rank 1 gets a signal."""
    signals = StopSignals(STOP_SIGNALS)
    vote = StopVote(signals, None)
    engine.is_interrupted = vote.is_interrupted
    with vote.validation():
        if dist.get_rank() == 1:
            signals.received.append(STOP_SIGNALS[0])
            assert vote.is_interrupted()
        dist.barrier()
        count = len(dict(engine.generate(requests, SamplingArgs(0.0, 1.0, -1, 100))))
        assert vote.is_interrupted()
    del engine.is_interrupted
    return count


def finds_non_finite_logits(engine: VLLMRolloutEngine, requests: list[SampleRequest]) -> bool:
    """Whether the engine reports weights that are not finite."""
    for bucket in engine.weight_sync.buckets():
        engine.load_weights([(name, torch.full_like(tensor, float("nan"))) for name, tensor in bucket])
    engine.finish_weight_sync()
    try:
        next(engine.generate(requests, SamplingArgs(1.0, 1.0, -1, 2)))
    except UserError as error:
        return "not finite" in str(error)
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
