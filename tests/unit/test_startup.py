"""Startup timing, and imports without the garbage collector."""

import gc
import subprocess
import sys
import time

import pytest

from benchmarks.start import parts_of, summary_of
from tests.helpers import ROOT
from verl_ext.metrics.registry import START
from verl_ext.metrics.timing import StartupTimer, process_start
from verl_ext.processes import defer_gc


def test_startup_parts_add_up_over_two_processes(tmp_path):
    launcher, rank = StartupTimer(), StartupTimer()
    launcher.begin(10.0)
    launcher.mark("launcher", 11.0)
    launcher.save(tmp_path)
    assert launcher.take() == {}  # it is the rank's now, and a restart begins with nothing
    rank.load(tmp_path)
    for part, moment in (("torchrun", 13.0), ("imports", 17.0), ("data", 18.0), ("imports", 18.5)):
        rank.mark(part, moment)
    assert rank.take() == {"launcher": 1.0, "torchrun": 2.0, "imports": 4.5, "data": 1.0, "total": 8.5}
    rank.mark("first_step")
    assert rank.take() == {}


def test_nothing_is_timed_without_saved_start(tmp_path):
    startup = StartupTimer()
    startup.load(tmp_path)
    startup.mark("model")
    assert startup.take() == {}


def test_process_start_is_known():
    code = "from verl_ext.metrics.timing import process_start; print(process_start())"
    before = time.perf_counter()
    started = float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout)
    assert before - 0.05 < started < time.perf_counter()
    assert process_start() < before


def test_gc_is_disabled_only_during_imports():
    frozen = gc.get_freeze_count()
    try:
        with defer_gc():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen
        with pytest.raises(ImportError), defer_gc():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_disabled_gc_stays_disabled():
    gc.disable()
    try:
        with defer_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_benchmark_reads_recorded_startup_parts():
    rows = [
        {"time": 107.0, "val/loss": 6.0},
        {"time": 108.0, "train/loss": 6.0},
        {"time": 108.1, "time/start/launcher_s": 1.0, "time/start/imports_s": 6.5, "time/start/total_s": 7.5},
    ]
    parts = parts_of(rows, begun=100.0)
    assert parts == {"launcher_s": 1.0, "imports_s": 6.5, "total_s": 7.5, "outside_s": 8.0}
    assert summary_of([parts, {**parts, "outside_s": 9.0}])["outside_s"] == {"min": 8.0, "median": 8.5, "max": 9.0}
    assert {f"time/start/{name}" for name in parts} - {"time/start/outside_s"} <= START.keys()


def test_launcher_imports_no_code_of_other_stages():
    code = (
        "import sys, verl_ext.launch.preflight, verl_ext.launch.run, verl_ext.health.__main__\n"
        "unwanted = {'torch', 'scipy', 'verl_ext.grpo.rewards.check', 'verl_ext.data.image_questions'}\n"
        "print(sorted(unwanted & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_print_config_imports_no_launch_code():
    code = (
        "import sys\nfrom verl_ext.launch.__main__ import launch, parse_arguments\n"
        "from verl_ext.processes import StopSignals\n"
        "launch(parse_arguments(['sft', '2', '--print-config', 'optim.lr=1']), StopSignals())\n"
        "unwanted = {'torch', 'pandas', 'numpy', 'pyarrow', 'eval_pipeline.problems', 'verl_ext.data.prepare'}\n"
        "unwanted |= {'verl_ext.health.rules', 'verl_ext.metrics.recorder', 'verl_ext.launch.preflight'}\n"
        "print(sorted(unwanted & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
