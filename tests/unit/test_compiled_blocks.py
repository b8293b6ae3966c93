"""`model.compile`: compiled blocks handle any length, compute the same values, and know all other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen2Config

from verl_ext.data.batching import pack
from verl_ext.trainer.config import FSDPConfig
from verl_ext.trainer.fsdp import shard
from verl_ext.trainer.fused_cross_entropy import TokenLoss
from verl_ext.trainer.model import compile_blocks
from verl_ext.trainer.packed_attention import PACKED_SDPA

LENGTHS = ((5, 9), (17, 3, 8), (31,), (12, 26), (7, 7, 7, 7), (40,))


def small_model(attention: str = PACKED_SDPA) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=97, num_hidden_layers=3, max_position_embeddings=64, **shape)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().train()


def sample_of(length: int) -> dict:
    tokens = torch.randint(1, 97, (length,), generator=torch.Generator().manual_seed(length))
    return {"input_ids": tokens, "loss_mask": torch.ones(length, dtype=torch.long), "row": 0}


def loss_and_gradients(model: nn.Module, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Loss and gradients on samples of these lengths, packed into one row."""
    loss = TokenLoss(model, None, torch.float32, "cpu")(pack([sample_of(length) for length in lengths]))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_compiled_blocks_equal_eager_blocks() -> None:
    plain, compiled = small_model(), small_model()
    compile_blocks(compiled)
    torch._dynamo.reset()
    counters.clear()
    num_graphs = []
    for lengths in LENGTHS:
        results = zip(loss_and_gradients(compiled, lengths), loss_and_gradients(plain, lengths), strict=True)
        assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in results)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 0 and len(set(num_graphs)) == 1, num_graphs  # compiled for the first row only


@pytest.mark.usefixtures("one_rank")
def test_sharded_blocks_have_dynamic_lengths_only() -> None:
    model = small_model("sdpa")
    compile_blocks(model)
    shard(model, FSDPConfig(), init_device_mesh("cpu", (1,)), torch.float32)
    torch._dynamo.reset()
    sizes: list[set[str]] = []

    def keep_sizes(graph: torch.fx.Graph) -> None:
        values = [node.meta.get("val") for node in graph.nodes]
        sizes.append({str(size) for value in values if isinstance(value, torch.Tensor) for size in value.shape})

    with inductor.patch(post_grad_custom_post_pass=keep_sizes):
        model(input_ids=torch.ones(1, 12, dtype=torch.long), use_cache=False)
    symbols = [{size for size in graph if not size.isdigit()} for graph in sizes]
    assert symbols and all(len(found) == 1 for found in symbols), symbols
