"""Check correctness and speed on this machine's GPUs, in at most ten minutes.

The check runs in parts, each in its own process, and writes the JSON file after every part. If a part fails or runs out
of time, the others still run; parts for which no time is left are skipped. Parts that need vLLM, flash-attention or
Liger run if these are installed. Each row of a part is a number; a row with a limit is a check, which fails above the
limit. `--tiny` runs the same code with tiny models on the CPU. benchmarks/gpu_check.md lists the wheels that a machine
without a network needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import ROOT, STACKS_AFTER_S, bench_parser, child_command, reason_of, write_results
from verl_ext.cli import FAILURES, CommandParser, FloatArg, IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError
from verl_ext.hardware import DEVICES, visible_gpus

EXIT_CODES = {"0": "every check that ran passed", "1": "a check or a part failed", **FAILURES}
MIN_SHARE = 0.5
"""A part is skipped if less than this share of its time limit is left."""
LOG_LINES = 60
"""Number of log lines of a failed part in the JSON file."""
COMPILED = "model.compile=true"
LORA = "model.lora_rank=16"
NARROW = "model.fsdp_config.model_dtype=bf16"
LOOP = "optim.override_optimizer_config={fused: false}"
WITH_EXPORT = "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
STAND_INS = {"ray": "class ObjectRef:\n    pass\n", "qwen_vl_utils": "fetch_image = fetch_video = None\n"}
"""Modules that verl imports at import time, with the names that it reads. No part uses them."""


@dataclass(frozen=True)
class GPUCheckSettings:
    """Settings that every part needs.

    Attributes:
        scratch: directory for models, data and runs.
        num_gpus: ranks of the parts that use all GPUs.
        tiny: whether models are tiny and run on the CPU.
    """

    scratch: str
    num_gpus: int
    tiny: bool

    def add_row(self, name: str, value: float, unit: str = "", limit: float | None = None, note: str = "") -> None:
        """Record a number of the running part; `limit` makes it a check, which passes up to that value."""
        row = {"name": name, "value": value, "unit": unit, "limit": limit, "note": note}
        with (Path(self.scratch) / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def command(self, module: str, function: str, *words: str, ranks: int = 1) -> list[str]:
        """The command that runs a part, or a piece of one, in its own processes.

        Args:
            module: a module of this folder.
            function: a function of the module, called with the settings and the words.
            words: further arguments of the function.
            ranks: number of processes.
        """
        return child_command("gpu_check:run_part", json.dumps(asdict(self)), module, function, *words, ranks=ranks)

    def skip(self, reason: str) -> None:
        """Record why the running part, or something in it, did not run."""
        self.add_row("skipped", 0.0, note=reason)


@dataclass(frozen=True)
class GPUCheckPart:
    """One process of the check.

    Attributes:
        name: name of the part.
        words: a module of this folder, a function in it, and further arguments of the function.
        limit_s: time limit, after which the part is stopped.
        on_all_gpus: whether the part runs a rank on every GPU instead of one process.
        needs: packages without which the part is skipped.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    on_all_gpus: bool = False
    needs: tuple[str, ...] = ()


def parts_of(tiny: bool) -> list[GPUCheckPart]:
    """All parts, in the order in which they run."""
    correctness = [
        GPUCheckPart("losses", ("gpu_correctness", "losses", "qwen2", "qwen3", "mistral"), 180),
        GPUCheckPart("kill and resume", ("gpu_correctness", "resume"), 120),
        GPUCheckPart("GPU to CPU and back", ("gpu_correctness", "devices"), 90),
        GPUCheckPart("asynchronous save", ("gpu_correctness", "async_save"), 60),
        GPUCheckPart("GRPO, hf", ("gpu_correctness", "grpo", "hf"), 90),
        GPUCheckPart("GRPO, rows", ("gpu_correctness", "grpo_rows"), 60),
        GPUCheckPart("GRPO, vLLM", ("gpu_correctness", "grpo", "vllm"), 180, needs=("vllm",)),
        GPUCheckPart("controller", ("gpu_speed", "controller"), 120, needs=("torchvision",)),
    ]
    if tiny:
        return [*correctness, speed_part("tiny"), speed_part("tiny", "LoRA", LORA), save_part("tiny")]
    factors = [
        speed_part("1.5b", "all logits", "model.fused_loss=false"),
        speed_part("1.5b", "AdamW in a loop", LOOP),
        speed_part("1.5b", "sdpa", "model.attn_implementation=sdpa", needs=("flash_attn",)),
        speed_part("1.5b", "Liger", "model.use_liger=true", needs=("liger_kernel",)),
    ]
    compiled = [speed_part(shape, "compiled", COMPILED, limit_s=150) for shape in ("1.5b", "3b", "7b")]
    narrow = [speed_part(shape, "compiled, bf16 weights", COMPILED, NARROW, limit_s=150) for shape in ("3b", "7b")]
    lora = speed_part("7b", "LoRA, compiled", LORA, COMPILED, limit_s=300)
    return [*correctness, speed_part("1.5b"), *factors, save_part("1.5b"), *compiled, *narrow, lora]


