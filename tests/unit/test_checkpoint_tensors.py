"""Row shards, the layout of safetensors files, staging, adapter merging, and writing with digests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import Chunk, Concatenate, Interleave, Transpose, WeightConverter

from verl_ext.checkpoint import staging
from verl_ext.checkpoint.hf_export import ExportedWeights, create_files, layout_of
from verl_ext.checkpoint.hf_tensors import ExportedTensor, exported_tensors, plain_name, plan_to_json
from verl_ext.checkpoint.load import load_model
from verl_ext.checkpoint.manifest import MODEL, PLAN, shard_name
from verl_ext.checkpoint.rebuild import export_from_shards
from verl_ext.checkpoint.save import FileWriter, bytes_of, require_space, sync_and_digest, warn_if_next_will_not_fit
from verl_ext.checkpoint.shards import ShardFiles
from verl_ext.checkpoint.staging import CpuStager, HostMemory, clear_gpu_error
from verl_ext.distributed import shard_rows, to_local
from verl_ext.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")  # required to create a mesh


def shard(tensor: torch.Tensor, num_ranks: int, rank: int) -> DTensor:
    """The shard of one rank, on a mesh of GPUs, which this machine may lack."""
    start, end = shard_rows(len(tensor), num_ranks, rank)
    mesh = DeviceMesh("cuda", torch.arange(num_ranks), _init_backend=False)
    mesh._coordinate_on_dim = [rank]
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(tensor[start:end].clone(), DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"wide": torch.randn(7, 3), "short": torch.randn(2), "one": torch.randn(1, 5)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_readers", [1, 2, 3, 5])
def test_any_number_of_readers_loads_any_number_of_shards(
    num_ranks: int, num_readers: int, state: dict, tmp_path: Path
) -> None:
    for rank in range(num_ranks):
        shards = {name: shard(tensor, num_ranks, rank) for name, tensor in state.items()}
        torch.save(shards, tmp_path / shard_name(MODEL, num_ranks, rank))
    files = ShardFiles(tmp_path, MODEL)
    assert files.world_size == num_ranks
    for name, tensor in state.items():
        parts = []
        for reader in range(num_readers):
            start, end = shard_rows(len(tensor), num_readers, reader)
            parts.append(torch.full((end - start, *tensor.shape[1:]), torch.nan))
            files.tensor(name).copy_rows(start, end, parts[-1])
        assert torch.equal(torch.cat(parts), tensor)
        assert torch.equal(files.tensor(name).full(), tensor)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ("experts.0.down_proj.weight", r"with model.partial_pretrain=.*/huggingface and another"),
        ("experts.down", "belongs to another model: it lacks mlp.experts.down_proj"),
    ],
)
def test_tensors_of_another_model_are_rejected(saved: str, message: str, tmp_path: Path) -> None:
    """Experts that transformers 4 stored one by one have a message of their own."""
    torch.save({f"mlp.{saved}": torch.zeros(1)}, tmp_path / shard_name(MODEL, 1, 0))
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.Module()})})
    model.mlp.experts.down_proj = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match=message):
        load_model(model, tmp_path)


def test_missing_shards_are_reported(state: dict, tmp_path: Path) -> None:
    torch.save(state, tmp_path / shard_name(MODEL, 2, 0))
    with pytest.raises(UserError, match=r"holds 1 model shards of \[2\] ranks"):
        ShardFiles(tmp_path, MODEL)


@pytest.mark.parametrize("max_shard_gib", [1, 60 / 2**30])
def test_ranks_write_one_export_jointly(max_shard_gib: float, state: dict, tmp_path: Path) -> None:
    state["counts"] = torch.arange(3)  # not sharded, not of floating point
    weights = [ExportedTensor(name, name) for name in state]
    layout = layout_of(weights, state, torch.bfloat16, max_shard_gib)
    create_files(tmp_path, layout)
    for rank in (1, 0):  # in any order
        own = {name: shard(tensor, 2, rank) if name != "counts" else tensor for name, tensor in state.items()}
        ExportedWeights(weights, layout, {}).write_local_rows(tmp_path, own, rank)
    loaded = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(loaded[name], wanted)
        assert loaded[name].dtype == wanted.dtype
    assert (layout.index is None) == (len(layout.headers) == 1)
    with safe_open(next(iter(tmp_path.glob("*.safetensors"))), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without which transformers refuses it


def test_staged_copy_is_independent_and_keeps_ties(state: dict) -> None:
    stager, sharded = CpuStager(), shard(state["wide"], 2, 0)
    tied = {"a": state["wide"], "b": state["wide"], "sharded": sharded, "list": [state["short"], 3, "x"]}
    before = [state["wide"].clone(), to_local(sharded).clone(), state["short"].clone()]
    copy = stager.stage(tied)
    for tensor in (state["wide"], to_local(sharded), state["short"]):
        tensor.zero_()
    assert torch.equal(copy["a"], before[0])
    assert torch.equal(to_local(copy["sharded"]), before[1])
    assert copy["sharded"].shape == (7, 3)
    assert torch.equal(copy["list"][0], before[2])
    assert copy["list"][1:] == [3, "x"]
    assert copy["a"].data_ptr() == copy["b"].data_ptr()
    assert stager.stage(tied)["a"].data_ptr() == copy["a"].data_ptr()  # the memory is reused


def test_staged_tensors_are_saved_without_their_neighbors(tmp_path: Path) -> None:
    """Each has a storage of its own size in the block of memory, which grows with the state."""
    stager = CpuStager()
    dtypes = (torch.bfloat16, torch.float32, torch.int64, torch.bool)
    for size in (3, 5000):
        state = {str(dtype): (torch.arange(size) % 2).to(dtype) for dtype in dtypes}
        state |= {"none": torch.empty(0, 4), "number": torch.tensor(1.5)}
        copy = stager.stage(state)
        for name, tensor in state.items():
            assert torch.equal(copy[name], tensor) and copy[name].dtype == tensor.dtype
            assert copy[name].untyped_storage().nbytes() == tensor.nbytes
        torch.save(copy, tmp_path / "staged.pt")
        assert all(torch.equal(tensor, state[name]) for name, tensor in torch.load(tmp_path / "staged.pt").items())


@pytest.mark.parametrize("code", [0, 1])
def test_exactly_staged_bytes_are_pinned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """CUDA's functions are mocked; if pinning fails, the copies are in pageable memory and the error is cleared."""
    calls: list[tuple[str, int]] = []
    last_error = [0]

    def register(address: int, size: int, flags: int) -> int:
        calls.append(("pin", size))
        last_error[0] = code
        return code

    cudart = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append(("unpin", address))
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(staging, "clear_gpu_error", lambda: last_error.__setitem__(0, 0))
    memory = HostMemory(1000, is_pinned=True)
    tensor = memory.tensor(64, torch.Size([3]), torch.float32).copy_(torch.arange(3))
    assert tensor.tolist() == [0, 1, 2] and calls == [("pin", 1000)]
    assert ("cannot be pinned" in capsys.readouterr().err) == (code != 0)
    assert last_error == [0]
    memory.release()
    memory.release()
    assert [name for name, _ in calls] == (["pin", "unpin"] if code == 0 else ["pin"])
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build, but no GPU")
def test_runtime_of_torch_has_function_that_clears_errors() -> None:
    assert isinstance(clear_gpu_error(), int)


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    if kind == "experts":
        experts = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=6, num_key_value_heads=1, head_dim=4)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1, tie_word_embeddings=kind == "tied"))


