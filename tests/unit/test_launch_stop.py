"""Stop requests and restarts without ranks: signals, outcomes, pauses, deadlines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from tests.helpers import ROOT
from tests.helpers.trainer import small_config
from verl_ext.checkpoint.manifest import TRACKER, Manifest
from verl_ext.cli import clean_exit
from verl_ext.console import print_line
from verl_ext.errors import STOP_SIGNALS, STOPPED_EXIT_CODE, UserError
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.launch.outcome import (
    Failure,
    HandledStop,
    Outcome,
    Stopped,
    classify_outcome,
    is_crash,
    run_with_restarts,
)
from verl_ext.launch.ranks import outcome_of_error
from verl_ext.launch.report import report
from verl_ext.launch.run import Launch, last_checkpoint
from verl_ext.launch.watcher import EvalWatcher
from verl_ext.metrics.run_record import RunRecord
from verl_ext.processes import StopRequest, StopSignals, hold_stop_signals
from verl_ext.trainer.config import PreemptionConfig, parse_deadline
from verl_ext.trainer.preemption import DEADLINE_VARIABLES, StopVote, deadline_from_environment
from verl_ext.trainer.stages import load_config
from verl_ext.trainer.trainer import PipelineTrainer

TERM = HandledStop(signal.SIGTERM)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    """Stop signals that are handled in this process until the test ends."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGQUIT)}
    listening = StopSignals()
    listening.install()
    yield listening
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_for_signal(seconds: float = 60) -> None:
    """Return only if no signal handler raises."""
    threading.Event().wait(seconds)


def test_signal_is_recorded_and_raised_only_where_allowed(signals: StopSignals) -> None:
    with pytest.raises(StopRequest, match=signal.SIGUSR1.name):
        with signals.raising():
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == [signal.SIGUSR1, signal.SIGTERM]
    with pytest.raises(StopRequest):  # the request was made before
        with signals.raising():
            pytest.fail("the work must not begin")


def test_signal_is_deferred_while_torch_is_imported(signals: StopSignals) -> None:
    ran = []
    with pytest.raises(StopRequest, match=signal.SIGUSR1.name):
        with signals.raising():
            with hold_stop_signals():
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGTERM)
                wait_for_signal(0.1)
                ran.append("import")
            pytest.fail("the work after the import must not begin")
    assert ran and signals.received[0] is signal.SIGUSR1


QUIT, INT, TERM_, USR1, HUP = signal.SIGQUIT, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize(
    ("received", "immediate"),
    [
        ([(TERM_, 0), (TERM_, 2), (USR1, 4), (HUP, 6), (TERM_, 60)], None),
        ([(INT, 0), (INT, 0.9)], None),  # one press, or a wrapper that forwards it
        ([(INT, 0), (INT, 0.9), (INT, 1.1)], INT),
        ([(INT, 0), (INT, 2)], INT),
        ([(TERM_, 0), (INT, 2), (TERM_, 5)], None),
        ([(TERM_, 0), (INT, 2), (INT, 4)], INT),
        ([(INT, 0), (TERM_, 2)], None),
        ([(QUIT, 0)], QUIT),
        ([(TERM_, 0), (QUIT, 0.1)], QUIT),
        ([(INT, 0), (INT, 2), (QUIT, 3)], INT),
    ],
)
def test_only_sigquit_and_a_second_interrupt_stop_immediately(
    received: list[tuple[signal.Signals, float]],
    immediate: signal.Signals | None,
    signals: StopSignals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, moment in received:
        monkeypatch.setattr(time, "monotonic", lambda moment=moment: 1000 + moment)
        os.kill(os.getpid(), number)
    assert signals.received == [number for number, _ in received]
    assert signals.immediate == immediate


LAST_MOMENT = """
import ctypes, signal, sys
from verl_ext.launch.__main__ import handle_stop_signals
libc = ctypes.CDLL(None)
libc.on_exit(libc["raise"], None)  # calls raise(exit code) after Python has restored the default actions
with handle_stop_signals():
    sys.exit({number})
"""


@pytest.mark.parametrize("number", [QUIT, *STOP_SIGNALS])
def test_signal_during_interpreter_exit_keeps_exit_code(number: signal.Signals, tmp_path: Path) -> None:
    code = LAST_MOMENT.format(number=int(number))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment).returncode == number


