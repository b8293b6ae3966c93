"""What is evaluated, and where results go: checkpoints, their exports and leases, and evaluation directories."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eval_pipeline.engines import ServedModel
from eval_pipeline.jobs import LEDGER_FILE
from verl_ext.checkpoint.lease import hold_lease
from verl_ext.checkpoint.manifest import (
    EXPORT,
    INDEX,
    MANIFEST,
    Manifest,
    damaged_export_files,
    exported_checkpoints,
    list_checkpoints,
    step_of,
)
from verl_ext.commands import program
from verl_ext.config.run_config import read_config_file
from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.model_files import read_json

MAX_LABEL = 120
"""Characters of a served model's label, which becomes part of file names."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
EVAL_FOLDER = "eval"
WORK_FOLDER = "work"
DEFAULT_PROJECT = "eval_pipeline"


@dataclass(frozen=True)
class EvalCheckpoint:
    """A model that can be evaluated."""

    path: Path
    """The directory that the user named, absolute."""
    export: Path | None
    """The Hugging Face directory to load; None if a server has loaded the model."""
    run_dir: Path | None = None
    """The training run's directory; None for a model without a run."""
    step: int | None = None
    """`global_step` of the checkpoint; None for a model without a run."""
    name: str | None = None
    """Overrides the label derived from the path."""
    served: ServedModel | None = None
    """The server's description of the model, if there is no export."""

    @property
    def label(self) -> str:
        """`step_<N>`, or the directory's name for a model without a run."""
        return self.name or (self.path.name if self.step is None else f"step_{self.step}")

    def identity(self) -> Any:
        """A JSON value that changes when other weights are at the same path.

        Returns:
            The export's manifest entries; without a manifest, the files' sizes and modification times. For a served
            model, its description and those of `served_files`.

        Raises:
            OSError, ValueError: the export is gone, or the manifest cannot be read.
        """
        if self.export is None:
            assert self.served is not None
            files = self.served_files
            return {**asdict(self.served), **({} if files is None else {"files": files})}
        if self.step is not None and (self.path / MANIFEST).exists():  # verl itself writes none
            return Manifest.read(self.path).export_entries
        return _file_stats(self.export)

    @property
    def served_files(self) -> dict[str, tuple[int, int]] | None:
        """Sizes and modification times of the files that the server has loaded; None if this machine lacks them."""
        root = Path((self.served and self.served.root) or "")
        try:
            return _file_stats(root) if root.is_absolute() else None
        except OSError:
            return None

    def verify_export(self) -> None:
        """Compare the digests of a run's export with the manifest.

        Raises:
            UserError: a file is damaged, or the checkpoint is gone.
        """
        try:
            damage = {} if self.step is None else damaged_export_files(self.path)
        except ValueError as error:
            raise UserError(
                f"cannot evaluate {self.path} ({error}); restore it or specify another checkpoint"
            ) from error
        for name, problem in damage.items():
            raise UserError(
                f"cannot evaluate {self.path}: its file {name} {problem}; export it again with "
                f"`{program('checkpoint')} export {shlex.quote(str(self.run_dir))} --step {self.step}`"
            )


def _file_stats(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of each file."""
    stats = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def find_checkpoint(path: Path) -> EvalCheckpoint:
    """Resolve `--checkpoint` and check that its export can be loaded.

    Args:
        path: a `global_step_N` directory, its `huggingface` folder, or any Hugging Face model directory.

    Raises:
        UserError: the directory is missing, or its export lacks its configuration, weights, tokenizer or chat template.
    """
    path = path.resolve()
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; specify a global_step_N directory or a Hugging Face model")
    if path.name == EXPORT and step_of(path.parent) is not None:
        path = path.parent
    step = step_of(path)
    if step is None and not (path / "config.json").is_file() and (steps := list_checkpoints(path)):
        raise UserError(f"{path} is a run directory; specify one of its checkpoints, such as {steps[0]}")
    export, run_dir = (path, None) if step is None else (path / EXPORT, path.parent)
    check_export(export)
    return EvalCheckpoint(path, export, run_dir, step)


def base_model(path: Path) -> EvalCheckpoint:
    """The baseline of a report, with a label that no checkpoint of the run has.

    Raises:
        UserError: see `find_checkpoint`.
    """
    found = find_checkpoint(path)
    return replace(found, name=f"base_{found.label}", run_dir=None, step=None)


def served_checkpoint(model: ServedModel, directory: Path) -> EvalCheckpoint:
    """A model that a server has loaded; its results go into the directory, named after the model."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", model.id).strip("._")[-MAX_LABEL:] or "served_model"
    return EvalCheckpoint(directory.absolute() / label, export=None, served=model)


