"""Nodes that do not agree: other settings, or a run directory that is not on a file system of all nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.commands import torchrun


@pytest.mark.parametrize("is_shared", [True, False])
def test_run_directory_of_another_node_is_refused(is_shared: bool, tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / ("node0" if is_shared else "node1")]
    for node in nodes:
        (node / "run").mkdir(parents=True, exist_ok=True)
    torchrun(2, "tests.ranks.shared_directory", *(node / "run" for node in nodes))
    for rank, node in enumerate(nodes):
        message = (node / f"result_{rank}").read_text()
        assert ("is not the same on node 1" in message) != is_shared, message
        assert not list((node / "run").iterdir())


def test_other_settings_on_one_node_are_refused_but_not_other_paths(tmp_path: Path) -> None:
    for node in "abc":
        (tmp_path / node).mkdir()
        (tmp_path / node / "train.parquet").touch()
    same = {"optim.lr": 0.1, "data.train_max_samples": None}
    settings = [
        same | {"data.train_files": [f"{tmp_path}/a/train.parquet"]},
        same | {"data.train_files": [f"{tmp_path}/b/train.parquet"]},
    ]
    assert compare(settings, tmp_path) == {""}
    settings.append(settings[0] | {"optim.lr": 0.2, "data.train_max_samples": 5})
    assert compare(settings, tmp_path) == {
        "the first node and node 2 have different settings (data.train_max_samples: None and 5, optim.lr: 0.1 and "
        "0.2); start the same command on every node"
    }


def compare(settings: list[dict[str, object]], directory: Path) -> set[str]:
    """Messages of all ranks."""
    torchrun(len(settings), "tests.ranks.same_settings", *map(json.dumps, settings), directory)
    return {(directory / f"result_{rank}").read_text() for rank in range(len(settings))}
