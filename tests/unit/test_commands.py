"""Every command has help with an example, starts fast, and handles bad input, pipes and signals in the same way."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.processes import wait_until
from verl_ext.cli import CommandParser, FloatArg, IntArg, output_file
from verl_ext.errors import UserError

SMALL_PIPE = 4096
"""Bytes; Linux makes no smaller pipe."""
FOLDERS = ("verl_ext", "eval_pipeline", "benchmarks", "scripts")
SCRIPTS = ("run_sft.sh", "run_grpo.sh", "eval_pipeline/run.sh", "tests/run.sh", "benchmarks/run.sh")
HEAVY = re.compile(r"\| +(torch|transformers|vllm|pandas|pyarrow)$", re.MULTILINE)


def modules_with_a_main() -> list[str]:
    """All modules that users run with `python -m`."""
    paths = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    mains = [path for path in paths if re.search(r'^if __name__ == "__main__":', (ROOT / path).read_text(), re.M)]
    return sorted(".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in mains)


def help_of(words: list[str]) -> str:
    """The output of --help; check that it exits with 0 and imports nothing slow."""
    command = [sys.executable, "-X", "importtime", "-m", *words, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not HEAVY.search(done.stderr) and "Traceback" not in done.stderr
    return done.stdout


def check_form(text: str) -> None:
    assert text.startswith("usage: ")
    assert re.search(r"^examples:\n  .*(python3? |bash |torchrun )", text, re.M)
    assert re.search(r"^exit codes:\n  0 ", text, re.M)


def test_command_modules_are_found() -> None:
    assert {"verl_ext.launch", "eval_pipeline", "benchmarks.sft", "verl_ext.docgen"} <= {*modules_with_a_main()}


@pytest.mark.parametrize("module", [name for name in modules_with_a_main() if name != "benchmarks.judge_baselines"])
def test_every_command_has_help_with_example(module: str) -> None:
    text = help_of([module])
    check_form(text)
    _, _, commands = text.partition("\ncommands:\n")
    for name in re.findall(r"^    ([a-z0-9]+)(?:  |$)", commands.partition("examples:")[0], re.M):
        subtext = help_of([module, name])
        check_form(subtext)
        typed = "bash eval_pipeline/run.sh" if module == "eval_pipeline" else f"python -m {module}"
        assert subtext.startswith(f"usage: {typed} {name} ")


def test_internal_benchmark_help_names_its_caller() -> None:
    assert "examples:\n  python -m benchmarks.judge" in help_of(["benchmarks.judge_baselines"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_help_needs_no_environment(script: str, tmp_path: Path) -> None:
    bare = tmp_path / "bin" / "python3"  # without any package
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -S "$@"\n')
    bare.chmod(0o755)
    # VERL_EXT_PYTHON is not an interpreter, and only commands that need packages call it
    environment = {"PATH": f"{bare.parent}:/usr/bin:/bin", "VERL_EXT_PYTHON": str(tmp_path / "none")}
    done = subprocess.run(["bash", ROOT / script, "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    check_form(done.stdout)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("verl_ext.launch", ["sft", "--foo"]),
        ("verl_ext.plan", ["--foo"]),
        ("verl_ext.health", ["--foo"]),
        ("verl_ext.monitor", ["--port", "many"]),
        ("verl_ext.checkpoint", []),
        ("verl_ext.checkpoint", ["ls"]),
        ("verl_ext.data.prepare", ["quickstart", "--output", "x", "--samples", "-1"]),
        ("verl_ext.controller.calibrate", []),
        ("verl_ext.trainer", []),
        ("eval_pipeline", ["watch", "x", "--foo"]),
        ("eval_pipeline", ["run", "--limit", "0"]),
        ("benchmarks.sft", ["--rounds", "0"]),
    ],
)
def test_bad_argument_prints_one_sentence_with_help_hint(module: str, words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: .*(; see|\? See) `.* --help`\n", done.stderr)


def test_path_that_looks_like_option_is_suggested_with_its_directory(tmp_path: Path) -> None:
    (tmp_path / "-dash").mkdir()
    command = [sys.executable, "-m", "verl_ext.checkpoint", "ls", "-dash"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean ./-dash?" in done.stderr


def test_interpreter_without_packages_gets_hint() -> None:
    command = [sys.executable, "-S", "-m", "verl_ext.plan", "recipe=quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(r"error: .* has no package \w+; use .venv/bin/python, .*\n", done.stderr)


@pytest.mark.parametrize("text", ["0", "1.5", "-3", "", "nan", "1e99", "٣", "11", "--"])
def test_int_argument_rejects_out_of_range_values(text: str) -> None:
    parser = CommandParser(prog="x", description="", examples=[])
    parser.add_argument("--n", type=IntArg(1, 10))
    assert parser.parse_args(["--n", "10"]).n == 10
    with pytest.raises(UserError, match="; see `x --help`"):
        parser.parse_args(["--n", text])


@pytest.mark.parametrize("text", ["0", "1", "nan", "inf", "-1", "1e99", "half", ""])
def test_float_argument_rejects_out_of_range_values(text: str) -> None:
    parser = CommandParser(prog="x", description="", examples=[])
    parser.add_argument("--x", type=FloatArg(0, 1))
    assert parser.parse_args(["--x", "0.5"]).x == 0.5
    with pytest.raises(UserError, match="is not a number between 0 and 1; see `x --help`"):
        parser.parse_args(["--x", text])


def test_unwritable_output_file_is_rejected_at_start(tmp_path: Path) -> None:
    parser = CommandParser(prog="x", description="", examples=[])
    parser.add_argument("--output", type=output_file)
    assert parser.parse_args(["--output", str(tmp_path / "new.json")]).output == tmp_path / "new.json"
    with pytest.raises(UserError, match="is a directory; specify a file"):
        parser.parse_args(["--output", str(tmp_path)])
    with pytest.raises(UserError, match="cannot be written"):
        parser.parse_args(["--output", str(tmp_path / "nowhere/new.json")])


@pytest.mark.parametrize(
    "words",
    [
        ["verl_ext.docgen"],
        ["verl_ext.health", "--rules"],
        ["verl_ext.launch", "sft", "--print-config"],
    ],
    ids=" ".join,
)
def test_closed_pipe_is_not_an_error(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has enough
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def is_full(pipe: int) -> bool:
    """Whether a pipe of `SMALL_PIPE` has no room for another line of 32 bytes."""
    waiting = fcntl.ioctl(pipe, termios.FIONREAD, struct.pack("i", 0))
    return struct.unpack("i", waiting)[0] > SMALL_PIPE - 32


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("how", ["print_line(line)", "print(line)", "os.set_blocking(1, False); print_line(line)"])
def test_slow_reader_of_non_blocking_pipe_gets_all_output(how: str, unbuffered: str) -> None:
    program = "import os\nfrom verl_ext.errors import exit_on_user_error\nfrom verl_ext.console import print_line\n"
    program += "with exit_on_user_error():\n"
    program += f"    for number in range(6000):\n        line = f'{{number:031}}'\n        {how}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    assert fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL_PIPE) == SMALL_PIPE
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        with open(reading, "rb", buffering=0) as pipe:
            received = b""
            while piece := pipe.read(SMALL_PIPE):
                received += piece
                wait_until(lambda: is_full(reading) or process.poll() is not None)
        assert process.stderr is not None and process.stderr.read() == b""
    assert process.returncode == 0
    assert received.split() == [b"%031d" % number for number in range(6000)]


@pytest.mark.parametrize(
    "words",
    [
        ["verl_ext.docgen", "metrics"],
        ["verl_ext.health", "--rules"],
        ["verl_ext.launch", "sft", "--print-config"],
        ["verl_ext.launch", "sft", "--help"],
        ["verl_ext.checkpoint", "ls", "--help"],
    ],
    ids=" ".join,
)
def test_failed_write_to_stdout_exits_1(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    [told] = done.stderr.splitlines()
    assert done.returncode == 1 and told.startswith("error: standard output ") and "No space left on device" in told


@pytest.mark.parametrize("code", [75, 2])
def test_failed_write_keeps_more_specific_exit_code(code: int) -> None:
    program = "import sys\nfrom verl_ext.errors import exit_on_user_error\nfrom verl_ext.console import print_line\n"
    program += f"with exit_on_user_error():\n    print_line('lost')\n    sys.exit({code})"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (code, b"")


def test_closed_stdout_is_rejected() -> None:
    words = [sys.executable, "-m", "verl_ext.health", "--rules"]
    done = subprocess.run(["bash", "-c", 'exec "$@" >&-', "bash", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: standard output is closed")
    assert len(done.stderr.splitlines()) == 1


def run_in_bash(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in which `python` is this interpreter."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    return subprocess.run(["bash", "-c", code], cwd=ROOT, env=environment, input="", capture_output=True, text=True)


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_stdin_and_stderr_become_dev_null(closed: str) -> None:
    code = "import sys; sys.argv = ['-m']; import verl_ext, subprocess; print('to stderr', file=sys.stderr, flush=True)"
    code += "; subprocess.run(['readlink', '/proc/self/fd/0', '/proc/self/fd/2'])"
    done = run_in_bash(f'python -c "{code}" {closed}')
    assert (done.returncode, done.stdout.count("/dev/null")) == (0, len(closed.split()))


@pytest.mark.parametrize(
    ("code", "variables", "sentence"),
    [
        (
            "python -m verl_ext.health no_é",
            {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "the arguments contain characters that the locale cannot decode; set LC_ALL=C.UTF-8",
        ),
        ("python -m verl_ext.health --rules", {"PYTHONOPTIMIZE": "2"}, "Python runs without docstrings"),
        ("ulimit -v 900000; python -m verl_ext.data.prepare quickstart --output $OUT", {}, "not enough address space"),
    ],
)
def test_unusable_process_is_rejected_in_one_sentence(
    code: str, variables: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    done = run_in_bash(code, **variables, OUT=str(tmp_path))
    assert done.returncode == 2 and done.stderr.startswith(f"error: {sentence}") and done.stderr.count("\n") == 1


def start(words: list[str], cwd: Path) -> subprocess.Popen[str]:
    """Start a process that prints `ready` and waits. It reacts to Ctrl-C even if pytest ignores it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_exits_75_with_one_sentence(number: signal.Signals, tmp_path: Path) -> None:
    code = "import time\nfrom verl_ext.cli import clean_exit\n"
    code += "with clean_exit('goes on'):\n    print('ready', flush=True)\n    time.sleep(60)"
    process = start(["-c", code], tmp_path)
    process.send_signal(number)
    _, told = process.communicate(timeout=10)
    assert (process.returncode, told) == (75, f"Stopped by {number.name}; the same command goes on.\n")


