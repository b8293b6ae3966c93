"""Which run a run started from, and the chains that follow: SFT, GRPO, evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.checkpoint.manifest import EXPORT, step_of


class Parent(NamedTuple):
    """The run that another run started from, and the step of the checkpoint; None if unknown."""

    path: str
    step: int | None


def origin_of(config: Mapping[str, Any]) -> str:
    """Return the model or run directory that a run started from, as in its configuration; empty if unknown."""
    model = config.get("model")
    found = [model.get(key) for key in ("partial_pretrain", "sft_run")] if isinstance(model, Mapping) else []
    return next((each for each in found if isinstance(each, str)), "")


def parents_of(origins: Mapping[str, str]) -> dict[str, Parent | None]:
    """Return the run that each run started from; None if it is not one of these runs.

    An origin may be a path on another machine, so the names of project and experiment identify the run. Of several runs
    with these names, the one closest to the run itself counts.

    Args:
        origins: by path of each run below the root, see `origin_of`.
    """
    named: dict[tuple[str, ...], list[str]] = {}
    for path in origins:
        named.setdefault(Path(path).parts[-2:], []).append(path)
    return {path: _parent_of(path, Path(origin), named) for path, origin in origins.items()}


def _parent_of(path: str, place: Path, named: Mapping[tuple[str, ...], list[str]]) -> Parent | None:
    place = place.parent if place.name == EXPORT else place
    step = step_of(place)
    place = place if step is None else place.parent
    names = place.parts[-2:]
    if not names:
        return None
    found = [each for each in named.get(names, named.get(names[-1:], [])) if each != path]  # a root may be a project
    return Parent(max(found, key=lambda each: _num_shared(each, path)), step) if found else None


def chains(parents: Mapping[str, Parent | None]) -> Iterator[tuple[str, int]]:
    """Yield every run with its depth: each run is followed by those that started from it.

    Args:
        parents: by path of each run, in the order in which chains are listed: a chain takes the place of its first run.
    """
    children: dict[str, list[str]] = {}
    for path, parent in parents.items():
        if parent is not None:
            children.setdefault(parent.path, []).append(path)
    listed: set[str] = set()

    def descend(path: str, depth: int) -> Iterator[tuple[str, int]]:
        if path not in listed:
            listed.add(path)
            yield path, depth
            for child in children.get(path, []):
                yield from descend(child, depth + 1)

    for path in parents:
        yield from descend(_root_of(path, parents), 0)


def _root_of(path: str, parents: Mapping[str, Parent | None]) -> str:
    """Return the first run of a chain; of a circle, which damaged files could name, any."""
    seen = {path}
    while (parent := parents.get(path)) is not None and parent.path not in seen:
        path = parent.path
        seen.add(path)
    return path


def _num_shared(one: str, other: str) -> int:
    """Return the number of leading directories that two paths share."""
    pairs = zip(Path(one).parts, Path(other).parts)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), 0)
