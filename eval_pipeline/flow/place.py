"""Where an evaluation keeps its ledger and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval_pipeline.ledger.ledger import LEDGER_FILE
from eval_pipeline.models.checkpoint import Checkpoint
from verl_ext.errors import UserError

EVAL_FOLDER = "eval"
WORK_FOLDER = "work"


@dataclass(frozen=True)
class Place:
    """The directory of an evaluation.

    Attributes:
        root: holds the ledger.
        run_dir: the training run's directory; None for a model that no run saved.
        one_model: whether the files of the one model lie in `root` itself.
    """

    root: Path
    run_dir: Path | None
    one_model: bool = False

    @property
    def of_run(self) -> Path:
        """The run's directory; asked only where there is one."""
        assert self.run_dir is not None
        return self.run_dir

    def directory_of(self, label: str) -> Path:
        """Where a checkpoint's figures and logs go."""
        return self.root if self.one_model else self.root / f"eval_{label}"

    def work_of(self, label: str, dataset: str) -> Path:
        """Where the answers and verdicts of one data set are kept as they come."""
        return self.directory_of(label) / WORK_FOLDER / dataset

    def result_of(self, label: str, dataset: str) -> Path:
        """Where the figures of one data set are kept once all verdicts are in."""
        return self.work_of(label, dataset) / "result.json"


def place_of_run(run_dir: Path) -> Place:
    """The place of a training run.

    Raises:
        UserError: it is no directory.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a directory; name the run directory, which holds global_step_N directories")
    return Place(run_dir.resolve() / EVAL_FOLDER, run_dir.resolve())


def place_of_checkpoint(checkpoint: Checkpoint, output: Path | None, is_trial: bool = False) -> Place:
    """The place of one checkpoint: what is asked for, or its run's, or `eval_<name>` beside a model without a run.

    Args:
        checkpoint: the model.
        output: what is asked for.
        is_trial: whether the figures are to be kept apart from those of the run.
    """
    if output is not None:
        return Place(output.resolve(), checkpoint.run_dir, one_model=True)
    if checkpoint.run_dir is not None and is_trial:
        root = place_of_run(checkpoint.run_dir).root / f"trial_{checkpoint.label}"
        return Place(root, checkpoint.run_dir, one_model=True)
    if checkpoint.run_dir is not None:
        return place_of_run(checkpoint.run_dir)
    return Place(checkpoint.path.parent / f"eval_{checkpoint.label}", None, one_model=True)


def find_place(directory: Path) -> Place:
    """The place that a user means who names a run or the directory of an evaluation.

    Raises:
        UserError: nothing was evaluated there.
    """
    path = directory.resolve()
    if (path / EVAL_FOLDER / LEDGER_FILE).is_file():
        return Place(path / EVAL_FOLDER, path)
    if (path / LEDGER_FILE).is_file():
        is_run = path.name == EVAL_FOLDER
        return Place(path, path.parent if is_run else None, one_model=not is_run)
    raise UserError(f"{directory} holds no evaluation; name the directory of an evaluated run, or its eval/")
