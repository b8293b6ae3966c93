"""Supervised fine-tuning on GPUs at full length: tokens per second, MFU and peak memory of `run_sft.sh` itself.

The model has the dimensions of Qwen2.5 with random weights, the chats are as long as they may be, a quarter of each
prompt. MFU is verl's count of a model's operations over the peak of the GPU's data sheet. The first two steps are left
out. `--model tiny` on a CPU shows that the command runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.running import run
from verl_ext.argument_types import WholeNumber
from verl_ext.command_line import clean_exit
from verl_ext.data.prepare import prepare
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics
from verl_ext.tell import tell

MODELS = {  # hidden, intermediate, layers, heads, heads of keys and values, vocabulary
    "tiny": (64, 128, 2, 4, 2, 512),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}
WARM_UP, FIGURES = (
    2,
    {
        "tokens_per_s": "throughput/train/tokens_per_s",
        "mfu": "throughput/train/mfu",
        "peak_memory_gib": "system/peak_memory_gib",
        "step_s": "time/train/step_s",
    },
)


def write_model(name: str, directory: Path) -> None:
    """Random weights in bf16, with the quickstart's tokenizer: what a token says does not matter to speed."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    prepare(["quickstart", "--output", str(directory / "quickstart"), "--samples", "500"])
    tokenizer = AutoTokenizer.from_pretrained(directory / "quickstart/model")
    hidden, intermediate, layers, heads, kv_heads, vocab = MODELS[name]
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=32768,
        tie_word_embeddings=name == "1.5b", eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    torch.set_default_dtype(torch.float32)
    tokenizer.save_pretrained(directory / "model")


def write_chats(path: Path, num_chats: int, max_length: int) -> None:
    """Chats that are longer than they may be, and so are cut to `max_length` tokens."""
    import pandas as pd

    words = "def add(left, right): return left + right\n"
    turns = [
        {"role": "user", "content": words * (max_length // 40)},
        {"role": "assistant", "content": words * (max_length // 4)},
    ]
    pd.DataFrame({"messages": [turns] * num_chats}).to_parquet(path)


def train(scratch: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The metrics of each step.

    Raises:
        UserError: the command failed.
    """
    batch_size, run_dir = arguments.gpus * arguments.samples, scratch / "run"
    write_chats(scratch / "chats.parquet", batch_size, arguments.max_length)
    settings = {
        "recipe": "qwen2.5_coder_7b",
        "data.train_files": scratch / "chats.parquet",
        "data.val_files": "null",
        "data.max_length": arguments.max_length,
        "data.train_batch_size": batch_size,
        "data.max_tokens_per_gpu": arguments.tokens,
        "data.token_cache": scratch / "tokens",
        "model.partial_pretrain": scratch / "model",
        "trainer.default_local_dir": run_dir,
        "trainer.total_epochs": arguments.num_steps,
        "trainer.total_training_steps": arguments.num_steps,
        "trainer.save_freq": -1,
        "trainer.checkpoint.save_contents": "[model]",
        "trainer.logger": "[console]",
    }
    words = [*(f"{key}={value}" for key, value in settings.items()), *arguments.overrides]
    run(["bash", "run_sft.sh", str(arguments.gpus), *words], VERL_EXT_PYTHON=sys.executable)
    return [row for row in read_metrics(run_dir / METRICS_FILE) if "train/loss" in row]


@clean_exit()
def main() -> None:
    """Measure, print the figures and write them."""
    parser = bench_parser("sft_gpu", __doc__, "--model tiny", "--model 7b --gpus 8 --output FILE.json optim.lr=1e-5")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    parser.add_argument("--model", choices=MODELS, required=True, help="whose dimensions it has")
    parser.add_argument("--gpus", type=WholeNumber(), default=1, help="ranks, one on each")
    parser.add_argument("--max-length", type=WholeNumber(), default=4096, help="tokens of each chat")
    parser.add_argument("--samples", type=WholeNumber(), default=16, help="chats of a step on a GPU")
    parser.add_argument("--tokens", type=WholeNumber(), default=16384, help="tokens of a micro-batch")
    parser.add_argument("--num-steps", type=WholeNumber(WARM_UP + 1), default=8, help="with the two that are left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark_sft_gpu_") as name:
        write_model(arguments.model, Path(name))
        rows = train(Path(name), arguments)[WARM_UP:]
    found = {name: statistics.median(row[key] for row in rows) for name, key in FIGURES.items() if key in rows[0]}
    figures = {"gpus": arguments.gpus, "model": arguments.model, **found}
    tell(json.dumps(figures, indent=1))
    write_figures(figures, arguments.output)


if __name__ == "__main__":
    main()
