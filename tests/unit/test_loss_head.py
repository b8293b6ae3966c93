"""The fused loss equals that of the full logits, with its gradients, and packed samples do not affect each other."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
)

from tests.helpers.models import write_family
from tests.helpers.trainer import loss_and_gradients, make_trainer, small_config
from verl_ext.data.batching import MicroBatch, MicroBatchCollator, pack, packed_arguments
from verl_ext.errors import UserError
from verl_ext.trainer import fused_cross_entropy, packed_attention
from verl_ext.trainer.config import CHUNK_ELEMENTS, chunk_tokens
from verl_ext.trainer.fsdp import layer_classes
from verl_ext.trainer.fused_cross_entropy import (
    FusedLinearCrossEntropy,
    TokenLoss,
    fused_loss_error,
    install_fused_loss,
)
from verl_ext.trainer.model import attention_of, forward_settings
from verl_ext.trainer.packed_attention import (
    PACKED_SDPA,
    TRIAL_LENGTHS,
    MaskProbe,
    PackingUnsupportedError,
    enable_packing,
    trial_samples,
    why_not_packed,
)

SMALL = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL),
    "gemma": GemmaConfig(**SMALL),
    "window": MistralConfig(**SMALL, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}


def model_of(name: str, attention: str = PACKED_SDPA) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).float().train()


def loss_of(model: nn.Module, head: FusedLinearCrossEntropy | None = None) -> TokenLoss:
    return TokenLoss(model, head, torch.float32, "cpu")


def samples() -> list[dict]:
    """Samples with loss on different parts, one of them without any loss tokens."""
    made = [{**sample, "row": row} for row, sample in enumerate(trial_samples(97))]
    made[0]["loss_mask"][:3] = 0
    made[1]["loss_mask"][:] = 0
    return made


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 5, 300])
def test_fused_loss_equals_loss_of_logits(
    biased: bool, num_tokens: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 50 * 97)  # 128 tokens at a time
    torch.manual_seed(0)
    linear = nn.Linear(16, 97, bias=biased)
    head = FusedLinearCrossEntropy(linear, compiles=compiles)
    hidden = torch.randn(2, 400, 16, requires_grad=True)
    places, targets = torch.randperm(800)[:num_tokens], torch.randint(0, 97, (num_tokens,))
    plain = F.cross_entropy(linear(hidden).flatten(0, 1)[places], targets, reduction="sum")
    wanted = torch.autograd.grad(3 * plain, [hidden, *linear.parameters()])
    with head.computing_loss(places, targets):
        loss = head(hidden)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    got = [hidden.grad, *(parameter.grad for parameter in linear.parameters())]
    for gradient, expected in zip(got, wanted, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-4)
    assert torch.equal(head(hidden), linear(hidden))  # outside the context it returns logits again


def test_frozen_head_gets_no_weight_gradient() -> None:
    head = FusedLinearCrossEntropy(nn.Linear(16, 97).requires_grad_(False))
    hidden = torch.randn(1, 4, 16, requires_grad=True)
    with head.computing_loss(torch.tensor([0, 1]), torch.tensor([5, 6])):
        head(hidden).backward()
    assert head.weight.grad is None and hidden.grad.abs().sum() > 0
    with torch.no_grad(), head.computing_loss(torch.tensor([0]), torch.tensor([5])):
        assert not head(hidden).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_one_chunk_exist_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FusedLinearCrossEntropy(nn.Linear(16, 64, bias=False, dtype=dtype))
    hidden = torch.randn(1, 4 * 128, 16, dtype=dtype, requires_grad=True)
    positions, logits = torch.arange(4 * 128), list[weakref.ref[torch.Tensor]]()

    def gradients(chunk: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert all(each() is None for each in logits)
        loss, of_logits, sums = computed(chunk, labels)
        logits.append(weakref.ref(of_logits))
        return loss, of_logits, sums

    computed = layer._logit_gradients
    monkeypatch.setattr(layer, "_logit_gradients", gradients)
    monkeypatch.setattr(fused_cross_entropy, "chunk_tokens", lambda vocab, on_gpu: 128)
    with layer.computing_loss(positions, positions % 64):
        layer(hidden).backward()
    assert len(logits) == 4 and hidden.grad is not None


def test_fused_head_shares_weights_and_names_of_model() -> None:
    model = model_of("qwen2")
    names = set(model.state_dict())
    head = install_fused_loss(model, by_liger=False, compiles=False)
    assert set(model.state_dict()) == names
    assert head is model.get_output_embeddings() and head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_samples_equal_separate_samples(name: str) -> None:
    """Logits, loss and gradients, also compared with unpacked attention over padded rows."""
    packed, padded = model_of(name), model_of(name, "sdpa")
    logits = loss_of(packed).logits
    alone = torch.cat([logits(pack([sample])) for sample in samples()], dim=1)
    assert torch.allclose(logits(pack(samples())), alone, atol=1e-5)
    head = install_fused_loss(packed, by_liger=False, compiles=False)
    losses = []
    for loss, packs in ((loss_of(packed, head), True), (loss_of(padded), False)):
        losses.append(loss(MicroBatchCollator(0, packs).micro_batch(samples())))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for one, other in zip(packed.parameters(), padded.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_gpu_uses_larger_chunks_of_logits() -> None:
    assert chunk_tokens(152_064, on_gpu=False) == 128 and chunk_tokens(152_064, on_gpu=True) == 1765


def by_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    key_borders: torch.Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    **settings: bool,
) -> torch.Tensor:
    """The result of torch's variable-length kernel, computed with a mask over the row."""
    assert borders is key_borders and longest == longest_key == int(borders.diff().max())
    assert settings == packed_attention.GROUPED_HEADS and query.shape[1] == 2 * key.shape[1]
    position = torch.arange(len(query))
    sample = torch.bucketize(position, borders[1:], right=True)
    distance = position[:, None] - position
    left, right = window_size
    seen = (sample[:, None] == sample) & (distance >= -right) & ((distance <= left) | (left < 0))
    heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 4])
