"""What decides answers and verdicts, as digests: work that was kept is used again only where all of it is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from eval_pipeline.config import EvalConfig
from eval_pipeline.models.checkpoint import Checkpoint
from eval_pipeline.models.integrity import exported_files, has_manifest

_NOT_DECISIVE = ("gpu_memory_utilization", "base_url", "concurrency", "timeout_s", "api_key_env")
"""Engine settings that change how fast and from where an answer comes and not what it is."""


@dataclass(frozen=True)
class Digests:
    """Of one checkpoint on one data set."""

    model: str
    answers: str
    verdicts: str


def digests_of(checkpoint: Checkpoint, problems: str, recipe: EvalConfig, packages: Mapping[str, str]) -> Digests:
    """Digests of the model, of everything that decides the answers, and of that and all that decides the verdicts.

    Args:
        checkpoint: the model.
        problems: digest of the data set's problems.
        recipe: of the evaluation.
        packages: versions of those that programs may import.

    Raises:
        OSError: the export has gone.
    """
    engine = {key: value for key, value in asdict(recipe.engine).items() if key not in _NOT_DECISIVE}
    model = _digest(identity_of(checkpoint))
    answers = _digest(
        {
            "model": model,
            "problems": problems,
            "sampling": asdict(recipe.sampling),
            "batch_size": recipe.batch_size,
            "engine": engine,
        }
    )
    judge = {"answers": answers, "isolation": recipe.judge.isolation, "limits": asdict(recipe.judge.limits)}
    return Digests(model, answers, _digest({**judge, "packages": packages}))


def identity_of(checkpoint: Checkpoint) -> Any:
    """What tells a model from another in the same place.

    Returns:
        The manifest's digests, or sizes and times of the files; what the server says of a model that it has loaded.
    """
    if checkpoint.export is None:
        assert checkpoint.card is not None
        return asdict(checkpoint.card)
    if has_manifest(checkpoint):
        return exported_files(checkpoint)
    return {path.name: _state(path) for path in sorted(checkpoint.export.iterdir()) if path.is_file()}


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _digest(content: Any) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
