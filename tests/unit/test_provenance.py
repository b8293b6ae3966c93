"""What an attempt records about its origin."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from verl_ext.config.provenance import config_provenance, git_commit, launch_provenance
from verl_ext.config.schema import to_yaml
from verl_ext.trainer.stages import load_config


def git(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    return subprocess.run(
        ("git", "-C", directory, *identity, *words), check=True, capture_output=True, text=True
    ).stdout


def test_commit_is_read_from_checkouts_and_worktrees(tmp_path: Path) -> None:
    checkout, other = tmp_path / "checkout", tmp_path / "other"
    checkout.mkdir()
    assert git_commit(checkout) is None and git_commit(None) is None
    git(checkout, "init", "-q", "-b", "main")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "first")
    git(checkout, "worktree", "add", "-q", "-b", "side/branch", str(other))
    git(other, "commit", "-q", "--allow-empty", "-m", "second")
    for each in (checkout, other):
        assert git_commit(each) == git(each, "rev-parse", "HEAD").strip()
    git(checkout, "pack-refs", "--all")
    assert git_commit(other) == git(other, "rev-parse", "HEAD").strip() != git_commit(checkout)
    git(checkout, "checkout", "-q", "--detach")
    assert git_commit(checkout) == git(checkout, "rev-parse", "main").strip()


def test_command_and_environment_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        **{"NCCL_DEBUG": "INFO", "NCCL_NOTE": "sk-0123456789abcdef", "VERL_EXT_MONITOR_TOKEN": "secret-secret"},
        **{"HOME": "/root", "CUDA_URL": "http://a:b@host"},
    }
    monkeypatch.setattr(os, "environ", {**environment, "OPENAI_API_KEY": "sk-0123456789abcdef"})
    provenance = launch_provenance("bash run_sft.sh", ["2", "a=b c", "x=sk-0123456789abcdef", "engine.api_key=1"])
    assert provenance["command"] == "bash run_sft.sh 2 'a=b c' 'x=***' 'engine.api_key=***'"
    assert provenance["environment"] == {"NCCL_DEBUG": "INFO", "NCCL_NOTE": "***"}
    assert {"torch", "transformers", "numpy"} <= provenance["packages"].keys()


def test_changed_settings_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    former, now = (load_config("sft", [f"optim.lr={lr}", "trainer.logger=[]"]) for lr in (1e-5, 2e-5))
    provenance = config_provenance(now, path)
    assert provenance["config_changes"] == {} and "optim.lr" in provenance["config_defaults"]
    assert "optim.lr_scheduler" not in provenance["config_defaults"]
    path.write_text(to_yaml(former))
    assert config_provenance(now, path)["config_changes"] == {"optim.lr": [1e-5, 2e-5]}
    assert not capsys.readouterr().err
    path.write_text("- damaged")
    assert config_provenance(now, path)["config_changes"] == {}
    assert "warning: the settings that changed since the previous attempt are not recorded: " in capsys.readouterr().err