class CheckpointScanner:
    """Finds the checkpoints of a run, and warns once about each that cannot be evaluated."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._found: dict[Path, EvalCheckpoint] = {}
        self._warned: dict[Path, str] = {}

    def checkpoints(self) -> list[EvalCheckpoint]:
        """The checkpoints that can be evaluated now, in the order of their steps."""
        by_step = sorted(exported_checkpoints(self._run_dir, self._skip), key=lambda each: step_of(each[0]) or 0)
        found = [self._check(*each) for each in by_step]
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def _skip(self, path: Path, error: ValueError) -> None:
        self._warn(path, str(error))

    def _check(self, path: Path, is_usable: bool) -> EvalCheckpoint | None:
        if not is_usable:
            self._warn(path, "its export is damaged or was skipped; the next start of the run writes it")
            return None
        if path not in self._found:
            try:
                self._found[path] = find_checkpoint(path)
            except UserError as error:
                self._warn(path, str(error))
                return None
        return self._found[path]

    def _warn(self, path: Path, problem: str) -> None:
        if self._warned.get(path) != problem and path.exists():
            warn(f"skipping {path}: {problem}")
            self._warned[path] = problem


@contextmanager
def lease_checkpoint(checkpoint: EvalCheckpoint) -> Iterator[None]:
    """Protect a run's checkpoint from rotation during the block. A model without a run needs no lease.

    Raises:
        UserError: rotation has just removed the checkpoint.
    """
    with ExitStack() as stack:
        if checkpoint.run_dir is not None:
            try:
                stack.enter_context(hold_lease(checkpoint.path))
            except FileNotFoundError as error:
                raise UserError(f"{checkpoint.path} has just been removed; specify a newer checkpoint") from error
        yield


# Exports


def check_export(export: Path) -> None:
    """Refuse an incomplete export early, because vLLM fails only after seconds of loading.

    Args:
        export: directory that should hold `config.json`, safetensors weights, a tokenizer and a chat template.

    Raises:
        UserError: one of them is missing or cannot be read.
    """
    if not (export / "config.json").is_file():
        raise UserError(
            f"{export} has no config.json; add hf_model to trainer.checkpoint.save_contents, or export the checkpoint"
        )
    read_json(export / "config.json")
    _check_weights(export)
    _check_tokenizer(export)


def _check_weights(export: Path) -> None:
    from safetensors import SafetensorError, safe_open

    index = export / INDEX
    shards = _shards_of(index) if index.is_file() else sorted(export.glob("*.safetensors"))
    if not shards:
        from_shards = (export.parent / "fsdp_config.json").exists()
        command = f"{program('checkpoint')} export {shlex.quote(str(export.parent))}"
        remedy = f"run `{command}`" if from_shards else "export the model again"
        raise UserError(f"{export} has no *.safetensors weights; {remedy}")
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise UserError(f"{index} names missing shards ({', '.join(missing)}); export the model again")
    for shard in shards:  # refuse truncated, overlong and other invalid files
        try:
            with safe_open(shard, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{shard} is not a complete safetensors file ({error}); export the model again") from error


def _shards_of(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} has no weight_map of file names; export the model again")
    if outside := sorted(name for name in set(weight_map.values()) if Path(name).name != name):
        raise UserError(f"{index} names {outside[0]}, which is not in its directory; export the model again")
    return [index.parent / name for name in sorted(set(weight_map.values()))]


def _check_tokenizer(export: Path) -> None:
    if not any((export / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{export} has no tokenizer; save the tokenizer with the weights")
    if (export / "chat_template.jinja").is_file():
        return
    settings = export / "tokenizer_config.json"
    if not settings.is_file() or not read_json(settings).get("chat_template"):
        raise UserError(f"{export} has no chat template; save one with the tokenizer, such as the instruct model's")


# Directories of results


@dataclass(frozen=True)
class EvalDir:
    """The directory of an evaluation."""

    root: Path
    """Holds the job queue."""
    run_dir: Path | None
    """The training run's directory; None for a model without a run."""
    one_model: bool = False
    """Whether `root` is for one model only and holds its results directly."""

    @property
    def of_run(self) -> Path:
        """The run's directory. Only for evaluations of a run."""
        assert self.run_dir is not None
        return self.run_dir

    def results_of(self, label: str) -> Path:
        """Directory of a checkpoint's results and logs."""
        return self.root if self.one_model else self.root / f"eval_{label}"

    def work_of(self, label: str, dataset: str) -> Path:
        """Directory of a job's answers and verdicts."""
        return self.results_of(label) / WORK_FOLDER / dataset

    def job_result(self, label: str, dataset: str) -> Path:
        """File of a finished job's results, before they are published."""
        return self.work_of(label, dataset) / "result.json"


