"""Runs answers in the two sandboxes of a worker: one for answers and their supervisor, and one for tests."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import json
import marshal
import socket
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import accumulate
from typing import Any, NamedTuple, get_args

from eval_pipeline.judge.inside import protocol
from eval_pipeline.judge.inside.protocol import PRELOADED
from eval_pipeline.judge.isolation import IsolationLevel, Role
from eval_pipeline.judge.sandbox import SandboxError, Zygote, readable, sealed_file
from eval_pipeline.judge.types import FunctionOutcome, FunctionTests, ResourceLimits, RunEnd, RunReport

_MAX_ANSWERS = 300
"""Answers per supervisor, and tests per tester, so that leaks do not accumulate."""
_LOST_S = 1.0
"""How long an answer may take to exit after its test has lost it, so that its exit status shows the reason."""
_EXTRA_TEST_S = 5.0
"""A test ends after its answer. The kernel ends one that still runs this long after the wall-clock limit."""
_GRACE_S = 15.0
"""The supervisor enforces the wall-clock limit; if it has not replied this long afterwards, it counts as broken."""
_ERROR_CHARS = 2000
_NUMBERS = {"exit": int, "cpu_s": float, "wall_s": float, "idle_s": float}
_DIED = FunctionOutcome("died", "the test could not be finished with what the answer returned")


class SandboxPool:
    """The two sandboxes of one worker, which runs one answer at a time. They start on first use."""

    def __init__(self, level: IsolationLevel) -> None:
        self._level = level
        self._zygotes: dict[Role, Zygote] = {}
        self._supervisor: socket.socket | None = None
        self._num_answers = 0
        self._tester: TesterProcess | None = None

    @contextmanager
    def runs_of(self, program: str, preamble: str, limits: ResourceLimits) -> Iterator[AnswerRuns]:
        """Runs of one answer. On exit, nothing of the answer is left.

        Raises:
            SandboxError: there is no supervisor, or it failed.
        """
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            supervisor, self._num_answers = self._zygote("answer").fork(), 0
        try:
            with sealed_file(protocol.pack_program(preamble, program)) as file:
                runs = AnswerRuns(supervisor, file, limits, self)
                yield runs
            self._num_answers += 1
            # do not reuse a supervisor that had to stop an answer, although nothing should be left in it
            if self._level.reusable and runs.ended_normally and self._num_answers < _MAX_ANSWERS:
                self._supervisor = supervisor
        finally:
            if self._supervisor is None:
                supervisor.close()
        if self._level.single_use:
            self._zygotes.pop("answer").close()

    @contextmanager
    def test(self, job: dict[str, Any], answer: socket.socket) -> Iterator[TesterProcess]:
        """A test that runs against the answer behind a connection.

        Raises:
            SandboxError: there is no process for the test.
        """
        tester, self._tester = self._tester, None
        # if the tester has ended meanwhile, its connection is readable
        if tester is None or readable([tester], 0):
            tester = TesterProcess(self._zygote("tester").fork())
        try:
            try:
                tester.start(job, answer)
            except OSError as error:
                raise SandboxError(self._zygotes["tester"].failure()) from error
            yield tester
            if self._level.reusable and tester.is_clean and tester.num_tests < _MAX_ANSWERS:
                self._tester = tester
        finally:
            if self._tester is None:
                tester.close()

    def close(self) -> None:
        """End both sandboxes with everything in them."""
        for process in (self._supervisor, self._tester):
            if process is not None:
                process.close()
        self._supervisor = self._tester = None
        while self._zygotes:
            self._zygotes.popitem()[1].close()

    def failure(self) -> str:
        """The last error output of the answer sandbox."""
        return self._zygotes["answer"].failure()

    def _zygote(self, role: Role) -> Zygote:
        if role not in self._zygotes:
            self._zygotes[role] = Zygote(self._level, role)
        return self._zygotes[role]


class AnswerRuns:
    """Runs one answer, which is in a sealed file, once for each of its tests.

    Attributes:
        ended_normally: whether every run so far ended by itself or with its test.
    """

    def __init__(self, supervisor: socket.socket, file: int, limits: ResourceLimits, sandboxes: SandboxPool) -> None:
        self._supervisor = supervisor
        self._file = file
        self._limits = limits
        self._sandboxes = sandboxes
        self.ended_normally = True

    def run_program(self, stdin: str) -> RunReport:
        """Run the answer as a program.

        Raises:
            SandboxError: the supervisor failed.
        """
        with sealed_file(stdin.encode(errors="surrogatepass")) as input_file:
            self._start("program", input_file)
        return self._report(self._deadline())

    def run_test(self, tests: FunctionTests, test: str) -> tuple[RunReport, FunctionOutcome]:
        """Run one test of a function against the answer.

        Raises:
            SandboxError: a sandbox failed.
        """
        answers_end, testers_end = socket.socketpair()
        limits = {
            **asdict(self._limits),
            "test_cpu_s": self._limits.test_cpu_s,
            "test_wall_s": self._limits.wall_s + _EXTRA_TEST_S,
        }
        job = {"preamble": tests.preamble, "entry_point": tests.entry_point, "test": test, "limits": limits}
        with testers_end:
            with answers_end:
                self._start("function", answers_end.fileno())
            return self._finish_test(job, testers_end)

    def _finish_test(self, job: dict[str, Any], testers_end: socket.socket) -> tuple[RunReport, FunctionOutcome]:
        with self._sandboxes.test(job, testers_end) as tester:
            testers_end.close()
            deadline = self._deadline()
            ready = readable([tester, self._supervisor], deadline - time.monotonic())
            if self._supervisor in ready:
                # the answer has ended; its test notices, or has just ended too
                return self._report(deadline), tester.outcome(deadline)
            outcome = tester.outcome(deadline)
            if outcome.kind != "lost" or not readable([self._supervisor], _LOST_S):
                self._send({"op": "end"})
            return self._report(deadline), outcome

    def _deadline(self) -> float:
        return time.monotonic() + self._limits.wall_s + _GRACE_S

    def _start(self, kind: str, fd: int) -> None:
        self._send({"op": "run", "kind": kind, "limits": asdict(self._limits)}, (self._file, fd))

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            protocol.send(self._supervisor, message, fds=fds)
        except OSError as error:
            raise SandboxError(self._sandboxes.failure()) from error

    def _report(self, deadline: float) -> RunReport:
        if not readable([self._supervisor], deadline - time.monotonic()):
            raise SandboxError("the supervisor of the answer does not reply")
        with suppress(protocol.FrameError):
            if (received := protocol.receive(self._supervisor)) is not None:
                report = read_report(*received[:2])
                self.ended_normally &= report.end in ("exited", "ended")
                return report
        raise SandboxError(self._sandboxes.failure())


def read_report(message: dict[str, Any], blob: bytes) -> RunReport:
    """The report of a supervisor, which is not trusted to be well-formed.

    Args:
        message: `reason`, `exit`, `cpu_s`, `wall_s`, `idle_s` and the `sizes` of the parts of the blob.
        blob: standard output, standard error, and the status of compiling.

    Raises:
        SandboxError: the report is malformed, or the answer could not be started.
    """
    try:
        well_formed = message["reason"] in get_args(RunEnd) and all(
            type(message[n]) is kind for n, kind in _NUMBERS.items()
        )
        output, errors, status = _split(blob, message["sizes"])
        compiling = json.loads(status or b"{}")
    except (KeyError, TypeError, ValueError) as error:
        raise SandboxError(f"the supervisor of the answer sent a malformed report: {error!r}") from error
    if not well_formed or type(compiling) is not dict or type(compiling.get("syntax_error", "")) is not str:
        raise SandboxError(f"the supervisor of the answer sent a malformed report: {message}")
    if "failed" in compiling:
        raise SandboxError(compiling["failed"])
    syntax_error = compiling.get("syntax_error")
    if syntax_error is None and message["reason"] == "exited" and "compiled" not in compiling:
        syntax_error = "the program crashed the Python compiler"
    return RunReport(
        end=message["reason"],
        exit_code=message["exit"],
        cpu_s=message["cpu_s"],
        wall_s=message["wall_s"],
        idle_s=message["idle_s"],
        stdout=output,
        stderr=errors.decode(errors="replace")[-_ERROR_CHARS:],
        syntax_error=syntax_error,
    )


def _split(blob: bytes, sizes: Sequence[int]) -> list[bytes]:
    if sum(sizes) != len(blob) or min(sizes) < 0:
        raise ValueError(f"{sizes} of {len(blob)} bytes")
    return [blob[end - size : end] for size, end in zip(sizes, accumulate(sizes))]


class TesterProcess:
    """A process that runs one test at a time, until one leaves a trace in it.

    Attributes:
        num_tests: number of tests that it has run.
        is_clean: whether another test may run in it.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.num_tests = 0
        self.is_clean = True

    def start(self, job: dict[str, Any], answer: socket.socket) -> None:
        """Run a test against the answer behind a connection.

        Args:
            job: `preamble`, `entry_point`, `test` and `limits`, see `inside/tester.py`.
            answer: the connection to the answer; the caller may close it afterwards.

        Raises:
            OSError: the process has ended.
        """
        self.is_clean = False
        self.num_tests += 1
        test = compile_test(job["preamble"], job["test"])
        message = {**job, "leaves_no_trace": test.leaves_no_trace}
        protocol.send(self._control, message, test.code, (answer.fileno(),))

    def outcome(self, deadline: float) -> FunctionOutcome:
        """How the test ended; "died" if the process does not reply before `deadline` on the monotonic clock."""
        if readable([self._control], deadline - time.monotonic()):
            with suppress(protocol.FrameError):
                if (received := protocol.receive(self._control)) is not None:
                    message = received[0]
                    self.is_clean = message["is_clean"]
                    return FunctionOutcome(message["outcome"], message["message"], message["waited_s"])
        return _DIED

    def fileno(self) -> int:
        """File descriptor of the connection, which is readable once there is an outcome."""
        return self._control.fileno()

    def close(self) -> None:
        """End the process, as soon as it reads from its connection."""
        self._control.close()