def assert_exported_as_saved(model: PreTrainedModel, directory: Path) -> set[str]:
    """Check that exports by three ranks and from their shards equal `save_pretrained`; return the tensor names."""
    weights, state = exported_tensors(model), model.state_dict()
    layout = layout_of(weights, state, torch.float32, 1)
    ranks, rebuilt, saved = (directory / name for name in ("ranks", "rebuilt", "saved"))
    for made in (ranks, rebuilt):
        made.mkdir()
    create_files(ranks, layout)
    for rank in range(3):
        own = {name: shard(tensor, 3, rank) for name, tensor in state.items()}
        ExportedWeights(weights, layout, {}).write_local_rows(ranks, own, rank)
        torch.save(own, directory / shard_name(MODEL, 3, rank))
    (directory / PLAN).write_text(plan_to_json(weights))
    export_from_shards(directory, rebuilt, torch.float32, 1, lambda _: None)
    model.save_pretrained(saved)
    expected = load_file(saved / "model.safetensors")
    for made in (ranks, rebuilt):
        found = load_file(made / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    return set(expected)


@pytest.mark.parametrize("kind", ["plain", "tied", "experts"])
def test_export_equals_save_pretrained(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    names = assert_exported_as_saved(model, tmp_path)
    assert ("model.layers.1.mlp.experts.4.down_proj.weight" in names) == (kind == "experts")
    model.config.save_pretrained(tmp_path / "ranks")
    loaded = type(model).from_pretrained(tmp_path / "ranks").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_export_splits_and_transposes_converted_tensors(tmp_path: Path) -> None:
    """Split by groups of rows and by columns."""
    model = model_of("experts")
    model._weight_conversions = [
        WeightConverter(["q.weight", "r.weight"], "q_proj.weight", [Concatenate(0)]),
        WeightConverter(["experts.gate", "experts.up"], "experts.gate_up_proj", [Concatenate(1)]),
        WeightConverter("experts.down", "experts.down_proj", [Transpose(1, 2)]),
    ]
    names = assert_exported_as_saved(model, tmp_path)
    assert {f"model.layers.0.{name}" for name in ("self_attn.r.weight", "mlp.experts.up", "mlp.experts.down")} <= names


def test_tensor_without_invertible_conversion_keeps_its_name() -> None:
    model = model_of("plain")
    model._weight_conversions = [
        WeightConverter("up_gate.weight", ["gate_proj.weight", "up_proj.weight"], [Chunk(0)]),
        WeightConverter("mixed.weight", "down_proj.weight", [Interleave(1)]),
        WeightConverter("turned.weight", "o_proj.weight", [Transpose(0, 1)]),
    ]
    assert [weight.name for weight in exported_tensors(model)] == list(model.state_dict())


def test_plan_part_outside_its_tensor_is_rejected(tmp_path: Path) -> None:
    model = model_of("experts")
    torch.save(model.state_dict(), tmp_path / shard_name(MODEL, 1, 0))
    (tmp_path / "export").mkdir()
    for old, new in (('"offset": 48', '"offset": 49'), ('"row": 4', '"row": -1'), ('"row": 4', '"row": 5')):
        (tmp_path / PLAN).write_text(plan_to_json(exported_tensors(model)).replace(old, new))
        with pytest.raises(UserError, match=r"export_plan.json cannot be read \(.*is not inside"):
            export_from_shards(tmp_path, tmp_path / "export", torch.float32, 1, lambda _: None)


EXPERTS = ["gate_up_proj", "down_proj"]


def lora_model(kind: str) -> peft.PeftModel:
    torch.manual_seed(0)
    if kind == "qwen2":
        sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1)
        base = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
        config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    elif kind == "experts":  # each expert has its own adapters; peft wraps the module once per parameter
        base = model_of("experts")
        config = peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear")
    elif kind == "turned experts":  # stored as (experts, in, out)
        sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_local_experts=3)
        heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts_per_tok=2)
        base = GptOssForCausalLM(GptOssConfig(**sizes, **heads))
        config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=EXPERTS)
    else:  # its layers store the weight as (in, out)
        base = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
        config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "experts", "turned experts"])
