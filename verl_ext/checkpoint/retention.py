"""Which checkpoints stay, and why; decided from the disk alone. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.layout import BEST, KEEP, Manifest, read_all_complete, step_of
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.stock import WHY_KEPT, is_stock
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json


@dataclass(frozen=True)
class Retention:
    """What rotation keeps, beside what is held by a file in the run directory.

    Attributes:
        max_to_keep: newest checkpoints; None keeps all.
        keep_best: checkpoints with the best `best_metric`; they may be among the newest.
        best_metric: name of a metric in the manifests.
        best_mode: min or max.
        drop_optimizer_of_best: whether a checkpoint that is kept as best alone loses its optimizer shards.

    Raises:
        UserError: a value that cannot work, by its key in the recipe.
    """

    max_to_keep: int | None
    keep_best: int = 0
    best_metric: str = "val/loss"
    best_mode: str = "min"
    drop_optimizer_of_best: bool = False

    def __post_init__(self) -> None:
        if self.max_to_keep is not None:
            _require_whole("trainer.max_ckpt_to_keep", self.max_to_keep, lowest=1)
        _require_whole("trainer.checkpoint.keep_best", self.keep_best, lowest=0)
        if self.best_mode not in ("min", "max"):
            raise UserError(f"trainer.checkpoint.best_mode is '{self.best_mode}'; take one of min, max")

    @staticmethod
    def of(trainer: Any) -> Retention:
        """From the `trainer` section of a configuration."""
        checkpoint = trainer.checkpoint
        return Retention(
            max_to_keep=trainer.max_ckpt_to_keep,
            keep_best=checkpoint.keep_best,
            best_metric=checkpoint.best_metric,
            best_mode=checkpoint.best_mode,
            drop_optimizer_of_best=checkpoint.drop_optimizer_of_best,
        )

    @property
    def newest_reason(self) -> str:
        """Why one of the newest checkpoints is kept."""
        return "max_ckpt_to_keep is null" if self.max_to_keep is None else _one_of(self.max_to_keep, "newest")

    @property
    def best_reason(self) -> str:
        """Why one of the best checkpoints is kept."""
        return f"{_one_of(self.keep_best, 'best')} by {self.best_metric}"


def reasons_to_keep(run_dir: Path, retention: Retention, step: int) -> dict[Path, list[str]]:
    """Every complete checkpoint, the newest first, with the reasons for which it is kept; without one it may go.

    Args:
        run_dir: holds `global_step_N` directories.
        retention: what to keep.
        step: the run's step. Checkpoints beyond it are those of a former run in the same directory, which was started
            over with `resume_mode=disable`; they count as older than all others.
    """
    checkpoints = _by_age(run_dir, step)
    stock = [path for path in checkpoints if is_stock(path)]  # not ours to remove; in nobody's place either
    own = [path for path in checkpoints if path not in stock]
    chosen, problem = read_choice(run_dir)
    rules: list[tuple[str, Collection[Path]]] = [
        (retention.newest_reason, own[: retention.max_to_keep]),
        (WHY_KEPT, stock),
        (retention.best_reason, _best(checkpoints, retention)),
        (f"{BEST} names it", () if chosen is None else (chosen,)),
        (f"{BEST} {problem}", checkpoints if problem else ()),  # it might name any of them
    ]
    return {path: [why for why, kept in rules if path in kept] + reasons_held(path) for path in checkpoints}


def read_choice(run_dir: Path) -> tuple[Path | None, str | None]:
    """The checkpoint that `best_checkpoint.json` names, if any, and what is wrong with a file that names none."""
    try:
        step = parse_json((run_dir / BEST).read_bytes())["step"]
    except FileNotFoundError:
        return None, None
    except KeyError as error:
        return None, f"cannot be read (it lacks {error})"
    except (OSError, ValueError, TypeError) as error:
        return None, f"cannot be read ({first_line_of(error)})"
    if type(step) is not int:
        return None, f"has the step {repr(step)[:40]}, which is no whole number"
    return run_dir / f"global_step_{step}", None


def metric_of(manifest: Manifest, name: str) -> float | None:
    """A finite metric of a checkpoint, None where there is none."""
    value = manifest.metrics.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _by_age(run_dir: Path, step: int) -> dict[Path, Manifest]:
    """The complete checkpoints, the newest first."""
    found = read_all_complete(run_dir)
    # stable: those up to `step` stay the newest first, and so do those beyond it
    return dict(sorted(found.items(), key=lambda item: (step_of(item[0]) or 0) > step))


def _best(checkpoints: dict[Path, Manifest], retention: Retention) -> list[Path]:
    """The best `keep_best`; of equal ones the newer."""
    values = {path: metric_of(manifest, retention.best_metric) for path, manifest in checkpoints.items()}
    measured = {path: value for path, value in values.items() if value is not None}
    sign = 1 if retention.best_mode == "min" else -1
    return sorted(measured, key=lambda path: sign * measured[path])[: retention.keep_best]


def holds_on(checkpoint: Path) -> list[str]:
    """What holds a checkpoint whatever its age: a file in it, a reader's lease, `best_checkpoint.json`."""
    chosen, problem = read_choice(checkpoint.parent)
    named = [f"{BEST} names it"] if checkpoint == chosen else []
    return reasons_held(checkpoint) + named + ([f"{BEST} {problem}"] if problem else [])


def reasons_held(checkpoint: Path) -> list[str]:
    """What in a checkpoint itself holds it."""
    keep = [f"it holds a file '{KEEP}'"] if (checkpoint / KEEP).exists() else []
    return keep + [f"leased by {holder}" for holder in lease_holders(checkpoint)]


def _one_of(number: int, kind: str) -> str:
    return f"the {kind}" if number == 1 else f"one of the {number} {kind}"


def _require_whole(key: str, value: Any, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise UserError(f"{key} is {value!r}; it must be a whole number of at least {lowest}")
