"""What `--checkpoint` names: an export to load, the run it belongs to and the step it was saved at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eval_pipeline.export import check_export
from verl_ext.errors import UserError

EXPORT_FOLDER = "huggingface"

_STEP_DIRECTORY = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A model directory that is complete enough to load, and where it comes from."""

    path: Path
    """What the user named, absolute."""
    export: Path
    """The Hugging Face directory to load."""
    run_dir: Path | None = None
    """The training run's directory; None for a model that no run saved."""
    step: int | None = None
    """`global_step` of the checkpoint; None for a model that no run saved."""

    @property
    def label(self) -> str:
        """`step_<N>`, or the directory's name where there is no step."""
        return self.path.name if self.step is None else f"step_{self.step}"

    @property
    def default_output(self) -> Path:
        """`<run_dir>/eval/eval_step_<N>`; for a model without a run, `eval_<name>` beside it."""
        folder = f"eval_{self.label}"
        return self.path.parent / folder if self.run_dir is None else self.run_dir / "eval" / folder


def find_checkpoint(path: Path) -> Checkpoint:
    """Resolve `--checkpoint` and check that its export can be loaded.

    Args:
        path: a `global_step_N` directory, its `huggingface` folder, or any Hugging Face model directory.

    Raises:
        UserError: the directory is missing, or its export lacks its configuration, weights, tokenizer or chat template.
    """
    path = path.resolve()
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; name a global_step_N directory or a Hugging Face model.")
    if path.name == EXPORT_FOLDER and _STEP_DIRECTORY.fullmatch(path.parent.name):
        path = path.parent
    checkpoint = _locate(path)
    check_export(checkpoint.export)
    return checkpoint


def _locate(path: Path) -> Checkpoint:
    match = _STEP_DIRECTORY.fullmatch(path.name)
    if match:
        return Checkpoint(path, path / EXPORT_FOLDER, run_dir=path.parent, step=int(match.group(1)))
    return Checkpoint(path, export=path)