def eval_dir_of_run(run_dir: Path) -> EvalDir:
    """The evaluation directory of a training run.

    Raises:
        UserError: the run's directory is missing.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a directory; specify a run directory, with global_step_N subdirectories")
    return EvalDir(run_dir.resolve() / EVAL_FOLDER, run_dir.resolve())


def eval_dir_of_checkpoint(checkpoint: EvalCheckpoint, output: Path | None, is_trial: bool = False) -> EvalDir:
    """The evaluation directory of one checkpoint: `output`, or its run's, or `eval_<name>` next to the model.

    Args:
        output: the directory that the user named.
        is_trial: whether to keep the results apart from the run's.
    """
    if output is not None:
        return EvalDir(output.resolve(), checkpoint.run_dir, one_model=True)
    if checkpoint.run_dir is not None and is_trial:
        root = eval_dir_of_run(checkpoint.run_dir).root / f"trial_{checkpoint.label}"
        return EvalDir(root, checkpoint.run_dir, one_model=True)
    if checkpoint.run_dir is not None:
        return eval_dir_of_run(checkpoint.run_dir)
    return EvalDir(checkpoint.path.parent / f"eval_{checkpoint.label}", None, one_model=True)


def find_eval_dir(directory: Path) -> EvalDir:
    """Find the evaluation directory, given a run's directory or the evaluation directory itself.

    Raises:
        UserError: nothing was evaluated there.
    """
    path = directory.resolve()
    if (path / EVAL_FOLDER / LEDGER_FILE).is_file():
        return EvalDir(path / EVAL_FOLDER, path)
    if (path / LEDGER_FILE).is_file():
        is_run = path.name == EVAL_FOLDER
        return EvalDir(path, path.parent if is_run else None, one_model=not is_run)
    raise UserError(f"{directory} contains no evaluation; specify the directory of an evaluated run, or its eval/")


# Settings of the training run


@dataclass(frozen=True)
class TrainingRun:
    """The settings that an evaluation takes from a training run; the defaults are for a model without a run."""

    recipe: str | None = None
    """`eval.recipe`: the recipe for its checkpoints."""
    project: str = DEFAULT_PROJECT
    """`trainer.project_name`: the W&B project."""
    experiment: str | None = None
    """`trainer.experiment_name`: groups the evaluations of one run in W&B."""
    base: str | None = None
    """`model.partial_pretrain`: the initial model."""
    wandb_proxy: str | None = None
    """`trainer.wandb_proxy`: the HTTPS proxy for W&B."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """`data.apply_chat_template_kwargs`: arguments of the chat template."""


def read_training_run(run_dir: Path | None) -> TrainingRun:
    """Read `config.yaml` of a run directory.

    Args:
        run_dir: holds the `global_step_N` directories; None for a model without a run.

    Returns:
        The file's settings, with defaults for missing ones. Without a file, the experiment is the directory's name.

    Raises:
        UserError: the file is not a YAML mapping, or a setting has the wrong type.
    """
    if run_dir is None:
        return TrainingRun()
    path = run_dir / "config.yaml"
    if not path.is_file():
        return TrainingRun(experiment=run_dir.name)
    config = read_config_file(path)
    return TrainingRun(
        recipe=_run_setting(config, "eval", "recipe", path),
        project=_run_setting(config, "trainer", "project_name", path) or DEFAULT_PROJECT,
        experiment=_run_setting(config, "trainer", "experiment_name", path) or run_dir.name,
        base=_run_setting(config, "model", "partial_pretrain", path),
        wandb_proxy=_run_setting(config, "trainer", "wandb_proxy", path),
        chat_template_kwargs={**_mapping(_mapping(config, "data", path), "data.apply_chat_template_kwargs", path)},
    )


def _run_setting(config: Mapping[str, Any], section: str, name: str, path: Path) -> str | None:
    value = _mapping(config, section, path).get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{path}: {section}.{name} is {value!r}; it must be a string")
    return value or None


def _mapping(values: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = values.get(key.rpartition(".")[2]) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"{path}: {key} is {value!r}; it must be a mapping")
    return value
