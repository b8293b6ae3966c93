"""An adapter runs exactly the configured parts of a model, in each architecture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2Config
from transformers.cache_utils import LinearAttentionLayer

from benchmarks.adaptive_knobs import flop_counter
from tests.helpers import vlms
from verl_ext.controller.adapters import VLMAdapter, adapter_for
from verl_ext.controller.adapters.molmo import MolmoAdapter
from verl_ext.controller.execution import LatencyMeter
from verl_ext.controller.space import Configuration
from verl_ext.controller.vlm import load_adapter
from verl_ext.errors import UserError
from verl_ext.plugins import Plugin

MODELS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "qwen3_vl_moe": (vlms.qwen3_vl_moe, (1024, 4096, 16384)),
    "qwen2_5_vl": (vlms.qwen2_5_vl, (1024, 4096, 16384)),
    "qwen3_5": (vlms.qwen3_5, (1024, 4096, 16384)),
    "qwen3_5_moe": (partial(vlms.qwen3_5, experts=True), (1024, 4096, 16384)),
    "molmo": (vlms.molmo, (3, 6, 12)),
    "idefics3": (vlms.idefics3, (32, 64, 128)),
}
OWN = {
    "idefics3": Plugin.parse("examples/new_adapter/idefics3.py:Idefics3Adapter", "--adapter"),
}
"""Example adapters, as a user names them."""
WITH_EXPERTS = ["qwen3_vl_moe", "qwen3_5_moe", "molmo"]
QUESTION = "what is the number ?"


def make(name: str) -> VLMAdapter:
    build, sizes = MODELS[name]
    return adapter_for(*build(), sizes, OWN.get(name))


def configuration_of(
    adapter: VLMAdapter, blocks: str = "1111", topk: int | None = None, tier: int = 2
) -> Configuration:
    choices = (1, 2, adapter.trained_topk) if adapter.trained_topk else ()
    return adapter.space(1, 4, choices).configuration(tier, [each == "1" for each in blocks], topk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_molmo_with_own_code_for_transformers_4_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    model = vlms.write_molmo(tmp_path / "molmo").to(dtype)
    torch.backends.cuda.enable_cudnn_sdp(True)
    loaded = load_adapter(str(tmp_path / "molmo"), (3, 6, 12), dtype=dtype, trust_remote_code=True)
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "latencies would differ from those of training"
    assert type(loaded.model).__name__ == "Molmo", "the checkpoint's own class"
    expected = MolmoAdapter(model, vlms.StandInProcessor(), (3, 6, 12))
    assert torch.equal(logits_of(loaded), logits_of(expected))


def logits_of(adapter: VLMAdapter, tier: int = 2) -> torch.Tensor:
    with torch.no_grad():
        return adapter.prefill(adapter.inputs(image(), QUESTION, tier)).logits


def image(side: int = 192) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8))


@pytest.fixture(scope="module", params=MODELS)
def adapter(request: pytest.FixtureRequest) -> VLMAdapter:
    return make(request.param)


def test_full_configuration_equals_released_model_bitwise(adapter: VLMAdapter) -> None:
    plain = logits_of(adapter)
    with adapter.configured(configuration_of(adapter)):
        assert torch.equal(logits_of(adapter), plain)


@pytest.mark.parametrize("blocks", ["1011", "1000", "1101"])
def test_skipping_blocks_equals_model_without_them(adapter: VLMAdapter, blocks: str) -> None:
    """Decoding is included; the reference computes the whole sequence at once, without a cache."""
    configuration = configuration_of(adapter, blocks)
    ran: list[int] = []
    hooks = [
        block.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, block in enumerate(adapter.blocks)
    ]
    inputs = adapter.inputs(image(), QUESTION, 0)
    with torch.no_grad(), adapter.configured(configuration):
        tokens = adapter.generate(inputs, 4, [])
        decoding = adapter.prefill(inputs)
        for token in tokens:
            decoding = adapter.decode(decoding, torch.tensor([[token]]))
        at_once = adapter.prefill(vlms.continued(inputs, tokens))
    for hook in hooks:
        hook.remove()
    assert set(ran) == {number for number, runs in enumerate(blocks) if runs == "1"}
    torch.testing.assert_close(decoding.logits, at_once.logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits_of(adapter), with_configuration(adapter, configuration), atol=1e-2)
    caches = decoding.cache if isinstance(decoding.cache, list) else [kept_of(each) for each in decoding.cache.layers]
    assert [cache is not None and len(cache) > 0 for cache in caches] == [runs == "1" for runs in blocks]


def kept_of(layer: Any) -> torch.Tensor | None:
    """The cache of a block."""
    return layer.recurrent_states[0] if isinstance(layer, LinearAttentionLayer) else layer.keys


def with_configuration(adapter: VLMAdapter, configuration: Configuration) -> torch.Tensor:
    with adapter.configured(configuration):
        return logits_of(adapter, configuration.tier)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_topk_equals_released_code_with_same_topk(name: str) -> None:
    adapter = make(name)
    for k in (1, 2):
        configuration = configuration_of(adapter, topk=k)
        assert configuration.topk == (4, k, k, k)
        found = with_configuration(adapter, configuration)
        routers = [block.mlp if name == "molmo" else block.mlp.gate for block in adapter.blocks]
        for router, each in zip(routers, configuration.topk, strict=True):
            router.top_k = each
        torch.testing.assert_close(found, logits_of(adapter), rtol=1e-4, atol=1e-4)
        for router in routers:
            router.top_k = 4
        assert not torch.allclose(found, logits_of(adapter), atol=1e-3)


def flops(adapter: VLMAdapter, configuration: Configuration) -> int:
    """Floating-point operations of matrix products and attention."""
    inputs = adapter.inputs(image(), QUESTION, configuration.tier)
    with flop_counter() as counter, torch.no_grad(), adapter.configured(configuration):
        adapter.prefill(inputs)
    return counter.get_total_flops()


def test_each_setting_alone_reduces_flops(adapter: VLMAdapter) -> None:
    knobs = {
        "tier": [configuration_of(adapter, tier=tier) for tier in (0, 1, 2)],
        "blocks": [configuration_of(adapter, blocks) for blocks in ("1000", "1010", "1110", "1111")],
    }
    if adapter.trained_topk:
        knobs["topk"] = [configuration_of(adapter, topk=k) for k in (1, 2, 4)]
    for knob, configurations in knobs.items():
        work = [flops(adapter, each) for each in configurations]
        assert work == sorted(set(work)), knob


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen2_5_vl"])
def test_flops_are_linear_in_blocks_and_experts(name: str) -> None:
    """Including the full configuration, which is the released model."""
    adapter = make(name)
    work = [flops(adapter, configuration_of(adapter, blocks)) for blocks in ("1000", "1100", "1110", "1111")]
    assert len({more - less for less, more in zip(work, work[1:])}) == 1
    if adapter.trained_topk:
        one, two, four = (flops(adapter, configuration_of(adapter, topk=k)) for k in (1, 2, 4))
        assert (four - two) == 2 * (two - one) and four == work[-1]


def test_grouped_expert_matmuls_have_same_flops() -> None:
    adapter, counts = make("qwen3_vl_moe"), {}
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        adapter.model.set_experts_implementation(implementation)
        counts[implementation] = [flops(adapter, configuration_of(adapter, topk=k)) for k in (1, 2, 4)]
    assert counts["grouped_mm"] == counts["eager"] == counts["batched_mm"]


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_only_routed_experts_run(implementation: str) -> None:
    """The weights of all others are NaN, so running one of them would show."""
    adapter = make("qwen3_vl_moe")
    adapter.model.set_experts_implementation(implementation)
    mixture, tokens = adapter.mixture(adapter.blocks[1]), torch.randn(1, 2, 32)
    with torch.no_grad(), adapter.configured(configuration_of(adapter, topk=2)):
        plain, (_, _, chosen) = mixture(tokens), mixture.gate(tokens)
        unused = [expert for expert in range(8) if expert not in chosen.flatten().tolist()]
        assert len(unused) >= 4
        mixture.experts.gate_up_proj[unused] = mixture.experts.down_proj[unused] = torch.nan
        assert torch.equal(mixture(tokens), plain)


def test_model_is_restored_after_exception(adapter: VLMAdapter) -> None:
    plain, modules = logits_of(adapter), dict(adapter.model.named_modules())
    with pytest.raises(KeyError), adapter.configured(configuration_of(adapter, "1010", 1)):
        raise KeyError
    assert dict(adapter.model.named_modules()) == modules
    assert torch.equal(logits_of(adapter), plain)


def test_cached_encoding_replaces_vision_encoder(adapter: VLMAdapter) -> None:
    inputs = adapter.inputs(image(), QUESTION, 1)
    encoding = adapter.encode(inputs)
    with torch.no_grad():
        plain = adapter.prefill(inputs).logits
        with LatencyMeter(adapter) as alone:
            adapter.generate(inputs, 3, [])
        with adapter.with_encoding(encoding), LatencyMeter(adapter) as seen:
            again = adapter.prefill(inputs).logits
    assert torch.equal(again, plain)
    assert seen.latency.num_decoded == 0 and alone.latency.num_decoded == 2
    assert alone.latency.vision_ms > 0 and alone.latency.prefill_ms > 0 and alone.latency.decode_ms > 0
    assert adapter.pooled_vision(encoding).shape == adapter.pooled_language(QUESTION).shape == (32,)


def test_generation_equals_transformers() -> None:
    for name in ("qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "idefics3"):
        adapter = make(name)
        inputs = adapter.inputs(image(), QUESTION, 2)
        wanted = adapter.model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert adapter.generate(inputs, 6, []) == wanted[0, inputs["input_ids"].shape[1] :].tolist()
        end = adapter.generate(inputs, 6, [])[3]
        assert end not in adapter.generate(inputs, 6, [end])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen2_5_vl", 1, 4, (1, 2)), "has no experts; set it to"),
        (("qwen3_vl_moe", 1, 4, ()), "must end with 4"),
        (("molmo", 1, 4, (1, 2)), "must end with 4"),
        (("molmo", 1, 5, (1, 4)), "the model's 4 blocks"),
    ],
)
def test_space_that_does_not_fit_model_is_rejected(arguments: tuple, message: str) -> None:
    name, *rest = arguments
    with pytest.raises(UserError, match=message):
        make(name).space(*rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, None, (1, 2)), r"sizes.topk_choices=\[1, 2\] must end with 4"),
        ((5, None, (1, 4)), "sizes.min_active=5 exceeds the model's 4 blocks"),
        ((3, 2, (1, 4)), "sizes.min_active=3 and sizes.max_active=2"),
    ],
)
def test_messages_name_section_of_space(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make("qwen3_vl_moe").space(*arguments, section="sizes")


@pytest.mark.parametrize("sizes", [(3, 6, 12), (255, 512), (256, 511)])
def test_tiers_that_give_equal_grids_are_rejected(sizes: tuple[int, ...]) -> None:
    """An image token of this processor covers 16x16 pixels."""
    message = r"sizes.tier_sizes=.* pixels for Qwen.* 16x16 pixels each; .* such as \[16384, 65536, 262144\]"
    with pytest.raises(UserError, match=message):
        adapter_for(*vlms.qwen3_vl_moe(), sizes, section="sizes")
    adapter_for(*vlms.qwen3_vl_moe(), (256, 512), section="sizes")


def test_text_model_is_rejected(tmp_path: Path) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a qwen2 model without vision; use one of qwen2_5_vl"):
        load_adapter(str(tmp_path), (1024,))


def test_unsupported_models_are_rejected() -> None:
    model, processor = vlms.qwen2_5_vl(use_sliding_window=True, max_window_layers=2)
    with pytest.raises(UserError, match="set use_sliding_window to false"):
        adapter_for(model, processor, (1024,))
    with pytest.raises(UserError, match="ascending numbers of pixels"):
        adapter_for(*vlms.qwen2_5_vl(), (4096, 1024))
    model.config.model_type = "llava"
    with pytest.raises(UserError, match="type llava; use one of qwen2_5_vl"):
        adapter_for(model, processor, (1024,))