def speed_part(
    shape: str, variant: str = "", *overrides: str, limit_s: float = 75, needs: tuple[str, ...] = ()
) -> GPUCheckPart:
    """A part that measures training steps of one shape, with overrides of the defaults."""
    name = f"SFT {shape}, {variant}" if variant else f"SFT {shape}"
    return GPUCheckPart(name, ("gpu_speed", "steps", shape, *overrides), limit_s, on_all_gpus=True, needs=needs)


def save_part(shape: str) -> GPUCheckPart:
    """A part that measures saves of one shape, plain and asynchronous."""
    words = ("gpu_speed", "save", shape, WITH_EXPORT, "trainer.checkpoint.async_save=true")
    return GPUCheckPart(f"save {shape}", words, 180, on_all_gpus=True)


class GPUCheck:
    """Runs parts and keeps their results.

    Args:
        settings: settings of the check.
        deadline: time on the clock of `time.monotonic` at which a running part is stopped.
    """

    def __init__(self, settings: GPUCheckSettings, deadline: float) -> None:
        self.settings, self.deadline = settings, deadline
        self.results: list[dict[str, Any]] = []

    @property
    def failures(self) -> list[str]:
        """What failed, one line each."""
        failed = [f"{part['part']}: {part['problem']}" for part in self.results if part["problem"]]
        rows = [(part["part"], row) for part in self.results for row in part["rows"] if is_wrong(row)]
        return failed + [f"{part}: {row['name']} is {row['value']:.3g}, above {row['limit']:.3g}" for part, row in rows]

    def run(self, part: GPUCheckPart) -> None:
        """Run one part, print its rows and keep them."""
        missing = [package for package in part.needs if importlib.util.find_spec(package) is None]
        begun, left = time.monotonic(), self.deadline - time.monotonic()
        rows_file = Path(self.settings.scratch) / "rows.jsonl"
        rows_file.unlink(missing_ok=True)
        problem = ""
        if missing:
            self.settings.skip(f"{missing[0]} is not installed")
        elif left < MIN_SHARE * part.limit_s:
            self.settings.skip(f"{max(left, 0):.0f} s are left; run --parts '{part.name}' alone")
        else:
            problem = self._start(part, min(part.limit_s, left))
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
        seconds = time.monotonic() - begun
        result: dict[str, Any] = {"part": part.name, "seconds": round(seconds, 1), "problem": problem, "rows": rows}
        if problem:
            result["log"] = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        self.results.append(result)
        print_line(f"{part.name} ({seconds:.0f} s)")
        for row in rows:
            print_line(f"  {line_of(row)}")
        if problem:
            print_line("\n".join(f"  | {line}" for line in result["log"]))
            print_line(f"  FAILED: {problem}")

    @property
    def _log(self) -> Path:
        """File with the output of the running part."""
        return Path(self.settings.scratch) / "part.log"

    def _start(self, part: GPUCheckPart, limit_s: float) -> str:
        """Run the part's process; returns why it failed, empty if it did not."""
        ranks = self.settings.num_gpus if part.on_all_gpus else 1
        command = self.settings.command(*part.words, ranks=ranks)
        variables = {**os.environ, STACKS_AFTER_S: str(max(limit_s - 5, 1)), "PYTHONUNBUFFERED": "1"}
        with self._log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"ran out of time after {limit_s:.0f} s"
            finally:
                kill_tree(process)
        output = self._log.read_text(errors="replace")
        return reason_of(subprocess.CompletedProcess(command, code, output, "")) if code else ""