def test_varlen_kernel_equals_sdpa(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 21, 8) for heads in (4, 2, 2))
    arguments = packed_arguments(torch.tensor([7, 5, 9]), "cpu")

    def attend() -> torch.Tensor:
        module = nn.Module()
        return packed_attention.packed_sdpa(module, query, key, value, None, sliding_window=window, **arguments)[0]

    by_sdpa = attend()
    monkeypatch.setattr(packed_attention, "has_flash_kernel", lambda query: True)
    monkeypatch.setattr(packed_attention, "flash_attention", by_mask)
    assert torch.allclose(attend(), by_sdpa, atol=1e-6)


def test_varlen_kernel_requires_gpu_and_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        dtype, shape, is_cuda = torch.bfloat16, (1, 4, 21, 128), True

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, has_kernel in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert packed_attention.has_flash_kernel(OnGPU()) is has_kernel
    for name, value in {"dtype": torch.float32, "shape": (1, 4, 21, 320), "is_cuda": False}.items():
        query = OnGPU()
        setattr(query, name, value)
        assert packed_attention.has_flash_kernel(query) is False


def test_detects_model_that_mixes_packed_samples() -> None:
    good = loss_of(model_of("qwen2").eval()).logits
    assert why_not_packed(good, 97, torch.float32) is None

    def leaking(micro_batch: MicroBatch) -> torch.Tensor:
        logits = good(micro_batch)
        return logits + logits.cumsum(1) * 0.01

    def narrow(micro_batch: MicroBatch) -> torch.Tensor:
        raise TypeError("forward() got an unexpected keyword argument 'sample_lengths'")

    reasons = {
        "does not keep packed samples apart": leaking,
        "does not accept the boundaries": narrow,
        "cannot be verified": lambda micro_batch: good(micro_batch) * 0,  # a new head, all zeros
    }
    for reason, logits_of in reasons.items():
        assert reason in str(why_not_packed(logits_of, 97, torch.float32))


