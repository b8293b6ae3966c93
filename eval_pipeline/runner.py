"""Runs one answer and its tests. Started by `sandbox.py` as a script of its own, so it imports nothing of ours.

The job arrives on standard input as one JSON object. What happened leaves on the descriptor `report_fd`, a line for
each event, each beginning with the run's token: the answer is not told the token, so what it prints or writes is no
report. An answer bent on it could still dig the token out of this process's memory.
"""

import json
import os
import resource
import signal
import sys
import types

ANSWER_FILE = "<answer>"
TEST_FILE = "<test>"
MESSAGE_CHARS = 500

# taken before the answer can replace them
_dumps, _write, _exit, _getpid = json.dumps, os.write, os._exit, os.getpid
_compile, _exec, _assertion_error = compile, exec, AssertionError


def main() -> None:
    """Set the limits, then run the answer and each test, reporting as it goes."""
    job = json.load(sys.stdin)
    _close_input()
    _set_limits(job["limits"])
    # whoever started this watches the clock; should it be killed, the answer is not left behind asleep
    signal.alarm(job["alarm_s"])
    os.set_inheritable(job["report_fd"], False)
    _run(job["code"], job["tests"], _reporter(job["report_fd"], job["token"]))
    # not `sys.exit`: an answer's threads and exit hooks would run on after the verdict
    _exit(0)


def _close_input() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _set_limits(limits):
    for name, wanted in limits.items():
        kind = getattr(resource, name)
        highest = resource.getrlimit(kind)[1]
        unlimited = highest == resource.RLIM_INFINITY
        resource.setrlimit(kind, [value if unlimited else min(value, highest) for value in wanted])


def _reporter(fd, token):
    runner_pid = _getpid()

    def report(**event):
        if _getpid() != runner_pid:
            _exit(1)  # the answer forked, and this is its child coming back: only one of the two may report
        line = f"{token} {_dumps(event)}\n".encode()
        while line:
            line = line[_write(fd, line) :]

    return report


def _run(code, tests, report):
    report(event="ready")
    module = types.ModuleType("answer")
    sys.modules["answer"] = module  # dataclasses and pickle look a class's module up by its name
    try:
        program = _compile(code, ANSWER_FILE, "exec", dont_inherit=True)
    except BaseException as error:  # deep nesting raises MemoryError or RecursionError, a null byte ValueError
        report(event="syntax_error", message=_describe(error))
        return
    try:
        _exec(program, module.__dict__)
    except BaseException as error:  # SystemExit too: an answer that leaves has passed nothing
        report(event="answer_error", message=_describe(error))
        return
    for test in tests:
        _run_test(test, module, report)
    report(event="done")


def _run_test(test, module, report):
    try:
        _exec(_compile(test, TEST_FILE, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        failed = isinstance(error, _assertion_error) and _raised_in(error) == TEST_FILE
        report(event="failed" if failed else "error", message=f"{test}: {_describe(error)}"[:MESSAGE_CHARS])
    else:
        report(event="passed")


def _raised_in(error):
    """File of the frame that raised: an assertion of the answer's own is an error, not a wrong answer."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


def _describe(error):
    try:
        text = str(error)
    except BaseException:  # an exception class of the answer's own may fail to print
        text = "(no message)"
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARS]


if __name__ == "__main__":
    main()
