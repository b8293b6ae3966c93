"""Shared code of the benchmarks: command line, results file, subprocesses and ranks, rounds, and a CPU clock.

`python -m benchmarks.harness MODULE:FUNCTION WORD ...` runs a function of a module of this folder; the benchmarks start
their ranks and child processes with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import platform
import re
import statistics
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import psutil

from verl_ext.cli import CommandParser, clean_exit, output_file
from verl_ext.console import print_line, progress_bar
from verl_ext.errors import UserError
from verl_ext.hardware import cpu_name

ROOT = Path(__file__).resolve().parents[1]
STACKS_AFTER_S = "VERL_EXT_STACKS_AFTER_S"
"""Environment variable: seconds after which a child process prints the stacks of its threads, to explain a hang."""
ROW_PREFIX = "ROW "
"""Prefix of the JSON lines that ranks print for the benchmark."""
Numbers = Mapping[str, float]
Results = dict[str, Any]
"""Results that are written as JSON."""
T = TypeVar("T")
Name = TypeVar("Name", bound=str)


# Command line and results file


def bench_parser(
    name: str, doc: str | None, *examples: str, launcher: str = "python", **settings: Any
) -> CommandParser:
    """The parser of a benchmark, with `--output`.

    Args:
        name: name of its module.
        doc: docstring of its module, which says what it measures.
        examples: arguments of typical runs.
        launcher: command that starts the module.
        settings: further arguments of the parser.
    """
    typed = f"{launcher} -m benchmarks.{name}"
    lines = [f"{typed} {example}".rstrip() for example in examples]
    parser = CommandParser(prog=typed, description=doc or "", examples=lines, **settings)
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the results to this JSON file")
    return parser


def write_results(results: Results, path: Path | None, packages: Sequence[str] = (), quiet: bool = False) -> None:
    """Write results with the date, the machine and the versions, if the command line names a file.

    Args:
        results: the results.
        path: path of the file; None writes nothing.
        packages: packages whose versions are written in addition to Python, torch and transformers.
        quiet: whether not to print that the file was written.
    """
    if path is None:
        return
    versions = {"python": platform.python_version()}
    versions |= {package: version(package) for package in ("torch", "transformers", *packages)}
    head = {"date": date.today().isoformat(), "machine": machine(), "versions": versions}
    path.write_text(json.dumps({**head, **results}, indent=1) + "\n")
    if not quiet:
        print_line(f"wrote {path}")


def machine() -> str:
    """CPUs, memory, kernel and GPUs of this machine."""
    gib = psutil.virtual_memory().total / 2**30
    kernel = f"{platform.system()} {platform.release()}"
    processor = f"{cpu_name()} {platform.machine()}".strip()
    return ", ".join([f"{os.cpu_count()} x {processor}", f"{gib:.0f} GiB", kernel, *gpus()])


def gpus() -> list[str]:
    """Number and model of the GPUs, without importing torch."""
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    models = Counter(name for file in files for name in re.findall(r"^Model:\s*(.*\S)", file.read_text(), re.M))
    return [f"{count} x {name}" for name, count in models.items()]


# Rounds and their spread


def in_rounds(
    sides: Mapping[Name, Callable[[], T]], rounds: int, desc: str, warm_up: int = 0, show: bool = True
) -> dict[Name, list[T]]:
    """Run each side once per round; returns its results. Sides alternate, in reverse order in every other round.

    If the machine is slow for a while, all sides are slow, not just one.

    Args:
        sides: functions to compare, by name.
        rounds: number of measured rounds.
        desc: description of the progress bar.
        warm_up: number of rounds before them that are not measured.
        show: whether this process shows the bar.
    """
    found: dict[Name, list[T]] = {name: [] for name in sides}
    with progress_bar(total=(rounds + warm_up) * len(sides), desc=desc, unit="runs", show=show) as bar:
        for number in range(rounds + warm_up):
            for name in reversed([*sides]) if number % 2 else sides:
                result = sides[name]()
                if number >= warm_up:
                    found[name].append(result)
                bar.update()
    return found


def medians(rounds: Sequence[Numbers]) -> dict[str, float]:
    """The median of each number over the rounds that have it."""
    return {name: statistics.median(values) for name, values in columns(rounds).items()}


def ranges(rounds: Sequence[Numbers]) -> dict[str, list[float]]:
    """The smallest and largest value of each number over the rounds that have it."""
    return {name: [min(values), max(values)] for name, values in columns(rounds).items()}


def columns(rounds: Sequence[Numbers]) -> dict[str, list[float]]:
    """The values of each number, in the order of the rounds."""
    names = dict.fromkeys(name for numbers in rounds for name in numbers)
    return {name: [numbers[name] for numbers in rounds if name in numbers] for name in names}


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median with the range, such as `1.20 (1.10 to 1.42)`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# Models


def qwen2_size(
    hidden: int, intermediate: int, layers: int, heads: int, vocab: int, kv_heads: int = 4, tied: bool = False
) -> dict[str, Any]:
    """Arguments of `Qwen2Config` that determine a model's size."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