@pytest.mark.parametrize(("leak", "keeps_apart"), [(0.0, True), (0.3, False)])
def test_packing_check_tolerates_rounding_of_large_vocabularies(leak: float, keeps_apart: bool) -> None:
    """Rounding in bf16 differs between short and long rows; a leak into the first token of a sample is larger."""
    torch.manual_seed(0)
    exact = torch.randn(1, sum(TRIAL_LENGTHS), 150_000)

    def logits_of(micro_batch: MicroBatch) -> torch.Tensor:
        num_tokens = micro_batch["input_ids"].shape[1]
        starts = [0, *itertools.accumulate(TRIAL_LENGTHS)]
        if num_tokens == starts[-1]:
            noise = 0.03 * torch.randn_like(exact)
            noise[:, TRIAL_LENGTHS[0]] += leak * torch.randn(150_000)
            return exact + noise
        sample = TRIAL_LENGTHS.index(num_tokens)
        return exact[:, starts[sample] : starts[sample + 1]]

    assert (why_not_packed(logits_of, 150_000, torch.bfloat16) is None) == keeps_apart


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SMALL, attn_logit_softcapping=5.0), "caps attention scores"),
        (StableLmConfig(**SMALL), "does not pass the boundaries"),
    ],
)
def test_detects_attention_that_cannot_be_packed(config: PretrainedConfig, reason: str) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_SDPA).float().eval()
    assert reason in str(why_not_packed(loss_of(model).logits, 97, torch.float32))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("config", "max_length", "reason"),
    [
        (CONFIGS["window"], 64, None),  # the window also reaches the attention function
        (Llama4TextConfig(**SMALL, attention_chunk_size=8, **EXPERTS), 8, None),
        (Llama4TextConfig(**SMALL, attention_chunk_size=8, **EXPERTS), 9, "within samples of 9 tokens"),
        (PhimoeConfig(**SMALL, sliding_window=8, **EXPERTS), 8, None),
        (PhimoeConfig(**SMALL, sliding_window=8, **EXPERTS), 9, "within samples of 9 tokens"),
        (DogeConfig(**SMALL), 64, "a mask of its own"),
    ],
)
def test_masks_that_packed_rows_would_ignore_prevent_packing(
    config: PretrainedConfig, max_length: int, reason: str | None
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    found = enable_packing(model, loss_of(model).logits, torch.float32, max_length, recorded=None)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    assert model.config._attn_implementation == (PACKED_SDPA if reason is None else "sdpa")


def test_mask_that_depends_on_tokens_prevents_packing() -> None:
    probe, blocks = MaskProbe(max_length=64), torch.zeros(1, 7, dtype=torch.long)
    shape = {"batch_size": 1, "q_length": 7, "kv_length": 7}
    assert probe.mask(mask_function=chunked_causal_mask_function(4, torch.zeros(1)), **shape).shape[-2:] == (7, 7)
    with pytest.raises(PackingUnsupportedError, match="depend on the tokens"):
        probe.mask(mask_function=or_masks(causal_mask_function, blockwise_overlay(blocks)), **shape)


@pytest.mark.usefixtures("one_rank")
def test_longer_samples_repeat_the_packing_check(tmp_path: Path) -> None:
    settings = [
        forward_settings(small_config(tmp_path, tmp_path, f"data.max_length={length}"), "cpu", torch.float32)
        for length in (8, 9)
    ]
    assert settings[0] != settings[1]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "attention"), [("stablelm", "sdpa"), ("gemma2", "eager"), ("mamba", "eager")])
def test_model_that_cannot_pack_trains_as_if_packing_off(
    name: str, attention: str, quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_family(name, quickstart, tmp_path / name)
    trainers = [
        make_trainer(small_config(directory, tmp_path, f"data.packing={packing}")) for packing in ("auto", "false")
    ]
    err = capsys.readouterr().err
    assert err.count("Samples are padded instead of packed: ") == 1
    assert ("runs with eager attention" in err) == (attention == "eager")
    assert [trainer.model.config._attn_implementation for trainer in trainers] == [attention, attention]
    (loss, gradients), (padded_loss, padded_gradients) = map(loss_and_gradients, trainers)
    assert loss == padded_loss
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, padded_gradients[parameter])
    with pytest.raises(UserError, match="data.packing=true .*data.packing=auto"):
        make_trainer(small_config(directory, tmp_path, "data.packing=true"))


def test_auto_avoids_attention_that_ignores_part_of_model() -> None:
    config = small_config(Path(), Path())
    found = {
        name: attention_of(config.model, made, "cpu", torch.float32, AutoModelForCausalLM)
        for name, made in {"qwen2": CONFIGS["qwen2"], "gemma2": Gemma2Config(), "gpt_oss": GptOssConfig()}.items()
    }
    assert found == {"qwen2": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}
    config.model.attn_implementation = "sdpa"
    with pytest.raises(UserError, match="gemma2 .*auto or eager"):
        attention_of(config.model, Gemma2Config(), "cpu", torch.float32, AutoModelForCausalLM)


def test_nested_layers_are_sharded_with_their_parents() -> None:
    with torch.device("meta"):
        mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2))
        nameless = AutoModelForCausalLM.from_config(OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=2))
    assert layer_classes(mamba, None) == ["MambaBlock"]
    assert layer_classes(nameless, "Block") == ["Block"]
    with pytest.raises(UserError, match="OpenAIGPTLMHeadModel .*transformer_layer_cls_to_wrap .*Block"):
        layer_classes(nameless, None)
    with pytest.raises(UserError, match="no module of the class Blok"):
        layer_classes(nameless, ["Block", "Blok"])


def test_detects_model_that_transforms_its_logits() -> None:
    model = model_of("qwen2").eval()
    loss = loss_of(model, install_fused_loss(model, by_liger=False, compiles=False))
    assert fused_loss_error(loss.logits, loss, pack(trial_samples(97)[:1])) < 1e-5

    def capped(micro_batch: MicroBatch) -> torch.Tensor:
        return 0.5 * torch.tanh(loss.logits(micro_batch) / 0.5)

    assert fused_loss_error(capped, loss, pack(trial_samples(97)[:1])) > 1e-3
