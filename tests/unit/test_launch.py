"""The command line before any rank starts: words, what is imported, and how failed ranks are told."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import ROOT
from verl_ext.checkpoint.lock import exclusive
from verl_ext.errors import UserError
from verl_ext.launch.arguments import parse_arguments
from verl_ext.launch.configure import configure
from verl_ext.launch.outcome import describe
from verl_ext.launch.torchrun import torchrun_options


def test_words_are_a_number_of_processes_and_overrides() -> None:
    arguments = parse_arguments(["sft", "8", "recipe=x", "optim.lr=1", "~data.val_files", "+a.b=2"])
    assert arguments.num_processes == 8
    assert arguments.overrides == ["recipe=x", "optim.lr=1", "~data.val_files", "+a.b=2"]
    assert parse_arguments(["sft", "--print-config"]).num_processes is None


@pytest.mark.parametrize("words", [["0"], ["two"], ["-1"], ["2", "3"], ["2", "--resume"], ["²"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match=f"{words[-1]}.*; see `bash run_sft.sh --help`"):
        parse_arguments(["sft", *words])


@pytest.mark.parametrize(("word", "heavy"), [("--help", "omegaconf"), ("--print-config", "torch")])
def test_help_and_print_config_import_nothing_heavy(word: str, heavy: str) -> None:
    code = (
        "import sys\nfrom verl_ext.launch.__main__ import main\n"
        f"sys.argv = ['launch', 'sft', {word!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"sys.exit({heavy!r} in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "quickstart" in result.stdout


def test_torchrun_gets_the_nodes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    config = OmegaConf.create({"trainer": {"nnodes": 2, "n_gpus_per_node": 8}})
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    options = torchrun_options(config)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=host0", "--master-port=1234"} <= set(options)
    config.trainer.nnodes = 1
    assert "--rdzv-backend=loopback" in torchrun_options(config)  # a free port, so that two runs share a machine


def test_two_launches_in_one_run_directory(tmp_path: Path) -> None:
    with exclusive(tmp_path):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
            with exclusive(tmp_path):
                pass
    with exclusive(tmp_path):
        assert str(os.getpid()) in (tmp_path / "run.lock").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [("NNODES", "0"), ("NNODES", "two"), ("NODE_RANK", "1"), ("NODE_RANK", "x"), ("MASTER_PORT", "x")],
)
def test_a_bad_node_environment_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name} is '{value}'"):
        configure(parse_arguments(["sft", "2"]))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["sft"], "no number of processes is given; type for example `bash run_sft.sh 2`"),
        (["grpo"], "bash run_grpo.sh 2"),
        (["sft", "2", "trainer.nnodes=2"], "'trainer.nnodes=2' contradicts NNODES"),
        (["sft", "2", "trainer.n_gpus_per_node=4"], "'trainer.n_gpus_per_node=4' contradicts NNODES"),
    ],
)
def test_the_number_of_ranks_is_said_once_and_in_its_place(words: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        configure(parse_arguments(words))


@dataclass
class FakeFailure:
    exitcode: int
    message: str
    timestamp: int
    pid: int = 7

    def signal_name(self) -> str:
        return "SIGKILL"


def test_the_rank_that_refused_its_input_is_the_reason_not_those_it_took_along() -> None:
    failures = {0: FakeFailure(1, "connection closed", 1), 1: FakeFailure(2, "the file is empty", 2)}
    failure = describe(failures)
    assert (failure.message, failure.is_user_error) == ("the file is empty", True)
    killed = describe({1: FakeFailure(-9, "", 5), 0: FakeFailure(1, "", 6)})
    assert (killed.message, killed.is_user_error) == ("rank 1 (process 7) was killed by SIGKILL", False)


@pytest.mark.parametrize("seconds", [(5, 5), (6, 5)])
def test_a_killed_rank_is_the_reason_even_if_its_peer_seems_to_have_failed_first(seconds: tuple[int, int]) -> None:
    failures = {0: FakeFailure(1, "connection closed", seconds[1]), 1: FakeFailure(-9, "", seconds[0])}
    assert describe(failures).message == "rank 1 (process 7) was killed by SIGKILL"