# Tests are compiled once for all answers. Answers are never compiled here, because the compiler may not survive it.


class CompiledTest(NamedTuple):
    """A test in the form that `inside/tester.py` takes."""

    code: bytes = b""
    """Marshalled code of preamble and test; empty if they do not compile, which the tester then reports."""
    leaves_no_trace: bool = False
    """Whether another test may run in the same process afterwards."""


@functools.lru_cache(maxsize=64)
def compile_test(preamble: str, test: str) -> CompiledTest:
    """Compile a test with its preamble; a comparison that it asserts says what was compared if it fails."""
    try:
        shown = ExplainedAssertions().visit(ast.parse(test, "<test>"))
        # optimize=0: the flags of the server must not remove the assertions
        codes = [
            compile(text, name, "exec", dont_inherit=True, optimize=0)
            for text, name in ((preamble, "<preamble>"), (ast.fix_missing_locations(shown), "<test>"))
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return CompiledTest()
    return CompiledTest(marshal.dumps(tuple(codes)), all(map(leaves_no_trace, codes)))


class ExplainedAssertions(ast.NodeTransformer):
    """Turns `assert a < b` into `assert (left := a) < (right := b), explain(left, "<", right)`.

    Both sides are still evaluated once, in the same order, and the message only after a failure. Programs cannot use
    the names of the variables and of the function, which `inside/tester.py` defines.
    """

    _SYMBOLS = {
        ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
        ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    }  # fmt: skip

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """Add the message, unless there is one or the assertion is not a single comparison."""
        match node:
            case ast.Assert(ast.Compare(left, [kind], [right]), None):
                names = ("@left", "@right")
                left, right = (
                    ast.NamedExpr(ast.Name(name, ast.Store()), side) for name, side in zip(names, (left, right))
                )
                compared = [ast.Name(name, ast.Load()) for name in names]
                symbol = ast.Constant(self._SYMBOLS[type(kind)])
                message = ast.Call(ast.Name("@explain", ast.Load()), [compared[0], symbol, compared[1]], [])
                return ast.copy_location(ast.Assert(ast.Compare(left, [kind], [right]), message), node)
        return node


_LOADED_MODULES = frozenset((*PRELOADED["tester"], "__future__"))
_HARMLESS_BUILTINS = frozenset(
    "abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict divmod enumerate filter float "
    "format frozenset hash hex id int isinstance issubclass iter len list map max min next object oct ord pow print "
    "property range repr reversed round set slice sorted staticmethod str sum super tuple type zip".split()
)
_OTHER_BUILTINS = frozenset(
    name
    for name, value in vars(builtins).items()
    if name not in _HARMLESS_BUILTINS and not (isinstance(value, type) and issubclass(value, BaseException))
)
_CHANGE_ATTRIBUTES = frozenset((dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]))
_IMPORT = dis.opmap["IMPORT_NAME"]


def leaves_no_trace(code: types.CodeType) -> bool:
    """Whether code changes only its own variables and the random state, which every test seeds again.

    Tests come from the dataset and are not hostile, so only unintended effects matter. Anything that is not known to be
    harmless counts as a trace. Checking compiled code is faster than building a syntax tree.
    """
    operations = frozenset(code.co_code[::2])
    if operations & _CHANGE_ATTRIBUTES or any(map(_may_leave_a_trace, code.co_names)):
        return False
    if _IMPORT in operations and not _LOADED_MODULES.issuperset(_imported(code)):
        return False
    return all(leaves_no_trace(part) for part in code.co_consts if isinstance(part, types.CodeType))


def _may_leave_a_trace(name: str) -> bool:
    """Whether a global or an attribute of this name may lead to more than plain values."""
    return name in _OTHER_BUILTINS or (name.startswith("_") and name != "_")


def _imported(code: types.CodeType) -> list[str]:
    return [step.argval for step in dis.get_instructions(code) if step.opcode == _IMPORT]