SLOW_TO_STOP = """\
import sys, time
from verl_ext import cli
{setting}
with cli.clean_exit():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("busy", flush=True)
        until = time.monotonic() + float(sys.argv[1])
        while time.monotonic() < until:
            time.sleep(0.1)
"""


def stopping(number: signal.Signals, cwd: Path, *, stops_in_s: float, setting: str = "") -> subprocess.Popen[str]:
    """A command that has received a stop signal and takes `stops_in_s` to stop."""
    process = start(["-c", SLOW_TO_STOP.format(setting=setting), str(stops_in_s)], cwd)
    process.send_signal(number)
    assert process.stdout is not None and process.stdout.readline() == "busy\n"
    return process


@pytest.mark.parametrize("first, again", [("SIGTERM", "SIGTERM"), ("SIGTERM", "SIGINT"), ("SIGINT", "SIGHUP")])
def test_repeated_stop_signal_counts_once(first: str, again: str, tmp_path: Path) -> None:
    process = stopping(signal.Signals[first], tmp_path, stops_in_s=2)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=1.2)
    process.send_signal(signal.Signals[again])
    _, told = process.communicate(timeout=10)
    assert (process.returncode, told) == (75, f"Stopped by {first}; the same command starts over.\n")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_repeated_signal_at_interpreter_exit_counts_once(number: str, tmp_path: Path) -> None:
    late = """
import time
class Late:
    def __del__(self, print=print, sleep=time.sleep):
        print("late", flush=True)
        sleep(1)
late = Late()
late.itself = late  # only the end of Python takes it away
"""
    process = stopping(signal.Signals[number], tmp_path, stops_in_s=0, setting=late)
    assert process.stdout is not None and process.stdout.readline() == "late\n"
    process.send_signal(signal.Signals[number])
    _, told = process.communicate(timeout=10)
    assert (process.returncode, told) == (75, f"Stopped by {number}; the same command starts over.\n")