def test_row_wise_adapter_merge_equals_peft(kind: str, tmp_path: Path) -> None:
    model = lora_model(kind)
    weights, state = exported_tensors(model), model.state_dict()
    layout = layout_of(weights, state, torch.float32, 1)
    ranks, rebuilt, saved = (tmp_path / name for name in ("ranks", "rebuilt", "saved"))
    for made in (ranks, rebuilt):
        made.mkdir()
    create_files(ranks, layout)
    for rank in (0, 1, 2):
        own = {name: shard(tensor, 3, rank) for name, tensor in state.items()}
        ExportedWeights(weights, layout, state).write_local_rows(ranks, own, rank)
        torch.save(own, tmp_path / shard_name(MODEL, 3, rank))
    (tmp_path / PLAN).write_text(plan_to_json(weights))
    export_from_shards(tmp_path, rebuilt, torch.float32, 1, lambda _: None)
    model.merge_and_unload().save_pretrained(saved)
    merged = load_file(saved / "model.safetensors")
    assert any("experts" in name for name in merged) == ("experts" in kind)
    for made in (ranks, rebuilt):
        loaded = load_file(made / "model.safetensors")
        assert loaded.keys() == merged.keys()
        for name, tensor in loaded.items():
            torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)


def test_plain_name_strips_peft_prefixes() -> None:
    assert plain_name("base_model.model.lm_head.modules_to_save.default.weight") == "lm_head.weight"
    assert plain_name("base_model.model.lm_head.original_module.weight") is None
    assert plain_name("base_model.model.model.norm.weight") == "model.norm.weight"
    assert plain_name("base_model.model.mlp.experts.base_layer.base_layer.down_proj") == "mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("setting", "tensor"), [("use_dora", "lora_magnitude_vector"), ("lora_bias", r"q_proj\.lora_B\.default\.bias")]
)
def test_unmergeable_adapters_are_rejected(setting: str, tensor: str) -> None:
    base = lora_model("qwen2").unload()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], **{setting: True}))
    with pytest.raises(UserError, match=tensor):
        exported_tensors(model)


