"""What a run writes has its recorded names: files, keys of JSON, columns of CSV, metrics, and checkpoints' content.

`SNAPSHOT_UPDATE=1 bash tests/run.sh integration tests/integration/test_snapshots_runs.py` records
`tests/data/snapshots/runs/` again, and fails. The sets below are to be edited by hand.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.commands import GRPORun, RecipeRun, SFTRun, TrainingRun
from tests.helpers.snapshots import SNAPSHOTS, check_snapshot, flat

RUN_FILES = {
    *("config.yaml", "run.json", "run.lock", "console.log", "metrics.jsonl"),
    *("training_history.csv", "validation_history.csv"),
    "latest_checkpointed_iteration.txt",
}
"""Of every run, besides checkpoints."""
RUN_KEYS = {
    *("status", "project", "experiment", "stage", "recipe", "total_steps", "config_digest", "untrained_loss"),
    *("first_start", "precision", "attempts"),
}
ATTEMPT_KEYS = {
    *("attempt", "start", "end", "first_step", "last_step", "world_size", "exit_reason", "host", "pid"),
    *("pid_start_ticks", "pid_namespace", "closed_trackers", "heartbeat_s", "command", "packages", "device_names"),
    *("boot_id", "git_commit", "environment", "config_changes", "config_defaults", "input_files"),
}
MANIFEST_KEYS = {
    *("format", "step", "world_size", "config_digest", "files", "metrics", "dropped", "deferred", "time", "optimizer"),
    "export_dtype",
}
POSITION_KEYS = {
    *("epoch", "samples_seen", "num_samples", "seed", "order_seed", "skipped_steps", "owes_validation", "data_digest"),
    *("forward_check", "steps_without_update"),
}
EXTRA_KEYS = {"lr_scheduler", "updates_per_step", "dp_size", "rng"}
EXPORTED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
"""Some of the files of an export; releases of transformers write others besides."""
ROW_KEYS = {"step", "attempt", "time"}
"""Of a row of metrics, besides the metrics."""
ON_GPUS = {"throughput/train/mfu"}
EVENT_KEYS = {"step", "attempt", "name", "level", "text", "time"}
SAMPLE_KEYS = {
    *("step", "attempt", "split", "sample_id", "number", "prompt", "answer", "reference"),
    *("error_type", "message", "reward_total", "advantage"),
}
"""Of a sample, besides the rewards that the recipe names."""

WORK_FILES = (
    r"answers-[0-9a-f]{16}\.jsonl",
    r"isolation-[0-9a-f]{16}\.json",
    r"protocol-[0-9a-f]{16}\.json",
    r"result\.json",
    r"verdicts-[0-9a-f]{16}\.jsonl",
)
"""Of one evaluation of one dataset, sorted."""


def names_in(directory: Path) -> set[str]:
    """Names of files in a directory, without checkpoints and without readers' leases."""
    return {path.name for path in directory.iterdir() if not path.name.startswith(("global_step_", "lease."))}


def json_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys_of(rows: Iterable[dict[str, Any]]) -> set[str]:
    return {key for row in rows for key in row}


def key_paths(content: dict[str, Any]) -> set[str]:
    """Keys of a flat mapping, and those of mappings in its lists after `[]`."""
    found = set()
    for key, value in content.items():
        items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
        found |= {f"{key}[].{name}" for item in items for name in key_paths(flat(item))} or {key}
    return found


def check_metrics(name: str, run: TrainingRun) -> None:
    """Compare the metrics of all rows, and the columns of the tables in their order, with a snapshot."""
    rows = json_rows(run.run_dir / "metrics.jsonl")
    assert all(row.keys() >= ROW_KEYS for row in rows)
    columns = {path.name: path.read_text().splitlines()[0].split(",") for path in run.run_dir.glob("*_history.csv")}
    tables = {table: [column for column in names if column not in ON_GPUS] for table, names in columns.items()}
    check_snapshot(f"runs/{name}.json", {"metrics": sorted(keys_of(rows) - ROW_KEYS - ON_GPUS), **tables})


