"""The job queue, with real processes that claim jobs, die and resume."""

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

queue = JobQueue(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
wanted = [(f"step_{number}", "d", "x") for number in range(60)]
while (job := queue.claim(wanted)) is not None:
    print(job.checkpoint, flush=True)
    assert queue.finish(job, {})
"""
ENTER_AND_WAIT = """
import sys
from pathlib import Path
from eval_pipeline.jobs import JobQueue

queue = JobQueue(Path(sys.argv[1]))
queue.add_all([("step_1", "d", 1, sys.argv[2])])
print(queue.claim([("step_1", "d", sys.argv[2])]) is not None, flush=True)
sys.stdin.readline()
"""
ENTER_BOTH = """
import sys
from pathlib import Path
from eval_pipeline.jobs import JobQueue

queue = JobQueue(Path(sys.argv[1]))
wanted = [("step_1", "d", "y"), ("step_2", "d", "y")]
for line in sys.stdin:
    for name, dataset, digest in [wanted[1]] if line == "second\\n" else wanted:
        queue.add_all([(name, dataset, 1, digest)])
    job = queue.claim(wanted)
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
def queue(tmp_path: Path) -> JobQueue:
    """One pending job of `WANTED`."""
    queue = JobQueue(tmp_path, max_attempts=3, backoff_s=10)
    queue.add_all([("step_1", "d", 1, "x")])
    return queue


def only(queue: JobQueue) -> Job:
    (job,) = queue.jobs()
    return job


def rewrite(queue: JobQueue, **values: object) -> None:
    """Change the row directly in the database, as a process on another machine would."""
    with sqlite3.connect(queue.path) as database:
        database.execute(f"UPDATE jobs SET {', '.join(f'{name}=?' for name in values)}", tuple(values.values()))


def row_of(queue: JobQueue) -> dict[str, object]:
    with sqlite3.connect(queue.path) as database:
        database.row_factory = sqlite3.Row
        return dict(database.execute("SELECT * FROM jobs").fetchone())


def test_each_job_is_claimed_by_exactly_one_process(tmp_path: Path) -> None:
    workers = [start(CLAIM_ALL, tmp_path) for _ in range(4)]  # they also make the file at the same time
    assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 4
    queue = JobQueue(tmp_path)
    for number in range(60):
        queue.add_all([(f"step_{number}", "d", 1, "x")])
    for worker in workers:
        say(worker, "go\n")
    had = [worker.communicate()[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert Counter(name for names in had for name in names) == Counter(f"step_{number}" for number in range(60))
    assert {job.state for job in queue.jobs()} == {"done"}


def test_claim_is_released_when_its_process_is_killed(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    queue = JobQueue(tmp_path)
    assert queue.claim(WANTED) is None
    assert (only(queue).state, only(queue).worker.split()[:2]) == ("running", ["process", str(holder.pid)])
    kill(holder)
    assert (only(queue).state, only(queue).worker) == ("pending", None)
    assert queue.claim(WANTED).attempts == 0
    assert only(queue).worker.startswith(f"process {os.getpid()} on ")


def test_zombie_process_holds_no_claim(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
    assert JobQueue(tmp_path).claim(WANTED) is not None
    kill(holder)


def test_claim_of_another_host_expires_without_renewal(queue: JobQueue) -> None:
    job = queue.claim(WANTED)
    renewed = row_of(queue)["renewed"]
    rewrite(queue, host="elsewhere/1")
    assert queue.claim(WANTED) is None and only(queue).state == "running"
    rewrite(queue, renewed=renewed - EXPIRY_S + 30)
    assert queue.claim(WANTED) is None
    rewrite(queue, renewed=renewed - EXPIRY_S - 1)
    assert only(queue).state == "pending"
    assert queue.claim(WANTED) == job


def test_reused_pid_does_not_hold_claim(queue: JobQueue) -> None:
    queue.claim(WANTED)
    rewrite(queue, born=row_of(queue)["born"] - 1)
    assert queue.claim(WANTED) is not None


def lose_to_another_host(queue: JobQueue) -> None:
    rewrite(queue, host="elsewhere/1")


def lose_to_another_digest(queue: JobQueue) -> None:
    queue.add_all([("step_1", "d", 1, "y")])
    assert queue.claim([("step_1", "d", "y")]) is not None


def lose_by_its_end(queue: JobQueue) -> None:
    assert queue.finish(only(queue), {"active_s": 1.0})


@pytest.mark.parametrize("lose", [lose_to_another_host, lose_to_another_digest, lose_by_its_end])
def test_worker_that_lost_claim_cannot_change_job(queue: JobQueue, lose) -> None:
    job = queue.claim(WANTED)
    lose(queue)
    before = row_of(queue)
    seconds = {"active_s": 5.0}
    assert not queue.record_seconds(job, seconds)
    assert not queue.finish(job, seconds)
    assert not queue.fail(job, "no", seconds)
    assert not queue.release(job, seconds)
    assert row_of(queue) == before


def test_renewal_and_completion_record_times(queue: JobQueue) -> None:
    job = queue.claim(WANTED)
    rewrite(queue, renewed=1.0)
    assert queue.record_seconds(job, {"active_s": 2.5}) and row_of(queue)["renewed"] > 1.0
    assert only(queue).seconds == {"active_s": 2.5}
    assert queue.finish(job, {"active_s": 4.0})
    done = only(queue)
    assert (done.state, done.seconds, done.worker, done.error) == ("done", {"active_s": 4.0}, None, None)
    assert done.started <= done.ended


def test_backoff_doubles_and_last_error_is_kept(queue: JobQueue) -> None:
    pauses = []
    for attempt in (1, 2):
        assert queue.fail(queue.claim(WANTED), f"attempt {attempt} broke", {"active_s": 1.0 * attempt})
        job = only(queue)
        assert (job.state, job.attempts, job.error) == ("pending", attempt, f"attempt {attempt} broke")
        assert job.seconds == {"active_s": 1.0 * attempt}
        pauses.append(job.not_before - job.ended)
        assert queue.claim(WANTED) is None  # not before the pause is over
        rewrite(queue, not_before=0)
    assert pauses == pytest.approx([10, 20], abs=1)
    assert queue.fail(queue.claim(WANTED), "the third time", {})
    assert (only(queue).state, only(queue).attempts, only(queue).error) == ("failed", 3, "the third time")
    assert only(queue).has_ended and queue.claim(WANTED) is None


def test_release_does_not_count_as_attempt(queue: JobQueue) -> None:
    for _ in range(5):
        assert queue.release(queue.claim(WANTED), {"active_s": 3.0})
    assert (only(queue).state, only(queue).attempts, only(queue).seconds) == ("pending", 0, {"active_s": 3.0})


def test_new_digest_requeues_job_and_clears_history(queue: JobQueue) -> None:
    queue.fail(queue.claim(WANTED), "broken", {"active_s": 9.0})
    queue.add_all([("step_1", "d", 1, "y")])
    job = only(queue)
    assert (job.state, job.digest, job.attempts, job.not_before, job.error) == ("pending", "y", 0, 0, None)
    assert (job.seconds, job.started, job.ended) == ({}, None, None)
    assert queue.claim(WANTED) is None  # claims with the old digest fail
    assert queue.claim([("step_1", "d", "y")]) is not None


def test_same_digest_leaves_job_unchanged(queue: JobQueue) -> None:
    queue.finish(queue.claim(WANTED), {"active_s": 1.0})
    before, content = row_of(queue), queue.path.read_bytes()
    queue.add_all([("step_1", "d", 2, "x")])
    assert row_of(queue) == before
    assert queue.path.read_bytes() == content  # polling checkpoints writes nothing


def test_job_keeps_lowest_tier(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    for tier in (3, 1, 2):
        queue.add_all([("step_1", "d", tier, "x")])
    assert only(queue).tier == 1


def test_new_digest_waits_for_running_worker(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    queue = JobQueue(tmp_path)
    queue.add_all([("step_1", "d", 1, "y")])
    assert (only(queue).digest, only(queue).state) == ("x", "running")
    kill(holder)
    queue.add_all([("step_1", "d", 1, "y")])
    assert (only(queue).digest, only(queue).state) == ("y", "pending")


def test_done_job_of_live_owner_keeps_its_digest(tmp_path: Path) -> None:
    owner = start(ENTER_AND_WAIT, tmp_path, "x")
    assert owner.stdout.readline() == "True\n"
    queue = JobQueue(tmp_path)
    rewrite(queue, state="done", **dict.fromkeys(("worker", "host", "pid", "born", "renewed")))
    queue.add_all([("step_1", "d", 1, "y")])
    assert (only(queue).digest, only(queue).state) == ("x", "done")
    kill(owner)
    queue.add_all([("step_1", "d", 1, "y")])
    assert (only(queue).digest, only(queue).state) == ("y", "pending")


def test_mutual_wait_is_resolved_in_favor_of_first_owner(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    wanted = [("step_1", "d", "x"), ("step_2", "d", "x")]
    queue.add_all([(*wanted[0][:2], 1, "x")])
    other = start(ENTER_BOTH, tmp_path)
    say(other, "second\n")  # adds it before this process does
    assert other.stdout.readline() == "None\n"  # and does not begin, for step_1 is not its own
    queue.add_all([(*wanted[1][:2], 1, "x")])
    assert queue.claim(wanted) is None
    say(other, "both\n")
    assert other.stdout.readline() == "None\n"
    for key in wanted:
        queue.add_all([(*key[:2], 1, "x")])
    for step in ("step_1", "step_2"):
        job = queue.claim(wanted)
        assert job is not None and job.checkpoint == step and queue.finish(job, {})
    say(other, "both\n")
    assert other.stdout.readline() == "None\n"
    assert {job.digest for job in queue.jobs()} == {"x"}
    kill(other)


def test_same_digest_takes_ownership_after_owner_died(tmp_path: Path) -> None:
    first = start(ENTER_AND_WAIT, tmp_path, "x")
    assert first.stdout.readline() == "True\n"
    kill(first)
    second = start(ENTER_AND_WAIT, tmp_path, "x")
    assert second.stdout.readline() == "True\n"
    queue = JobQueue(tmp_path)
    rewrite(queue, state="done", **dict.fromkeys(("worker", "host", "pid", "born", "renewed")))
    queue.add_all([("step_1", "d", 1, "y")])
    assert only(queue).digest == "x"
    kill(second)


def test_owner_on_another_host_lives_until_heartbeat_expires(queue: JobQueue) -> None:
    other = ProcessId("elsewhere/1/1", 7, 8)
    rewrite(queue, owner=other.key)
    with sqlite3.connect(queue.path) as database:
        database.execute("INSERT INTO owners VALUES (?, ?)", (other.key, time.time() - EXPIRY_S + 30))
    queue.add_all([("step_1", "d", 1, "y")])
    assert only(queue).digest == "x"
    with sqlite3.connect(queue.path) as database:
        database.execute("UPDATE owners SET heard=?", (time.time() - EXPIRY_S - 1,))
    queue.add_all([("step_1", "d", 1, "y")])
    assert only(queue).digest == "y"


def test_heartbeat_renews_claims_and_ownership(queue: JobQueue) -> None:
    queue.claim(WANTED)
    rewrite(queue, renewed=1.0)
    with sqlite3.connect(queue.path) as database:
        database.execute("UPDATE owners SET heard=1")
    before = time.time()
    queue.send_heartbeat()
    with sqlite3.connect(queue.path) as database:
        ((heard,),) = database.execute("SELECT heard FROM owners").fetchall()
    assert heard >= before and row_of(queue)["renewed"] >= before


def test_heartbeat_continues_while_main_thread_is_busy(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "HEARTBEAT_S", 0.01)
    queue.claim(WANTED)
    with queue.heartbeat():
        for _ in range(2):
            rewrite(queue, renewed=1.0)
            wait_until(lambda: row_of(queue)["renewed"] != 1.0)


def test_jobs_of_removed_checkpoints_fail(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    for label in ("step_1", "step_2", "step_3", "base_model", "step_4"):
        queue.add_all([(label, "d", 1, "x")])
    queue.claim([("step_2", "d", "x")])
    queue.finish(queue.claim([("step_4", "d", "x")]), {})
    assert queue.fail_removed({"step_1", "step_2", "step_4"}) == [("step_1", "d")]
    states = {job.checkpoint: job.state for job in queue.jobs()}
    assert states == {
        "step_1": "failed", "step_2": "running", "step_3": "pending", "base_model": "pending", "step_4": "done",
    }  # fmt: skip
    assert "removed" in queue.jobs()[0].error
    queue.add_all([("step_1", "d", 1, "x")])  # the checkpoint exists again
    assert (queue.jobs()[0].state, queue.jobs()[0].error) == ("pending", None)


def test_job_of_removed_checkpoint_fails_after_worker_died(tmp_path: Path) -> None:
    holder = start(ENTER_AND_WAIT, tmp_path, "x")
    assert holder.stdout.readline() == "True\n"
    queue = JobQueue(tmp_path)
    assert queue.fail_removed({"step_1"}) == []
    kill(holder)
    assert queue.fail_removed({"step_1"}) == [("step_1", "d")]
    assert (only(queue).state, only(queue).worker) == ("failed", None)


def test_retry_requeues_failed_and_waiting_jobs(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path, max_attempts=2)
    for label in ("step_1", "step_2", "step_3"):
        queue.add_all([(label, "d", 1, "x")])
    for label in ("step_1", "step_1", "step_2"):
        rewrite(queue, not_before=0)
        assert queue.fail(queue.claim([(label, "d", "x")]), f"{label} broke", {})
    assert [job.state for job in queue.jobs()] == ["failed", "pending", "pending"]
    assert [job.checkpoint for job in queue.retry(only=[("step_2", "d")])] == ["step_2"]
    assert queue.claim([("step_1", "d", "x")]) is None
    (job,) = queue.retry()
    assert (job.checkpoint, job.error) == ("step_1", "step_1 broke")
    assert {(job.state, job.attempts, job.not_before) for job in queue.jobs()} == {("pending", 0, 0)}
    assert queue.retry() == []


def test_published_digests_are_persistent(queue: JobQueue) -> None:
    assert queue.published("step_1") == (None, None)
    queue.mark_published("step_1", "one")
    queue.mark_published("step_1", "two")
    again = JobQueue(queue.path.parent)
    assert again.published("step_1") == ("two", None)
    again.mark_tracked("step_1", "two")
    queue.mark_published("step_1", "three")
    assert queue.published("step_1") == ("three", "two")


@pytest.mark.parametrize("content", [b"no database, but long enough to be taken for one" * 100, None])
def test_invalid_ledger_file_is_rejected(tmp_path: Path, content: bytes | None) -> None:
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
def test_ledger_of_another_version_is_rejected(tmp_path: Path, change: str, missing: str) -> None:
    with closing(JobQueue(tmp_path)) as queue:
        queue.add_all([("step_1", "d", 1, "x")])
        path = queue.path
    with closing(sqlite3.connect(path)) as database:
        database.executescript(change)
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{path}, which lacks {missing}; delete the file"):
        JobQueue(tmp_path)
    assert path.read_bytes() == before


def test_ledger_with_extra_column_is_accepted(tmp_path: Path) -> None:
    JobQueue(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as database:
        database.executescript("ALTER TABLE jobs ADD COLUMN newer TEXT")
    with closing(JobQueue(tmp_path)) as queue:
        queue.add_all([("step_1", "d", 1, "x")])
        assert queue.claim([("step_1", "d", "x")]) is not None


def test_ledger_damaged_while_open_raises_user_error(queue: JobQueue) -> None:
    queue.path.write_bytes(b"\0" * 8192)
    for use in (lambda: queue.jobs(), lambda: queue.claim(WANTED), lambda: queue.add_all([("a", "b", 1, "c")])):
        with pytest.raises(UserError, match="cannot use the ledger"):
            use()


def test_unwritable_ledger_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use the ledger"):
        JobQueue(tmp_path / "file" / "eval")