def test_trained_tied_head_is_rejected() -> None:
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, tie_word_embeddings=True)
    base = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UserError, match=r"lm_head.weight is trained separately but tied"):
        exported_tensors(model)


def test_digest_while_writing_equals_digest_of_file(state: dict, tmp_path: Path) -> None:
    with FileWriter() as files:
        entries = {
            "state.pt": files.write_object(tmp_path / "state.pt", state),
            "text": files.write_bytes(tmp_path / "text", b"one"),
        }
    assert entries == {name: sync_and_digest(tmp_path / name) for name in entries}
    assert all(torch.equal(torch.load(tmp_path / "state.pt")[name], tensor) for name, tensor in state.items())
    with pytest.raises(UserError, match=r"nowhere/text \(No such file"), FileWriter() as files:
        files.write_bytes(tmp_path / "nowhere/text", b"")


def test_disk_space_is_checked_before_saving(state: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bytes_of({"a": [state["wide"], "text"], "b": shard(state["wide"], 2, 1)}) == 84 + 36
    require_space(tmp_path, 1)
    with pytest.raises(UserError, match=r"it needs 1048576.0 TiB.* prune \S+ --max-to-keep 1`"):
        require_space(tmp_path, 2**60)
    warn_if_next_will_not_fit(tmp_path, 1)
    assert capsys.readouterr().err == ""
    warn_if_next_will_not_fit(tmp_path, 2**60)
    assert "next save will fail" in capsys.readouterr().err


def test_sizes_on_small_disk_are_not_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verl_ext.checkpoint.save.free_bytes", lambda directory: 1_200_000)
    with pytest.raises(UserError, match=r"it needs 1\.7 MiB, but .* has 1\.1 MiB free"):
        require_space(tmp_path, 1_800_000)
    warn_if_next_will_not_fit(tmp_path, 1_800_000)
    assert "has 1.1 MiB free" in capsys.readouterr().err
