"""References for GRPO: updates by the papers' formulas in float64, sample by sample, and rollouts of both engines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3MoeConfig

from tests.helpers.commands import torchrun
from verl_ext.grpo.config import TokenActorConfig, TokenLossConfig
from verl_ext.grpo.protocols import Prompt, Reward, Trajectory
from verl_ext.grpo.sampling import Completion, SamplingArgs

REFERENCE = 0.02
"""Distance of the frozen model from the trained one."""
ENGINE_STEPS = 2
"""Weights that `tests.ranks.engines` sends: the first ones, and those after an update."""
SAMPLING = SamplingArgs(0.9, 1.0, -1, 12)
NUM_PROMPTS, GROUP_SIZE = 4, 4


@dataclass(frozen=True)
class Case:
    """How a step updates the model from its rollouts."""

    actor: TokenActorConfig
    num_mini_batches: int = 1
    micro_batch_size: int = 3
    share_prompts: bool = True
    lr: float = 3.0
    keeps_gathered: bool = False
    packs: bool = False

    @staticmethod
    def of(fields: dict[str, Any]) -> Case:
        """Build a case from the output of `asdict`."""
        loss = TokenLossConfig(**fields["actor"]["policy_loss"])
        return Case(**{**fields, "actor": TokenActorConfig(**{**fields["actor"], "policy_loss": loss})})

    def fields(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def make_model(distance: float = 0.0) -> PreTrainedModel:
    """A small model whose probabilities are far from uniform.

    Args:
        distance: scale of the random change to its weights.
    """
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
        for parameter in model.parameters():
            parameter += distance * torch.randn_like(parameter)
    return model


def make_trajectories() -> list[Trajectory]:
    """Ragged completions with rewards, group after group; two groups, one on each of two ranks, have equal rewards."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 40, (count,), generator=generator).tolist())

    trajectories = []
    for group in range(NUM_PROMPTS):
        prompt = Prompt(f"p{group}", group, {"prompt_ids": tokens(4 + 3 * group)})
        for number in range(GROUP_SIZE):
            length = int(torch.randint(1, 12, (1,), generator=generator))
            completion = Completion(tokens(length), torch.zeros(length), False)
            trajectories.append(Trajectory(prompt, number).act(completion))
    rewards = torch.rand(len(trajectories), generator=generator).tolist()
    rewards[GROUP_SIZE : 3 * GROUP_SIZE] = [0.5] * GROUP_SIZE + [0.25] * GROUP_SIZE
    for trajectory, reward in zip(trajectories, rewards):
        trajectory.reward = Reward({"r": reward})
    return trajectories


def reference_update(case: Case) -> dict[str, torch.Tensor]:
    """The parameters after the updates, by plain gradient descent in float64."""
    model, frozen = make_model().double(), make_model(REFERENCE).double()
    trajectories = make_trajectories()
    advantages = _advantages([trajectory.total_reward or 0.0 for trajectory in trajectories])
    with torch.no_grad():
        old = [_evaluated(model, trajectory)[0] for trajectory in trajectories]
        reference = [_evaluated(frozen, trajectory)[0] for trajectory in trajectories]
    size = len(trajectories) // case.num_mini_batches
    for _ in range(case.actor.ppo_epochs):
        for start in range(0, len(trajectories), size):
            numbers = range(start, start + size)
            terms = [_terms(model, trajectories[n], old[n], reference[n], advantages[n], case.actor) for n in numbers]
            model.zero_grad()
            _aggregated(terms, case.actor).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= case.lr * parameter.grad
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _advantages(rewards: list[float]) -> list[float]:
    """Reward minus the group's mean, over its standard deviation (arXiv 2402.03300, section 4.1.2)."""
    found: list[float] = []
    for start in range(0, len(rewards), GROUP_SIZE):
        group = torch.tensor(rewards[start : start + GROUP_SIZE], dtype=torch.float64)
        flat = bool((group == group[0]).all())
        found += [0.0] * GROUP_SIZE if flat else ((group - group.mean()) / (group.std() + 1e-6)).tolist()
    return found