# Subprocesses and ranks


def run(command: Sequence[str], variables: Mapping[str, str] | None = None, timeout_s: float | None = None) -> str:
    """Run a command in the root of the checkout, with libraries offline; returns its standard output.

    Args:
        command: the command's words.
        variables: environment variables in addition to those of this process.
        timeout_s: time limit in seconds.

    Raises:
        UserError: the command failed or took too long.
    """
    environment = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", **os.environ, **(variables or {})}
    begin = " ".join(command[:6])
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{begin} took more than {error.timeout:g} s") from error
    if done.returncode:
        raise UserError(f"{begin} ended with {done.returncode}: {reason_of(done)}")
    return done.stdout


def reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed, in one line: its first error (torchrun ends with a table), or else its last line."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
    meaningful = [line for line in lines if any(map(str.isalnum, line))]
    last = meaningful[-1] if meaningful else f"exit code {done.returncode}"
    return next((line for line in meaningful if "Error" in line), last)


def child_command(function: str, *words: str, ranks: int = 1, torchrun: bool = False) -> list[str]:
    """The command that runs `MODULE:FUNCTION` of this folder; several ranks are started by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(launcher if torchrun or ranks > 1 else []), "-m", "benchmarks.harness", function, *words]


def run_ranks(
    function: str,
    *words: str,
    ranks: int = 1,
    torchrun: bool = False,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run a function on ranks; returns the rows that they logged.

    Args:
        function: `MODULE:FUNCTION` of this folder.
        words: arguments of the function.
        ranks: number of processes.
        torchrun: whether a single process needs torchrun too.
        variables: environment variables in addition to those of this process.

    Raises:
        UserError: a rank failed.
    """
    output = run(child_command(function, *words, ranks=ranks, torchrun=torchrun), variables)
    return [json.loads(line.removeprefix(ROW_PREFIX)) for line in output.splitlines() if line.startswith(ROW_PREFIX)]


def log_row(**values: Any) -> None:
    """Print a row for `run_ranks`, such as the numbers of a step; call it on rank 0."""
    print(f"{ROW_PREFIX}{json.dumps(values)}", flush=True)


# CPU time


_SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}
_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL = 1 << 1, 1 << 5
_CLOSE_ON_EXEC = 8
_ATTRIBUTE = struct.Struct("=IIQ24xQ80x")


class CPUClock:
    """CPU time of this thread, and of all threads and processes that it starts, directly or indirectly.

    Uses the kernel's task clock (see perf_event_open(2)). `getrusage` misses orphans and children of processes that
    ignore SIGCHLD, and a judge has both. Time in the kernel counts too: `exclude_kernel` is only set so that every user
    may open the clock, and does not affect it.
    """

    def __init__(self) -> None:
        """Start the clock.

        Raises:
            UserError: the kernel does not provide the clock to this user.
        """
        attribute = ctypes.create_string_buffer(
            _ATTRIBUTE.pack(_SOFTWARE, _ATTRIBUTE.size, _TASK_CLOCK, _INHERIT | _EXCLUDE_KERNEL), _ATTRIBUTE.size
        )
        number = _SYSTEM_CALLS.get(platform.machine())
        if number is None:
            raise UserError(f"CPU time is not counted on {platform.machine()}; run this on x86_64 or aarch64")
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.syscall(number, attribute, 0, -1, -1, _CLOSE_ON_EXEC)
        if self._fd < 0:
            raise UserError(
                f"the kernel does not count CPU time for this user ({os.strerror(ctypes.get_errno())}); set the sysctl"
                " kernel.perf_event_paranoid to 2, and let a container's seccomp profile pass perf_event_open"
            )

    def seconds(self) -> float:
        """CPU seconds since the start."""
        return float(struct.unpack("Q", os.read(self._fd, 8))[0]) / 1e9


# Child processes


@clean_exit()
def main() -> None:
    """Import a module of this folder, and call its function with the words."""
    parser = CommandParser(
        prog="python -m benchmarks.harness",
        description=__doc__ or "",
        examples=["python -m benchmarks.sft --quick", "python -m benchmarks.harness sft_ranks:bare DIRECTORY packed 4"],
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="function in a module of this folder")
    parser.add_argument("words", nargs="+", metavar="WORD", help="arguments of the function")
    arguments = parser.parse_args()
    if STACKS_AFTER_S in os.environ:
        faulthandler.dump_traceback_later(float(os.environ[STACKS_AFTER_S]))
    module, _, function = arguments.function.partition(":")
    if not Path(__file__).with_name(f"{module}.py").is_file():
        raise UserError(f"there is no module '{module}' in benchmarks; specify one")
    getattr(importlib.import_module(f"benchmarks.{module}"), function)(*arguments.words)


if __name__ == "__main__":
    main()
