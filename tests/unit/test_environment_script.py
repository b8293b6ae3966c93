"""scripts/environment.sh never changes an environment that is not this checkout's own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stamp", [None, "cpu of-other-requirements"])
def test_an_environment_behind_a_link_is_refused_and_left_alone(tmp_path: Path, stamp: str | None) -> None:
    shared, checkout = tmp_path / "shared", tmp_path / "checkout"
    (shared / "bin").mkdir(parents=True)
    (shared / "bin/python").write_text("others use this\n")
    if stamp is not None:
        (shared / "requirements.stamp").write_text(stamp + "\n")
    before = {path: path.read_text() for path in shared.rglob("*") if path.is_file()}
    shutil.copytree(ROOT / "requirements", checkout / "requirements")
    (checkout / ".venv").symlink_to(shared)
    environment = {name: value for name, value in os.environ.items() if name != "VERL_EXT_PYTHON"}
    script = f"set -euo pipefail; source {ROOT}/scripts/environment.sh; choose_python"
    run = subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)
    assert run.returncode == 2
    assert "link" in run.stderr and "VERL_EXT_PYTHON" in run.stderr
    assert {path: path.read_text() for path in shared.rglob("*") if path.is_file()} == before