@pytest.mark.parametrize(
    "number, setting", [("SIGINT", ""), ("SIGTERM", "cli.GRACE_S = 1.0")], ids=["second Ctrl-C", "hung"]
)
def test_unresponsive_command_can_be_killed(number: str, setting: str, tmp_path: Path) -> None:
    process = stopping(signal.Signals[number], tmp_path, stops_in_s=60, setting=setting)
    process.send_signal(signal.Signals[number])  # within a second, so it is the same request
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=1.2)
    process.send_signal(signal.Signals[number])
    _, told = process.communicate(timeout=10)
    assert (process.returncode, told) == (-signal.Signals[number], "")


def test_inherited_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    code = "import signal\nfrom verl_ext.cli import clean_exit\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "with clean_exit():\n    print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)\n"
    code += "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n"


def test_stop_during_imports_prints_no_traceback(tmp_path: Path) -> None:
    package = tmp_path / "begins_slowly"
    package.mkdir()
    (package / "__init__.py").write_text("import verl_ext\n")
    (package / "__main__.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = start(["-m", "begins_slowly"], tmp_path)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert (process.returncode, told) == (-signal.SIGINT, "")


def test_help_shows_defaults_and_wraps_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = "One line.\n\nAnother\nparagraph.\n\n  kept\n  as it is"
    parser = CommandParser(prog="x", description=text, examples=["x --n 3"], exit_codes={"0": "done"})
    parser.add_argument("--n", type=IntArg(), default=3, help="how many")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="of each")
    parser.add_argument("--on", action="store_true", help="a switch")
    shown = parser.format_help()
    assert "--n N " in shown and "how many (default: 3)" in shown and "of each (default: 1 2)" in shown
    assert "a switch\n" in shown and "\n\nAnother paragraph.\n\n  kept\n  as it is\n\n" in shown
    assert shown.endswith("examples:\n  x --n 3\n\nexit codes:\n  0  done\n")
    assert max(map(len, shown.splitlines())) <= 110