def test_stop_request_wrapped_in_other_exception_is_raised(signals: StopSignals) -> None:
    """As Python's import system wraps what a signal handler raises in `__set_name__`."""
    with pytest.raises(StopRequest):
        with signals.raising():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_for_signal()
            except StopRequest as request:
                raise RuntimeError("Error calling __set_name__") from request
    with pytest.raises(SystemExit) as left:
        with clean_exit():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_for_signal()
            except StopRequest as request:
                raise RuntimeError("Error calling __set_name__") from request
    assert left.value.code == STOPPED_EXIT_CODE
    with pytest.raises(RuntimeError, match="by itself"):
        with clean_exit():
            raise RuntimeError("by itself")


def test_signal_swallowed_by_destructor_is_raised_later(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    class Signaling:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # where Python puts what a destructor raises
    with pytest.raises(StopRequest):
        with signals.raising():
            Signaling()


def test_stop_during_final_evaluation_is_reported_once(
    signals: StopSignals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher of a finished run waits for the evaluation inside a block that a signal ends."""
    monkeypatch.setattr(EvalWatcher, "_run_once", lambda self: int(not self._stopping.wait(60)))
    watcher = EvalWatcher(load_config("sft", [f"trainer.default_local_dir={tmp_path}", "eval.watch=true"]))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with signals.raising():
        assert watcher.finish(signals) == STOPPED_EXIT_CODE
    watcher.stop(signals)
    assert capsys.readouterr().out.count("Stopped by SIGTERM") == 1


def test_closed_terminal_is_not_an_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        print_line("nobody reads this", stream)
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev
        print_line("nor this", stream)


@dataclass
class Ended:
    """What torch records about a failed rank."""

    exitcode: int
    message: str | dict = ""
    timestamp: int = 1
    pid: int = 7
    error_file: str = "<N/A>"  # torch's name for a missing file

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


@pytest.mark.parametrize(
    ("exit_codes", "request_", "expected"),
    [
        ([], None, None),
        ([], TERM, None),  # asked, but all steps were done
        ([75, 75], None, Stopped(None, 75)),
        ([75], TERM, Stopped(TERM, 75)),
        ([-signal.SIGTERM], TERM, Stopped(TERM, 75)),  # too new to have a handler
        ([128 + signal.SIGTERM], TERM, Failure("rank 0 (process 7) failed with exit code 143", 143)),
        ([-signal.SIGQUIT], None, Failure("rank 0 (process 7) was killed by SIGQUIT", -3)),  # the rank alone
        ([-signal.SIGQUIT], HandledStop(signal.SIGTERM, signal.SIGQUIT), 131),  # a process group, or a whole job
        ([-9, -9], HandledStop(signal.SIGTERM, killed=True, was_too_slow=True), 75),
        ([-9], HandledStop(signal.SIGTERM, signal.SIGINT, killed=True), 130),
        ([-9], TERM, Failure("rank 0 (process 7) was killed by SIGKILL", -9)),  # not by us
        ([75, 1], TERM, Failure("rank 1 (process 7) failed with exit code 1", 1)),
        ([1, -9], HandledStop(signal.SIGTERM, killed=True), Failure("rank 0 (process 7) failed with exit code 1", 1)),
        ([75, 1, 2], TERM, Failure("no", 2)),
    ],
)
def test_outcomes_distinguish_stop_from_crash(
    exit_codes: list[int], request_: HandledStop | None, expected: Outcome | int
) -> None:
    ranks = [Ended(code, "no", error_file="error.json") if code == 2 else Ended(code) for code in exit_codes]
    outcome = classify_outcome(dict(enumerate(ranks)), request_)
    if isinstance(expected, int):
        expected = Stopped(request_, expected)
    assert outcome == expected


@pytest.mark.parametrize("has_saved", [False, True])
def test_ranks_killed_after_their_save_were_not_too_slow(
    has_saved: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("sft", ["trainer.preemption.grace_s=60"])
    config.trainer.default_local_dir = str(tmp_path)
    record = RunRecord(tmp_path)
    record.start_attempt(first_step=0, world_size=1, total_steps=4)
    if has_saved:
        record.end_attempt("stopped", 3, "stopped by SIGTERM after step 3")
    killed = HandledStop(signal.SIGTERM, killed=True, was_too_slow=True)
    assert report(Stopped(killed, 75), config, record) == 75
    told = "".join(capsys.readouterr())
    assert told.startswith("Stopped by SIGTERM" if has_saved else "error: killed after SIGTERM")
    assert record.read()["attempts"][-1]["exit_reason"].startswith("stopped by" if has_saved else "killed after")


CRASH = Failure("rank 0 failed", 1)


def run(outcomes: list[Outcome], progress: list[object], restarts: int) -> tuple[Outcome, list[str], int]:
    """Run with restarts; returns the last outcome, the announcements, and the number of attempts left."""
    left, seen, announced = list(outcomes), iter(progress), []
    last = run_with_restarts(
        lambda: left.pop(0),
        may_restart=is_crash,
        progress=lambda: next(seen),
        announce=lambda failure, plan: announced.append(plan),
        pause=lambda seconds: None,
        restarts=restarts,
    )
    return last, announced, len(left)


def test_new_checkpoint_resets_restart_count() -> None:
    assert run([CRASH], [None, None], 0) == (CRASH, [], 0)
    assert run([CRASH, None], [None, None], 1) == (None, ["restart 1 of 1 in 5 s"], 0)
    crashes: list[Outcome] = [CRASH] * 5
    last, announced, left = run(crashes, [None, None, (5, 1.0), (5, 1.0), (5, 1.0)], 2)
    assert [plan[:14] for plan in announced] == ["restart 1 of 2", "restart 1 of 2", "restart 2 of 2"]
    assert (last, left) == (CRASH, 1)
    assert run(crashes, [(5, 1.0), None, None], 1)[2] == 3  # a checkpoint that was lost is not progress
    stopped = Stopped(None, 75)
    for end in (stopped, Failure("bad data", 2), None):
        assert run([end, CRASH], [None], 3) == (end, [], 1)


def test_restart_pauses_double_up_to_five_minutes() -> None:
    pauses: list[float] = []
    run_with_restarts(
        lambda: CRASH,
        may_restart=is_crash,
        progress=lambda: None,
        announce=lambda failure, plan: None,
        pause=pauses.append,
        restarts=8,
    )
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300]


def test_only_complete_checkpoint_counts_as_progress(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "global_step_4").mkdir()
    (tmp_path / TRACKER).write_text("4")
    assert last_checkpoint(tmp_path) is None
    manifest = Manifest(step=4, world_size=1, config_digest="", files={}, time=12.5)
    (tmp_path / "global_step_4/manifest.json").write_text(manifest.to_json())
    assert last_checkpoint(tmp_path) == (4, 12.5)


def test_restart_records_why_rank_died_instead_of_lost_connection(quickstart: Path, tmp_path: Path) -> None:
    config = small_config(quickstart, tmp_path)
    record = RunRecord(tmp_path)
    record.start_attempt(first_step=0, world_size=2, total_steps=10)
    record.end_attempt("failed", 3, "RuntimeError: Connection closed by peer")
    Launch(config, StopSignals(), record, {}).announce_restart(Failure("rank 1 was killed by SIGKILL", -9), "restart")
    assert record.read()["attempts"][0]["exit_reason"] == "rank 1 was killed by SIGKILL"


@pytest.mark.parametrize("words", [["2", "--restarts", "3", "a=b"], ["--restarts=3", "a=b", "2"]])
def test_accepts_restarts_option_in_any_position(words: list[str]) -> None:
    arguments = parse_arguments(["sft", *words])
    assert (arguments.restarts, arguments.num_processes, arguments.overrides) == (3, 2, ["a=b"])
    assert parse_arguments(["sft", "2"]).restarts == 0


@pytest.mark.parametrize("words", [["--restarts", "-1"], ["--restarts=x"], ["--restarts=1.5"], ["--restarts"]])
def test_rejects_non_integer_restarts(words: list[str]) -> None:
    with pytest.raises(UserError, match="--restarts.*; see `bash run_sft.sh --help`"):
        parse_arguments(["sft", "2", *words])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (1900000000, 1900000000),
        (1.9e9, 1900000000),
        ("1900000000", 1900000000),  # as ${oc.env:SLURM_JOB_END_TIME} gives it
        ("2030-01-01T00:00:00Z", 1893456000),
        ("2030-01-01T01:30:00+01:30", 1893456000),
    ],
)
def test_parses_deadline_as_seconds_or_iso_8601(value: object, seconds: float | None) -> None:
    assert parse_deadline(value) == seconds


@pytest.mark.parametrize("value", [True, "tomorrow", "2030-01-01T00:00:00", "", float("nan"), "inf", [1]])
def test_rejects_invalid_deadline(value: object) -> None:
    with pytest.raises(UserError, match="trainer.preemption.deadline is .*seconds since 1970"):
        parse_deadline(value)


@pytest.mark.parametrize(
    ("preemption", "names"),
    [
        ("grace_s=0", "grace_s is 0; it must be a number above 0"),
        ("grace_s=true", "grace_s' to True"),
        ("grace_s=long", "grace_s' to 'long'"),
        ("grace_s=inf", "grace_s is inf"),
        ("deadline='2020-01-01T00:00:00Z'", "deadline is 2020-01-01T00:00:00Z, which is in the past"),
        ("deadline=-1e20", "which is in the past"),
        ("deadline=soon", "deadline is 'soon'; set"),
    ],
)
def test_rejects_contradictory_preemption_settings(preemption: str, names: str) -> None:
    preemption_of().check_deadline_ahead()
    preemption_of("grace_s=0.5", f"deadline={time.time() + 60}").check_deadline_ahead()
    with pytest.raises(UserError, match=f"trainer.preemption.*{names}"):
        preemption_of(preemption).check_deadline_ahead()


def preemption_of(*words: str) -> PreemptionConfig:
    return load_config("sft", [f"trainer.preemption.{word}" for word in words]).trainer.preemption


def test_reads_deadlines_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    for name in DEADLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert deadline_from_environment(warnings.append) is None
    now = int(time.time())
    monkeypatch.setenv(DEADLINE_VARIABLES[0], str(now + 2000))
    monkeypatch.setenv(DEADLINE_VARIABLES[1], str(now + 1000))
    assert deadline_from_environment(warnings.append) == now + 1000
    monkeypatch.setenv(DEADLINE_VARIABLES[1], str(now - 1000))  # of a capacity block that was
    assert deadline_from_environment(warnings.append) == now + 2000
    assert not warnings
    monkeypatch.setenv(DEADLINE_VARIABLES[0], "soon")
    assert deadline_from_environment(warnings.append) is None
    assert warnings == [f"{DEADLINE_VARIABLES[0]} is 'soon' instead of seconds since 1970, so this run ignores it"]


@pytest.mark.parametrize("num_nodes, advice", [(1, ""), (2, "; start the command on every node, with one MASTER_ADDR")])
def test_rendezvous_timeout_fails_launch(num_nodes: int, advice: str) -> None:
    failure = outcome_of_error(num_nodes, RendezvousTimeoutError("2 of 3 came\nand more"))
    told = f"torchrun could not bring the ranks together (2 of 3 came){advice}"
    assert failure.message.startswith(told) and failure.exit_code == 1
    with pytest.raises(KeyError):
        outcome_of_error(num_nodes, KeyError("a fault of ours"))


def test_short_grace_period_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    vote = StopVote(None, None, grace_s=60.0)
    config = load_config("sft", [])
    trainer: Any = SimpleNamespace(stop_vote=vote, is_main=True, grace_warnings=set(), config=config)
    vote.expected_save_s = 50.0
    PipelineTrainer.warn_if_grace_is_short(trainer)
    assert capsys.readouterr().err == ""
    vote.note(step_s=20.0)
    for _ in range(2):
        PipelineTrainer.warn_if_grace_is_short(trainer)
    expected = "a step and a save may take 70 s, but trainer.preemption.grace_s=60, so a stop abandons the step"
    assert capsys.readouterr().err.startswith(f"warning: {expected}") and len(trainer.grace_warnings) == 1
    vote.note(save_s=70.0)
    for _ in range(2):
        PipelineTrainer.warn_if_grace_is_short(trainer)
    expected = "a save may take 70 s, but trainer.preemption.grace_s=60, so a stop loses the steps after the last save"
    assert capsys.readouterr().err.startswith(f"warning: {expected}") and len(trainer.grace_warnings) == 2
    trainer.grace_warnings.clear()
    vote.longest_save_s = 30.0
    PipelineTrainer.warn_if_grace_is_short(trainer)
    assert capsys.readouterr().err == ""
    config.trainer.checkpoint.async_save = True  # a stop may wait for a save in progress before its own
    PipelineTrainer.warn_if_grace_is_short(trainer)
    assert "a step and a save may take 80 s" in capsys.readouterr().err