def _evaluated(model: PreTrainedModel, trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of each token, from a forward pass of this sample alone."""
    prompt, tokens = trajectory.prompt.fields["prompt_ids"], trajectory.action.token_ids
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def _terms(
    model: PreTrainedModel,
    trajectory: Trajectory,
    old: torch.Tensor,
    reference: torch.Tensor,
    advantage: float,
    actor: TokenActorConfig,
) -> torch.Tensor:
    """Each token's: clipped (arXiv 1707.06347) and dual-clipped (1912.09729) ratio, KL by k3 (2402.03300), entropy."""
    log_probs, entropy = _evaluated(model, trajectory)
    ratio = (log_probs - old).exp()
    gain = torch.minimum(
        ratio * advantage, ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high) * advantage
    )
    if advantage < 0:
        gain = gain.clamp(min=actor.clip_ratio_c * advantage)
    kl = (reference - log_probs).exp() - (reference - log_probs) - 1
    return -gain + actor.kl_loss_coef * actor.use_kl_loss * kl - actor.entropy_coeff * entropy


def _aggregated(terms: list[torch.Tensor], actor: TokenActorConfig) -> torch.Tensor:
    """`token-mean` is TRL's `dapo`, `seq-mean-token-mean` its `grpo`, `seq-mean-token-sum-norm` its `dr_grpo`."""
    if actor.loss_agg_mode == "token-mean":
        return torch.cat(terms).mean()
    if actor.loss_agg_mode == "seq-mean-token-mean":
        return torch.stack([term.mean() for term in terms]).mean()
    sums = torch.stack([term.sum() for term in terms]).mean()
    return sums if actor.loss_agg_mode == "seq-mean-token-sum" else sums / actor.loss_scale_factor


def write_engine_models(quickstart: Path, directory: Path) -> None:
    """Configurations of the models of each kind of update, in a directory each."""
    plain = AutoConfig.from_pretrained(quickstart / "model")
    sizes = {name: getattr(plain, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
    heads = {"num_attention_heads": plain.num_attention_heads, "num_key_value_heads": plain.num_key_value_heads}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32}
    dense = {"intermediate_size": plain.intermediate_size, "head_dim": 32, "tie_word_embeddings": True}
    configs = {
        "experts": Qwen3MoeConfig(**sizes, **heads, **experts, architectures=["Qwen3MoeForCausalLM"]),
        "plain": plain,
        "tied": Qwen3Config(**sizes, **heads, **dense, architectures=["Qwen3ForCausalLM"]),
        "lora": plain,
    }
    for kind, config in configs.items():
        config.save_pretrained(directory / kind)


def assert_engines_follow_weights(quickstart: Path, directory: Path, kinds: list[str]) -> None:
    """Check on two ranks that after each update, sampled tokens have the updated model's probabilities.

    Both engines sample the same tokens, on prompts of several cache blocks, from weights of several buckets.

    Args:
        quickstart: directory of the `quickstart` fixture.
        directory: an empty one to write to.
        kinds: keys of `configs` above; experts come first, since the first engine of a process decides whether vLLM
            has a group for experts.
    """
    write_engine_models(quickstart, directory)
    output = directory / "results.json"
    torchrun(2, "tests.ranks.engines", directory, ",".join(kinds), output)
    of_ranks = json.loads(output.read_text())
    assert len(of_ranks) == 2
    for of_kinds in of_ranks:
        assert list(of_kinds) == kinds
        for kind, results in of_kinds.items():
            assert len(results) == ENGINE_STEPS
            assert set(results[-1]["answers after interruption"].values()) == {0}, kind
            assert results[0]["alone 0.0"] and results[0]["alone 0.8"] and results[-1]["finds non-finite"], kind
            for result in results:
                assert result["buckets"] > 2, kind
                for engine in ("vllm", "hf"):
                    for temperature in (0.0, 0.8):
                        assert result[f"{engine} {temperature}"] < 1e-4, (kind, result)
                        assert results[0][f"{engine} {temperature} repeats"], (kind, results[0])
                # the engines use the same random numbers, and their probabilities differ by rounding only
                assert result["same 0.0"] == result["same 0.8"] == 8, (kind, result)
                assert result["different 0.8"] > 4, "samples of one prompt share a seed"
