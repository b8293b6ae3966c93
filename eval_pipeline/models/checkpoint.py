"""What `--checkpoint` names: an export to load, the run it belongs to and the step it was saved at."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from eval_pipeline.engines.model_card import ModelCard
from eval_pipeline.models.export import check_export
from verl_ext.checkpoint.manifest import EXPORT, list_checkpoints, step_of
from verl_ext.errors import UserError

MAX_LABEL = 120
"""Characters of a served model's label, which becomes part of file names."""


@dataclass(frozen=True)
class Checkpoint:
    """A model directory that is complete enough to load, and where it comes from."""

    path: Path
    """What the user named, absolute."""
    export: Path | None
    """The Hugging Face directory to load; None where a server has the model."""
    run_dir: Path | None = None
    """The training run's directory; None for a model that no run saved."""
    step: int | None = None
    """`global_step` of the checkpoint; None for a model that no run saved."""

    name: str | None = None
    """Of its figures, in the place of what follows from the path."""
    card: ModelCard | None = None
    """What the server says of its model, where there is no export."""

    @property
    def own_export(self) -> Path:
        """The export; asked only where no server has the model."""
        assert self.export is not None
        return self.export

    @property
    def label(self) -> str:
        """`step_<N>`, or the directory's name where there is no step."""
        return self.name or (self.path.name if self.step is None else f"step_{self.step}")


def base_model(path: Path) -> Checkpoint:
    """The model that a training started from, under a label that no checkpoint of the run has.

    Raises:
        UserError: as `find_checkpoint`.
    """
    found = find_checkpoint(path)
    return replace(found, name=f"base_{found.label}", run_dir=None, step=None)


def served_model(card: ModelCard, directory: Path) -> Checkpoint:
    """A model that a server has loaded; its figures go into the directory, under what the server calls it."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", card.id).strip("._")[-MAX_LABEL:] or "served_model"
    return Checkpoint(directory.absolute() / label, export=None, card=card)


def find_checkpoint(path: Path) -> Checkpoint:
    """Resolve `--checkpoint` and check that its export can be loaded.

    Args:
        path: a `global_step_N` directory, its `huggingface` folder, or any Hugging Face model directory.

    Raises:
        UserError: the directory is missing, or its export lacks its configuration, weights, tokenizer or chat template.
    """
    path = path.resolve()
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; name a global_step_N directory or a Hugging Face model")
    if path.name == EXPORT and step_of(path.parent) is not None:
        path = path.parent
    checkpoint = _locate(path)
    if checkpoint.step is None and not (path / "config.json").is_file() and (steps := list_checkpoints(path)):
        raise UserError(f"{path} is a run directory; name one of its checkpoints, such as {steps[0]}")
    check_export(checkpoint.own_export)
    return checkpoint


def _locate(path: Path) -> Checkpoint:
    step = step_of(path)
    return Checkpoint(path, path) if step is None else Checkpoint(path, path / EXPORT, run_dir=path.parent, step=step)
