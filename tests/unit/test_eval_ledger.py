"""The work ledger, with real processes that claim, die and come back."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from eval_pipeline import jobs as jobs_module
from eval_pipeline.jobs import EXPIRY_S, LEDGER_FILE, Job, JobQueue, ProcessId
from tests.helpers import ROOT
from tests.helpers.processes import wait_until
from verl_ext.errors import UserError

CLAIM_ALL = """
import sys
from pathlib import Path
from eval_pipeline.jobs import JobQueue

ledger = JobQueue(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
wanted = [(f"step_{number}", "d", "x") for number in range(60)]
while (job := ledger.claim(wanted)) is not None:
    print(job.checkpoint, flush=True)
    assert ledger.finish(job, {})
"""
ENTER_AND_WAIT = """
import sys
from pathlib import Path
from eval_pipeline.jobs import JobQueue

ledger = JobQueue(Path(sys.argv[1]))
ledger.add("step_1", "d", 1, sys.argv[2])
print(ledger.claim([("step_1", "d", sys.argv[2])]) is not None, flush=True)
sys.stdin.readline()
"""
ENTER_BOTH = """
import sys
from pathlib import Path
from eval_pipeline.jobs import JobQueue

ledger = JobQueue(Path(sys.argv[1]))
wanted = [("step_1", "d", "y"), ("step_2", "d", "y")]
for line in sys.stdin:
    for name, dataset, digest in [wanted[1]] if line == "second\\n" else wanted:
        ledger.add(name, dataset, 1, digest)
    job = ledger.claim(wanted)
    print(job and job.checkpoint, flush=True)
"""
WANTED = [("step_1", "d", "x")]


def start(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, **pipes)


def say(process: subprocess.Popen[str], line: str) -> None:
    process.stdin.write(line)
    process.stdin.flush()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def ledger(tmp_path: Path) -> JobQueue:
    """One pending job of `WANTED`."""
    ledger = JobQueue(tmp_path, max_attempts=3, backoff_s=10)
    ledger.add("step_1", "d", 1, "x")
    return ledger


def only(ledger: JobQueue) -> Job:
    (job,) = ledger.jobs()
    return job


def rewrite(ledger: JobQueue, **values: object) -> None:
    """Change the row behind the ledger's back, as a process on another machine would."""
    with sqlite3.connect(ledger.path) as database:
        database.execute(f"UPDATE jobs SET {', '.join(f'{name}=?' for name in values)}", tuple(values.values()))


def row_of(ledger: JobQueue) -> dict[str, object]:
    with sqlite3.connect(ledger.path) as database:
        database.row_factory = sqlite3.Row
        return dict(database.execute("SELECT * FROM jobs").fetchone())


def test_each_job_is_had_by_exactly_one_of_several_processes(tmp_path: Path) -> None:
    workers = [start(CLAIM_ALL, tmp_path) for _ in range(4)]  # they also make the file at the same time
    assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 4
    ledger = JobQueue(tmp_path)
    for number in range(60):
        ledger.add(f"step_{number}", "d", 1, "x")
    for worker in workers:
        say(worker, "go\n")
    had = [worker.communicate()[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert Counter(name for names in had for name in names) == Counter(f"step_{number}" for number in range(60))
    assert {job.state for job in ledger.jobs()} == {"done"}


def test_a_claim_is_kept_while_its_process_lives_and_free_when_it_was_killed(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    ledger = JobQueue(tmp_path)
    assert ledger.claim(WANTED) is None
    assert (only(ledger).state, only(ledger).worker.split()[:2]) == ("running", ["process", str(holder.pid)])
    kill(holder)
    assert (only(ledger).state, only(ledger).worker) == ("pending", None)
    assert ledger.claim(WANTED).attempts == 0
    assert only(ledger).worker.startswith(f"process {os.getpid()} on ")


def test_a_zombie_holds_nothing(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
    assert JobQueue(tmp_path).claim(WANTED) is not None
    kill(holder)


def test_a_claim_of_another_host_is_free_when_it_was_not_renewed_for_long(ledger: JobQueue) -> None:
    job = ledger.claim(WANTED)
    renewed = row_of(ledger)["renewed"]
    rewrite(ledger, host="elsewhere/1")
    assert ledger.claim(WANTED) is None and only(ledger).state == "running"
    rewrite(ledger, renewed=renewed - EXPIRY_S + 30)
    assert ledger.claim(WANTED) is None
    rewrite(ledger, renewed=renewed - EXPIRY_S - 1)
    assert only(ledger).state == "pending"
    assert ledger.claim(WANTED) == job


def test_a_process_of_the_same_number_born_later_is_another(ledger: JobQueue) -> None:
    ledger.claim(WANTED)
    rewrite(ledger, born=row_of(ledger)["born"] - 1)
    assert ledger.claim(WANTED) is not None


def lose_to_another_host(ledger: JobQueue) -> None:
    rewrite(ledger, host="elsewhere/1")


def lose_to_another_digest(ledger: JobQueue) -> None:
    ledger.add("step_1", "d", 1, "y")
    assert ledger.claim([("step_1", "d", "y")]) is not None


def lose_by_its_end(ledger: JobQueue) -> None:
    assert ledger.finish(only(ledger), {"active_s": 1.0})


@pytest.mark.parametrize("lose", [lose_to_another_host, lose_to_another_digest, lose_by_its_end])
def test_who_has_lost_a_claim_changes_nothing(ledger: JobQueue, lose) -> None:
    job = ledger.claim(WANTED)
    lose(ledger)
    before = row_of(ledger)
    seconds = {"active_s": 5.0}
    assert not ledger.record_seconds(job, seconds)
    assert not ledger.finish(job, seconds)
    assert not ledger.fail(job, "no", seconds)
    assert not ledger.release(job, seconds)
    assert row_of(ledger) == before


def test_renewal_and_end_keep_the_times(ledger: JobQueue) -> None:
    job = ledger.claim(WANTED)
    rewrite(ledger, renewed=1.0)
    assert ledger.record_seconds(job, {"active_s": 2.5}) and row_of(ledger)["renewed"] > 1.0
    assert only(ledger).seconds == {"active_s": 2.5}
    assert ledger.finish(job, {"active_s": 4.0})
    done = only(ledger)
    assert (done.state, done.seconds, done.worker, done.error) == ("done", {"active_s": 4.0}, None, None)
    assert done.started <= done.ended


def test_the_pause_doubles_and_the_last_failure_stays_readable(ledger: JobQueue) -> None:
    pauses = []
    for attempt in (1, 2):
        assert ledger.fail(ledger.claim(WANTED), f"attempt {attempt} broke", {"active_s": 1.0 * attempt})
        job = only(ledger)
        assert (job.state, job.attempts, job.error) == ("pending", attempt, f"attempt {attempt} broke")
        assert job.seconds == {"active_s": 1.0 * attempt}
        pauses.append(job.not_before - job.ended)
        assert ledger.claim(WANTED) is None  # not before the pause is over
        rewrite(ledger, not_before=0)
    assert pauses == pytest.approx([10, 20], abs=1)
    assert ledger.fail(ledger.claim(WANTED), "the third time", {})
    assert (only(ledger).state, only(ledger).attempts, only(ledger).error) == ("failed", 3, "the third time")
    assert only(ledger).has_ended and ledger.claim(WANTED) is None


def test_a_release_counts_no_attempt(ledger: JobQueue) -> None:
    for _ in range(5):
        assert ledger.release(ledger.claim(WANTED), {"active_s": 3.0})
    assert (only(ledger).state, only(ledger).attempts, only(ledger).seconds) == ("pending", 0, {"active_s": 3.0})


def test_another_digest_makes_a_job_due_again_and_drops_its_history(ledger: JobQueue) -> None:
    ledger.fail(ledger.claim(WANTED), "broken", {"active_s": 9.0})
    ledger.add("step_1", "d", 1, "y")
    job = only(ledger)
    assert (job.state, job.digest, job.attempts, job.not_before, job.error) == ("pending", "y", 0, 0, None)
    assert (job.seconds, job.started, job.ended) == ({}, None, None)
    assert ledger.claim(WANTED) is None  # of the digest that it had
    assert ledger.claim([("step_1", "d", "y")]) is not None


def test_the_same_digest_leaves_a_job_as_it_is(ledger: JobQueue) -> None:
    ledger.finish(ledger.claim(WANTED), {"active_s": 1.0})
    before, content = row_of(ledger), ledger.path.read_bytes()
    ledger.add("step_1", "d", 2, "x")
    assert row_of(ledger) == before
    assert ledger.path.read_bytes() == content  # a look at a thousand checkpoints writes nothing


def test_a_job_keeps_the_lowest_tier(tmp_path: Path) -> None:
    ledger = JobQueue(tmp_path)
    for tier in (3, 1, 2):
        ledger.add("step_1", "d", tier, "x")
    assert only(ledger).tier == 1


def test_another_digest_waits_while_another_process_is_at_work(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    ledger = JobQueue(tmp_path)
    ledger.add("step_1", "d", 1, "y")
    assert (only(ledger).digest, only(ledger).state) == ("x", "running")
    kill(holder)
    ledger.add("step_1", "d", 1, "y")
    assert (only(ledger).digest, only(ledger).state) == ("y", "pending")


def test_what_a_living_process_wants_done_is_not_undone_by_other_settings(tmp_path: Path) -> None:
    owner = start(ENTER_AND_WAIT, tmp_path, "x")
    assert owner.stdout.readline() == "True\n"
    ledger = JobQueue(tmp_path)
    rewrite(ledger, state="done", **dict.fromkeys(("worker", "host", "pid", "born", "renewed")))
    ledger.add("step_1", "d", 1, "y")
    assert (only(ledger).digest, only(ledger).state) == ("x", "done")
    kill(owner)
    ledger.add("step_1", "d", 1, "y")
    assert (only(ledger).digest, only(ledger).state) == ("y", "pending")


def test_of_two_that_wait_for_each_other_the_first_goes_on(tmp_path: Path) -> None:
    ledger = JobQueue(tmp_path)
    wanted = [("step_1", "d", "x"), ("step_2", "d", "x")]
    ledger.add(*wanted[0][:2], 1, "x")
    other = start(ENTER_BOTH, tmp_path)
    say(other, "second\n")  # enters what this process enters too late
    assert other.stdout.readline() == "None\n"  # and does not begin, for step_1 is not its own
    ledger.add(*wanted[1][:2], 1, "x")
    assert ledger.claim(wanted) is None
    say(other, "both\n")
    assert other.stdout.readline() == "None\n"
    for key in wanted:
        ledger.add(*key[:2], 1, "x")
    for step in ("step_1", "step_2"):
        job = ledger.claim(wanted)
        assert job is not None and job.checkpoint == step and ledger.finish(job, {})
    say(other, "both\n")
    assert other.stdout.readline() == "None\n"
    assert {job.digest for job in ledger.jobs()} == {"x"}
    kill(other)


def test_who_wants_the_same_after_the_owner_has_died_is_the_next_owner(tmp_path: Path) -> None:
    first = start(ENTER_AND_WAIT, tmp_path, "x")
    assert first.stdout.readline() == "True\n"
    kill(first)
    second = start(ENTER_AND_WAIT, tmp_path, "x")
    assert second.stdout.readline() == "True\n"
    ledger = JobQueue(tmp_path)
    rewrite(ledger, state="done", **dict.fromkeys(("worker", "host", "pid", "born", "renewed")))
    ledger.add("step_1", "d", 1, "y")
    assert only(ledger).digest == "x"
    kill(second)


def test_an_owner_on_another_host_lives_while_it_is_heard_of(ledger: JobQueue) -> None:
    other = ProcessId("elsewhere/1/1", 7, 8)
    rewrite(ledger, owner=other.key)
    with sqlite3.connect(ledger.path) as database:
        database.execute("INSERT INTO owners VALUES (?, ?)", (other.key, time.time() - EXPIRY_S + 30))
    ledger.add("step_1", "d", 1, "y")
    assert only(ledger).digest == "x"
    with sqlite3.connect(ledger.path) as database:
        database.execute("UPDATE owners SET heard=?", (time.time() - EXPIRY_S - 1,))
    ledger.add("step_1", "d", 1, "y")
    assert only(ledger).digest == "y"


def test_a_beat_renews_claims_and_ownership(ledger: JobQueue) -> None:
    ledger.claim(WANTED)
    rewrite(ledger, renewed=1.0)
    with sqlite3.connect(ledger.path) as database:
        database.execute("UPDATE owners SET heard=1")
    before = time.time()
    ledger.send_heartbeat()
    with sqlite3.connect(ledger.path) as database:
        ((heard,),) = database.execute("SELECT heard FROM owners").fetchall()
    assert heard >= before and row_of(ledger)["renewed"] >= before


def test_the_heartbeat_goes_on_while_the_main_thread_is_busy(ledger: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "HEARTBEAT_S", 0.01)
    ledger.claim(WANTED)
    with ledger.heartbeat():
        for _ in range(2):
            rewrite(ledger, renewed=1.0)
            wait_until(lambda: row_of(ledger)["renewed"] != 1.0)


def test_jobs_of_vanished_checkpoints_are_given_up(tmp_path: Path) -> None:
    ledger = JobQueue(tmp_path)
    for label in ("step_1", "step_2", "step_3", "base_model", "step_4"):
        ledger.add(label, "d", 1, "x")
    ledger.claim([("step_2", "d", "x")])
    ledger.finish(ledger.claim([("step_4", "d", "x")]), {})
    assert ledger.fail_removed({"step_1", "step_2", "step_4"}) == [("step_1", "d")]
    states = {job.checkpoint: job.state for job in ledger.jobs()}
    assert states == {
        "step_1": "failed", "step_2": "running", "step_3": "pending", "base_model": "pending", "step_4": "done",
    }  # fmt: skip
    assert "removed" in ledger.jobs()[0].error
    ledger.add("step_1", "d", 1, "x")  # and there it is again
    assert (ledger.jobs()[0].state, ledger.jobs()[0].error) == ("pending", None)


def test_a_vanished_checkpoint_whose_worker_died_is_given_up_too(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    ledger = JobQueue(tmp_path)
    assert ledger.fail_removed({"step_1"}) == []
    kill(holder)
    assert ledger.fail_removed({"step_1"}) == [("step_1", "d")]
    assert (only(ledger).state, only(ledger).worker) == ("failed", None)


def test_retry_makes_failed_and_waiting_jobs_due_at_once(tmp_path: Path) -> None:
    ledger = JobQueue(tmp_path, max_attempts=2)
    for label in ("step_1", "step_2", "step_3"):
        ledger.add(label, "d", 1, "x")
    for label in ("step_1", "step_1", "step_2"):
        rewrite(ledger, not_before=0)
        assert ledger.fail(ledger.claim([(label, "d", "x")]), f"{label} broke", {})
    assert [job.state for job in ledger.jobs()] == ["failed", "pending", "pending"]
    assert [job.checkpoint for job in ledger.retry(only=[("step_2", "d")])] == ["step_2"]
    assert ledger.claim([("step_1", "d", "x")]) is None
    (job,) = ledger.retry()
    assert (job.checkpoint, job.error) == ("step_1", "step_1 broke")
    assert {(job.state, job.attempts, job.not_before) for job in ledger.jobs()} == {("pending", 0, 0)}
    assert ledger.retry() == []


def test_what_was_published_is_remembered(ledger: JobQueue) -> None:
    assert ledger.published_digest("step_1") is None
    ledger.mark_published("step_1", "one")
    ledger.mark_published("step_1", "two")
    again = JobQueue(ledger.path.parent)
    assert (again.published_digest("step_1"), again.tracked_digest("step_1")) == ("two", None)
    again.mark_tracked("step_1", "two")
    ledger.mark_published("step_1", "three")
    assert (ledger.published_digest("step_1"), ledger.tracked_digest("step_1")) == ("three", "two")


@pytest.mark.parametrize("content", [b"no database, but long enough to be taken for one" * 100, None])
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / LEDGER_FILE
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=f"cannot use the ledger {path}"):
        JobQueue(tmp_path)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("ALTER TABLE jobs RENAME COLUMN owner TO wanted_by", "jobs.owner"),
        ("ALTER TABLE jobs RENAME COLUMN seconds TO phases", "jobs.seconds"),
        ("DROP TABLE published; CREATE TABLE published (checkpoint TEXT)", "published.digest"),
    ],
)
def test_a_ledger_of_another_version_is_refused(tmp_path: Path, change: str, missing: str) -> None:
    with closing(JobQueue(tmp_path)) as ledger:
        ledger.add("step_1", "d", 1, "x")
        path = ledger.path
    with closing(sqlite3.connect(path)) as database:
        database.executescript(change)
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{path}, which lacks {missing}; delete the file"):
        JobQueue(tmp_path)
    assert path.read_bytes() == before


def test_a_ledger_with_a_column_more_is_used(tmp_path: Path) -> None:
    JobQueue(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as database:
        database.executescript("ALTER TABLE jobs ADD COLUMN newer TEXT")
    with closing(JobQueue(tmp_path)) as ledger:
        ledger.add("step_1", "d", 1, "x")
        assert ledger.claim([("step_1", "d", "x")]) is not None


def test_a_ledger_that_breaks_while_it_is_open_is_told_in_a_sentence(ledger: JobQueue) -> None:
    ledger.path.write_bytes(b"\0" * 8192)
    for use in (lambda: ledger.jobs(), lambda: ledger.claim(WANTED), lambda: ledger.add("a", "b", 1, "c")):
        with pytest.raises(UserError, match="cannot use the ledger"):
            use()


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use the ledger"):
        JobQueue(tmp_path / "file" / "eval")
