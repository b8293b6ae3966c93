"""The files of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from eval_pipeline.adaptive.compare import Comparison
from eval_pipeline.adaptive.curves import plot_curves
from eval_pipeline.adaptive.plot import plot_pareto
from eval_pipeline.adaptive.source import ControllerSource
from eval_pipeline.adaptive.text import markdown_text
from eval_pipeline.report.results import write_json, write_text
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.errors import UserError
from verl_ext.files import replacing

DATA_FILE, TABLE_FILE, MATRICES_FILE = "adaptive.json", "adaptive.md", "adaptive.npz"


def write_comparison(
    directory: Path,
    comparison: Comparison,
    space: ConfigurationSpace,
    about: Mapping[str, Any],
    source: ControllerSource,
) -> None:
    """Write `adaptive.json`, `adaptive.md`, `adaptive.npz`, `pareto.png`, and of a run `curves.png`.

    Args:
        directory: for the files.
        comparison: what was found.
        space: of the configurations.
        about: what it was made by, plain values.
        source: of the controller.

    Raises:
        UserError: they cannot be written.
    """
    with writing_to(directory):
        write_matrices(directory / MATRICES_FILE, comparison)
        plots = {"accuracy against latency": plot_pareto(directory, comparison)}
        if (curves := plot_curves(directory, source)) is not None:
            plots["the training's curves"] = curves
    write_json(directory / DATA_FILE, {**about, **content(comparison, space)})
    write_text(directory / TABLE_FILE, markdown_text(comparison, space, about, plots))


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Make a directory, and say in one sentence what keeps it from being written to.

    Raises:
        UserError: it cannot be.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write to {directory} ({error}); name another --output") from error


def try_out(directory: Path) -> None:
    """Write something, before hours go into what is to be written.

    Raises:
        UserError: it cannot be.
    """
    with writing_to(directory), TemporaryFile(dir=directory):
        pass


def content(comparison: Comparison, space: ConfigurationSpace) -> dict[str, Any]:
    """What was found, as plain values."""
    statics = [static_entry(comparison, space, place) for place in range(len(comparison.statics))]
    table = zip(comparison.budgets_ms, comparison.table)
    return {
        "budgets_ms": list(comparison.budgets_ms),
        "summary": asdict(comparison.summary),
        "rows": [asdict(row) for row in comparison.rows],
        "statics": statics,
        "pareto_front": comparison.front,
        "lookup_table": [
            {"budget_ms": budget, "static": place, "configuration": statics[place]["configuration"]}
            for budget, place in table
        ],
    }


def static_entry(comparison: Comparison, space: ConfigurationSpace, place: int) -> dict[str, Any]:
    """What a static configuration came to, on training questions and on the others."""
    found: dict[str, Any] = {"configuration": described(comparison.statics[place], space)}
    for split, results in {"train": comparison.measured.train, "held_out": comparison.measured.statics}.items():
        latency = results.latency_ms[:, place]
        p50, p95 = np.percentile(latency, [50, 95]).tolist()
        found[split] = {
            "accuracy": float(results.accuracy[:, place].mean()),
            "latency_ms_mean": float(latency.mean()),
            "latency_ms_p50": p50,
            "latency_ms_p95": p95,
            "violation_rates": [float((latency > budget).mean()) for budget in comparison.budgets_ms],
        }
    return {**found, "complexity": space.complexity(comparison.statics[place])}


def described(configuration: Configuration, space: ConfigurationSpace) -> dict[str, Any]:
    """A configuration as plain values; `blocks` has a 1 for each that runs."""
    return {
        "tier": space.tiers[configuration.tier],
        "blocks": "".join(str(int(runs)) for runs in configuration.blocks),
        "topk": list(configuration.topk),
    }


def write_matrices(path: Path, comparison: Comparison) -> None:
    """Write every matrix, (samples, columns), as `<method>_accuracy`, `<method>_latency_ms` and so on."""
    found = {"train": comparison.measured.train, "statics": comparison.measured.statics, **comparison.methods}
    arrays = {f"{name}_{part}": array for name, results in found.items() for part, array in vars(results).items()}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays, deciding_ms=comparison.measured.deciding)