def run_part(settings: str, module: str, function: str, *words: str) -> None:
    """Call a part's function in this process; for the arguments, see `GPUCheckSettings.command`."""
    part = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    part(GPUCheckSettings(**json.loads(settings)), *words)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, which may be in other sessions."""
    if process.poll() is None:
        descendants = psutil.Process(process.pid).children(recursive=True)
        for each in descendants:
            each.kill()
        process.kill()
    process.wait()


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether a check fails; NaN is above every limit."""
    return row["limit"] is not None and not row["value"] <= row["limit"]


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    if row["name"] == "skipped":
        return f"skipped: {row['note']}"
    limit = "" if row["limit"] is None else f"   limit {row['limit']:.3g}   {'FAILED' if is_wrong(row) else 'ok'}"
    note = f"   ({row['note']})" if row["note"] else ""
    return f"{row['name']:<60}{row['value']:>12.5g} {row['unit']:<10}{limit}{note}"


def set_up(scratch: Path) -> None:
    """Set environment variables for all parts, and write stand-ins for missing modules and data for small models.

    Raises:
        UserError: the data cannot be prepared.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    stand_ins = scratch / "stand_ins"
    stand_ins.mkdir()
    for module, content in STAND_INS.items():
        if importlib.util.find_spec(module) is None:
            (stand_ins / f"{module}.py").write_text(content)
    paths.append(str(stand_ins))
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "VERL_EXT_PYTHON": sys.executable}
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as in `run_sft.sh`
    from verl_ext.data.prepare import prepare

    prepare(["quickstart", "--output", str(scratch / "quickstart"), "--samples", "500"])


def build_parser() -> CommandParser:
    """Return the parser, with the text of --help."""
    examples = "--output gpu.json", "--tiny", "--parts 'SFT 1.5b' 'kill and resume'"
    parser = bench_parser("gpu_check", __doc__, *examples, exit_codes=EXIT_CODES)
    parser.add_argument("--tiny", action="store_true", help="use tiny models on the CPU, to test the check itself")
    parser.add_argument("--minutes", type=FloatArg(), default=10.0, help="time limit for all parts together")
    parser.add_argument("--num-gpus", type=IntArg(), help="GPUs of the parts that use several (default: all visible)")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="run only these (default: all; --list names them)")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    return parser


def chosen_parts(names: list[str] | None, tiny: bool) -> list[GPUCheckPart]:
    """The parts with these names; None for all.

    Raises:
        UserError: a part does not exist.
    """
    parts = parts_of(tiny)
    known = [part.name for part in parts]
    for name in names or ():
        if name not in known:
            raise UserError(f"there is no part '{name}'; use some of {', '.join(known)}")
    return [part for part in parts if names is None or part.name in names]


@clean_exit()
def main() -> int:
    """Run the parts, print their rows, and write them."""
    arguments = build_parser().parse_args()
    parts = chosen_parts(arguments.parts, arguments.tiny)
    if arguments.list:
        print_line("\n".join(part.name for part in parts))
        return 0
    num_visible = len(visible_gpus())
    if not arguments.tiny and not num_visible:
        raise UserError("no GPU is visible; --tiny runs the check on the CPU")
    if arguments.num_gpus is not None and not arguments.tiny and arguments.num_gpus > num_visible:
        raise UserError(f"--num-gpus is {arguments.num_gpus}, but only {num_visible} GPUs are visible; lower it")
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.tiny:
        os.environ[DEVICES] = ""
    num_gpus = arguments.num_gpus or (1 if arguments.tiny else num_visible)
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as scratch:
        settings = GPUCheckSettings(scratch, num_gpus, arguments.tiny)
        set_up(Path(scratch))
        check = GPUCheck(settings, deadline)
        for part in parts:
            check.run(part)
            results = {"num_gpus": num_gpus, "tiny": arguments.tiny, "parts": check.results}
            write_results(results, arguments.output, quiet=True)
    if arguments.output is not None:
        print_line(f"wrote {arguments.output}")
    for failure in check.failures:
        print_line(f"FAILED: {failure}")
    num_checks = sum(row["limit"] is not None for part in check.results for row in part["rows"])
    print_line(f"{num_checks} checks in {len(parts)} parts, {len(check.failures)} failures")
    return int(bool(check.failures))


if __name__ == "__main__":
    raise SystemExit(main())
