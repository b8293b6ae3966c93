"""A run directory that is not on a file system of all nodes."""

from __future__ import annotations

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