def check_record(run: TrainingRun, stage: str) -> None:
    record = json.loads((run.run_dir / "run.json").read_text())
    assert record.keys() == RUN_KEYS
    assert (record["status"], record["stage"]) == ("finished", stage)
    assert keys_of(record["attempts"]) == ATTEMPT_KEYS


def check_config(run: TrainingRun, stage: str) -> None:
    """`config.yaml` has the keys that --print-config shows; `data.datasets` has keys of its own."""
    written = flat(yaml.safe_load((run.run_dir / "config.yaml").read_text())).keys()
    recorded = json.loads((SNAPSHOTS / f"config/{stage}.json").read_text()).keys()
    assert {key for key in written ^ recorded if not key.startswith("data.datasets")} == set()


def check_checkpoint(checkpoint: Path, num_ranks: int, *, further: Iterable[str] = ()) -> None:
    """Compare the files of a checkpoint, the keys in them, and the tracker that names it.

    Args:
        checkpoint: the newest of a run.
        num_ranks: that wrote it.
        further: keys of `data.pt` that other stages do not have.
    """
    import torch

    step = checkpoint.name.removeprefix("global_step_")
    ranks = [f"world_size_{num_ranks}_rank_{rank}.pt" for rank in range(num_ranks)]
    shards = {f"{kind}_{rank}" for kind in ("model", "optim", "extra_state") for rank in ranks}
    others = {"data.pt", "export_plan.json", "fsdp_config.json", "huggingface", "manifest.json"}
    assert names_in(checkpoint) == {*shards, *others}
    assert names_in(checkpoint / "huggingface") >= EXPORTED
    assert (checkpoint.parent / "latest_checkpointed_iteration.txt").read_text() == step
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest.keys() == MANIFEST_KEYS
    assert (manifest["format"], manifest["step"], manifest["world_size"]) == (1, int(step), num_ranks)
    assert keys_of(manifest["files"].values()) == {"bytes", "xxh3_128"}
    exported = {f"huggingface/{name}" for name in names_in(checkpoint / "huggingface")}
    assert manifest["files"].keys() == {*shards, *others, *exported} - {"huggingface", "manifest.json"}
    assert json.loads((checkpoint / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": num_ranks}
    plan = json.loads((checkpoint / "export_plan.json").read_text())
    assert (plan.keys(), plan["format"]) == ({"format", "weights"}, 2)
    assert keys_of(plan["weights"]) == {"name", "source", "adapter", "part"}
    position = torch.load(checkpoint / "data.pt", weights_only=True)
    assert position.keys() == {*POSITION_KEYS, *further}
    extra = torch.load(checkpoint / f"extra_state_{ranks[0]}", weights_only=False)
    assert (extra.keys(), extra["rng"].keys()) == (EXTRA_KEYS, {"cpu", "numpy", "random"})


def check_pickled_names(run: TrainingRun) -> None:
    """No pickle names one of our modules, because moving the module would make it unreadable."""
    paths = list(run.run_dir.rglob("*.pt"))
    assert paths
    for path in paths:
        content = path.read_bytes()
        assert not [name for name in (b"verl_ext", b"eval_pipeline") if name in content], path


def test_sft_run_has_recorded_names(sft_run: SFTRun) -> None:
    trackers = {"tensorboard", "wandb", "wandb_run_id.txt", "trace"}
    assert names_in(sft_run.run_dir) - {"events.jsonl"} == RUN_FILES | trackers
    assert names_in(sft_run.run_dir / "trace") == {"attempt_1_rank_0.json", "attempt_1_rank_1.json"}
    check_record(sft_run, "sft")
    check_config(sft_run, "sft")
    check_checkpoint(sft_run.last_checkpoint, 2)
    check_pickled_names(sft_run)
    check_metrics("sft", sft_run)


def test_grpo_run_has_recorded_names(grpo_run: GRPORun) -> None:
    assert names_in(grpo_run.run_dir) == RUN_FILES | {
        *("events.jsonl", "samples.jsonl", "sample_tokens.jsonl", "train.log", "trace"),
    }
    check_record(grpo_run, "grpo")
    check_config(grpo_run, "grpo")
    check_checkpoint(grpo_run.run_dir / "global_step_4", 2, further=("reference_digest", "reference_adapter_digest"))
    check_pickled_names(grpo_run)
    assert keys_of(json_rows(grpo_run.run_dir / "events.jsonl")) == EVENT_KEYS
    samples = keys_of(json_rows(grpo_run.run_dir / "samples.jsonl"))
    assert samples == SAMPLE_KEYS | {"exec_success", "length_penalty"}
    check_metrics("grpo", grpo_run)


def test_budget_run_has_recorded_names(budget_run: RecipeRun) -> None:
    import torch

    run_dir = budget_run.run_dir
    epochs = {"best_model.pt", "checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"}
    assert names_in(run_dir) - {"events.jsonl"} == RUN_FILES | epochs | {"samples.jsonl", "tensorboard", "train.log"}
    check_record(budget_run, "budget")
    check_config(budget_run, "budget")
    further = ("epoch_sums", "best_reward", "reward_terms", "vlm_fingerprint", "vlm_dtype")
    check_checkpoint(run_dir / "global_step_8", 1, further=further)
    check_pickled_names(budget_run)
    best = torch.load(run_dir / "best_model.pt", weights_only=True)
    assert best.keys() == {"one_stage_controller_state_dict", "epoch", "val_reward", "config"}
    exported = json.loads((run_dir / "global_step_8/huggingface/config.json").read_text())
    found = {
        "weights": sorted(best["one_stage_controller_state_dict"]),
        "config.json": sorted(flat(exported).keys() - {"transformers_version", "dtype"}),
    }
    assert exported["model_type"] == "budget_controller"
    check_snapshot("runs/controller.json", found)


def test_budget_metrics_have_recorded_names(budget_run: RecipeRun) -> None:
    check_metrics("budget", budget_run)


def test_evaluation_has_recorded_names(watched_run: SFTRun) -> None:
    root = watched_run.run_dir / "eval"
    assert names_in(root) - {"watch.log"} == {"ledger.sqlite", "publish.lock", *(f"eval_step_{n}" for n in (2, 4, 6))}
    directory = root / "eval_step_2"
    assert names_in(directory) == {"answers", "metrics.json", "qa_logs", "summary.json", "verdicts", "work"}
    work = sorted((directory / "work/few").iterdir())
    assert len(work) == len(WORK_FILES)
    assert all(re.fullmatch(pattern, path.name) for pattern, path in zip(WORK_FILES, work))
    answers, _, protocol, result, verdicts = work
    rows = {
        "answers": answers,
        "verdicts": verdicts,
        "published verdicts": directory / "verdicts/few.jsonl",
        "published answers": directory / "answers/few.jsonl",
        "questions and answers": directory / "qa_logs/few_qa.jsonl",
    }
    files = {
        **{path.name: path for path in (directory / "metrics.json", directory / "summary.json", result)},
        **{"best_checkpoint.json": watched_run.run_dir / "best_checkpoint.json", "protocol.json": protocol},
    }
    with sqlite3.connect(root / "ledger.sqlite") as ledger:
        tables = [name for (name,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {name: [row[1] for row in ledger.execute(f"PRAGMA table_info({name})")] for name in tables}
    check_snapshot(
        "runs/evaluation.json",
        {
            "files": {name: sorted(key_paths(flat(json.loads(path.read_text())))) for name, path in files.items()},
            "rows": {name: sorted(keys_of(json_rows(path))) for name, path in rows.items()},
            "ledger": columns,
        },
    )


def test_prepared_data_has_recorded_names(quickstart: Path) -> None:
    from pyarrow import parquet

    stamp = json.loads((quickstart / "prepared.json").read_text())
    assert stamp.keys() == {"command", "version", "arguments", "inputs", "files", "counts"}
    assert (stamp["command"], stamp["version"]) == ("quickstart", 2)
    assert stamp["arguments"].keys() == {"output", "samples", "seed"}
    columns = {path.name: set(parquet.read_schema(path).names) for path in quickstart.glob("*.parquet")}
    chats, prompts = {"messages", "family", "problem_id"}, {"data_source", "prompt", "ability", "reward_model"}
    assert columns == {
        **{"train.parquet": chats, "val.parquet": chats},
        **{"prompts.parquet": prompts | {"extra_info"}, "val_prompts.parquet": prompts | {"extra_info"}},
    }
