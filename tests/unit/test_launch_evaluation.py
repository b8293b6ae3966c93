"""What `eval.watch=true` requires before a training starts: a valid recipe, and GPUs that no rank uses."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from eval_pipeline.__main__ import main
from eval_pipeline.config import EngineConfig
from eval_pipeline.pool import assign_gpus
from tests.helpers import ROOT
from verl_ext import hardware
from verl_ext.errors import UserError
from verl_ext.launch import preflight
from verl_ext.launch.preflight import check_evaluation, require_free_gpus
from verl_ext.launch.torchrun import set_rank_environment
from verl_ext.launch.watcher import EvalWatcher, evaluation_environment, is_worth_restart
from verl_ext.processes import StopSignals
from verl_ext.trainer.stages import RunConfig, load_config

LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA H200 (UUID: GPU-bbbb2222-0000)
  MIG 1g.18gb     Device  0: (UUID: MIG-cccc)
GPU 2: NVIDIA H200 (UUID: GPU-aaaa3333-0000)
"""


@pytest.fixture
def three_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi lists three GPUs."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{LISTED}EOF\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def with_devices(value: str) -> RunConfig:
    return load_config("sft", [f"eval.devices={value}"])


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("null", None),
        ("7", ["7"]),
        ("[6,7]", ["6", "7"]),
        ("6,7", ["6", "7"]),
        ("'6, 7'", ["6", "7"]),
        ("GPU-5a1b-22", ["GPU-5a1b-22"]),
        ("GPU-5a,GPU-6b", ["GPU-5a", "GPU-6b"]),
        ("[GPU-5a,MIG-6b]", ["GPU-5a", "MIG-6b"]),
    ],
)
def test_accepts_devices_as_numbers_or_ids(value: str, names: list[str] | None) -> None:
    config = with_devices(value)
    assert config.eval.device_names == names
    if names is not None:
        assert evaluation_environment(config)["CUDA_VISIBLE_DEVICES"] == ",".join(names)


@pytest.mark.parametrize(
    ("watch", "already_set", "order"),
    [
        (True, None, "PCI_BUS_ID"),
        (True, "FASTEST_FIRST", "FASTEST_FIRST"),
        (False, None, None),  # the ranks use the fastest GPUs
    ],
)
def test_ranks_and_evaluation_number_gpus_alike(
    watch: bool, already_set: str | None, order: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("sft", ["eval.devices=1", f"eval.watch={str(watch).lower()}"])
    monkeypatch.setattr(os, "environ", {} if already_set is None else {"CUDA_DEVICE_ORDER": already_set})
    if watch:
        assert evaluation_environment(config)["CUDA_DEVICE_ORDER"] == order
    set_rank_environment(config)
    assert os.environ.get("CUDA_DEVICE_ORDER") == order


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 2, "1"), (2, 1, "1"), (64, 8, "7"), (16, 1, "8")])
def test_evaluation_gets_share_of_cores(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: str) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    config = load_config("sft", [f"trainer.n_gpus_per_node={ranks}"])
    assert evaluation_environment(config)["OMP_NUM_THREADS"] == threads


def test_restarted_evaluation_does_not_get_variables_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    def start(command: list[str], env: dict[str, str], **options: Any) -> Any:
        environments.append(env)
        os.environ["VERL_LOGGING_LEVEL"] = "WARN"  # the launcher sets it for the ranks
        return SimpleNamespace(wait=lambda: 9 if len(environments) == 1 else 0, send_signal=lambda number: None)

    monkeypatch.setenv("VERL_LOGGING_LEVEL", "")
    monkeypatch.delenv("VERL_LOGGING_LEVEL")  # restored at the end
    monkeypatch.setattr("verl_ext.launch.watcher.subprocess.Popen", start)
    monkeypatch.setattr("verl_ext.launch.outcome.FIRST_PAUSE_S", 0)
    watcher = EvalWatcher(load_config("sft", [f"trainer.default_local_dir={tmp_path}"]))
    watcher.finish(StopSignals())
    assert [env.get("VERL_LOGGING_LEVEL") for env in environments] == [None, None]


def test_keeps_omp_num_threads_set_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert evaluation_environment(load_config("sft", []))["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("value", ["[]", "''", "true", "-1", "7.5", "[6,6]", "[[6]]", "gpu7", "'6;7'", "6,"])
def test_rejects_invalid_devices(value: str) -> None:
    with pytest.raises(UserError, match="eval.devices"):
        with_devices(value)


def test_rejects_recipe_that_is_not_text() -> None:
    with pytest.raises(UserError, match=r"eval.recipe' to \[5\].* must be a string, or null"):
        load_config("sft", ["eval.recipe=[5]"])


def test_rejects_watching_checkpoints_without_export() -> None:
    contents = "trainer.checkpoint.save_contents=[model]"
    load_config("sft", [contents])
    with pytest.raises(UserError, match="add hf_model to trainer.checkpoint.save_contents"):
        load_config("sft", [contents, "eval.watch=true"])


@pytest.mark.parametrize(
    ("visible", "devices", "num_ranks", "words"),
    [
        (None, None, 2, "specify them with eval.devices"),
        (None, ["2"], 2, None),
        (None, ["1", "2"], 2, "GPU 1, which one of the 2 ranks uses"),
        (None, ["GPU-aaaa3333-0000"], 2, None),
        (None, ["GPU-bbbb"], 2, "GPU GPU-bbbb, which one"),
        (None, ["3"], 2, "GPU 3, but this machine has GPUs 0 to 2"),
        (None, ["GPU-dddd"], 2, "GPU GPU-dddd, but this machine has"),
        (None, ["MIG-cccc"], 2, None),
        ("2,0", ["0"], 1, None),
        ("2,0", ["2"], 1, "GPU 2, which one of the 1 ranks uses"),
        ("GPU-aaaa3333,1", ["2"], 1, "GPU 2, which one of the 1 ranks uses"),
        ("1,-1,2", ["2"], 2, None),
        ("", ["0"], 2, None),
        ("", None, 2, None),
    ],
)
def test_rejects_gpus_used_by_ranks(
    visible: str | None,
    devices: list[str] | None,
    num_ranks: int,
    words: str | None,
    three_gpus: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if words is None:
        return require_free_gpus(devices, num_ranks)
    with pytest.raises(UserError, match=words):
        require_free_gpus(devices, num_ranks)


def test_gpus_are_found_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has the device files of its own GPUs only, but sees what the driver says about all GPUs."""
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    monkeypatch.setattr(hardware, "DRIVER_GPUS", driver)
    monkeypatch.setattr(hardware, "DEVICE_FILES", devices)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert hardware.listed_gpus() == []
    devices.mkdir()
    for minor, address in enumerate(("0000:9a:00.0", "0000:17:00.0", "0000:3b:00.0")):
        (driver / address).mkdir(parents=True)
        information = (
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{minor}\nBus Type: \t PCIe\nDevice Minor: \t {minor}\n"
        )
        (driver / address / "information").write_text(information)
    assert hardware.listed_gpus() == []
    for minor in (0, 1):
        (devices / f"nvidia{minor}").touch()
    assert hardware.listed_gpus() == ["GPU-1", "GPU-0"]


@pytest.mark.usefixtures("three_gpus")
def test_processes_with_vllm_get_full_gpu_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA accepts prefixes of ids, but vLLM asks NVML for the GPU with exactly this id."""
    devices = evaluation_environment(with_devices("GPU-bbbb,GPU-aaaa3333"))["CUDA_VISIBLE_DEVICES"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert assign_gpus(None, EngineConfig()) == ["GPU-bbbb2222-0000", "GPU-aaaa3333-0000"]
    for visible, completed in (
        ("GPU-bbbb,GPU-aaaa3333", "GPU-bbbb2222-0000,GPU-aaaa3333-0000"),
        ("2,0", "2,0"),
        ("MIG-cc,GPU-aaaa", "MIG-cc,GPU-aaaa"),
    ):
        monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": visible})
        set_rank_environment(load_config("grpo", []))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == completed


@pytest.fixture
def recipe(quickstart: Path, tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"datasets: {{d: {{format: quickstart, path: {quickstart}/problems.jsonl}}}}\ntiers: {{tier1: [d]}}"
    )
    return path


def watched(recipe: Path | str, *overrides: str) -> RunConfig:
    config = load_config("sft", ["eval.watch=true", f"eval.recipe={recipe}", *overrides])
    config.trainer.n_gpus_per_node = 2
    return config


@pytest.fixture(autouse=True)
def importable_from_any_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable from any directory, as the scripts do."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m eval_pipeline check`, which the launcher starts as a process, inside this one."""

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "eval_pipeline"]
        out, err = io.StringIO(), io.StringIO()
        with patch.dict(os.environ, env, clear=True), redirect_stdout(out), redirect_stderr(err):
            with pytest.raises(SystemExit) as left:
                main(command[3:])
        assert isinstance(left.value.code, int)
        return subprocess.CompletedProcess(command, left.value.code, out.getvalue(), err.getvalue())

    monkeypatch.setattr(preflight, "subprocess", SimpleNamespace(run=run))


def test_accepts_valid_recipe(recipe: Path) -> None:
    check_evaluation(watched(recipe))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("datasets: {d: {format: quickstart, path: /nowhere/problems.jsonl}}", "/nowhere/problems.jsonl"),
        ("datasets: {d: {format: quickstart, path: MINE}}", "mine.yaml, line 1"),
        ("datasets: {d: {format: quick, path: org/name}}", "datasets.d.format is 'quick'"),
        ("selection: {metric: accuracy}", "selection.metric is 'accuracy'"),
        ("tiers: {tier1: []}", "lists a dataset"),
        ("batch_sizes: 3", "batch_size"),
        (
            "engine: {kind: openai, base_url: 'http://localhost:1/v1'}",
            "engine.kind=openai serves only one model; remove engine.kind=openai",
        ),
    ],
)
def test_launcher_rejects_what_watcher_would_reject(recipe: Path, line: str, words: str, in_process: None) -> None:
    key = line.partition(":")[0]
    others = [old for old in recipe.read_text().splitlines() if not old.startswith(key + ":")]
    recipe.write_text("\n".join([line.replace("MINE", str(recipe)), *others]))
    with pytest.raises(UserError, match="cannot start: ") as refused:
        check_evaluation(watched(recipe))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_check_shows_selection_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"datasets: {{m: {{format: math, path: {tmp_path}/m.jsonl}}}}\ntiers: {{tier1: [m]}}\n")

    def check(*words: str) -> tuple[str, str]:
        with pytest.raises(SystemExit):
            main(["check", "--recipe", str(recipe), "judge.isolation=rlimits", *words])
        return tuple(capsys.readouterr())

    assert "; best checkpoint by accepted_at_1 on m; " in check()[0]
    assert json.loads(check("--json")[0])["selection_metric"] == "accepted_at_1"
    assert "which is 1 for every answer" in check("selection.metric=exec_success_rate")[1]
    on_hub = "datasets.m.path=org/name"
    assert "by accepted_at_1 on m" in check(on_hub)[0]
    assert "by exec_success_rate on m" in check(on_hub, "datasets.m.format=humaneval")[0]
    assert "by exec_success_rate or accepted_at_1 on m" in check(on_hub, "datasets.m.format=verl")[0]
    assert (
        "by exec_success_rate on m" in check(on_hub, "datasets.m.format=verl", "selection.metric=exec_success_rate")[0]
    )


def test_rejects_unknown_recipe_only_if_watching() -> None:
    with pytest.raises(UserError, match="no recipe 'quikstart' .* did you mean recipe=quickstart"):
        check_evaluation(watched("quikstart"))
    check_evaluation(watched("quikstart", "eval.watch=false"))


def test_rejects_served_model_only_if_watching(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["engine.kind=openai", "engine.base_url=http://localhost:1/v1"]
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--recipe", str(recipe), *server])
    assert "The recipe is valid" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--watch", "--recipe", str(recipe), *server])
    assert "`watch` loads every model itself" in capsys.readouterr().err


def test_checks_gpus_against_those_required_by_engine(recipe: Path, three_gpus: None, in_process: None) -> None:
    with pytest.raises(UserError, match="specify them with eval.devices"):
        check_evaluation(watched(recipe))
    with pytest.raises(UserError, match="GPU 0, which one of the 2 ranks uses"):
        check_evaluation(watched(recipe, "eval.devices=[0,2]"))
    check_evaluation(watched(recipe, "eval.devices=2"))
    text = recipe.read_text()
    recipe.write_text(text + "\nengine: {tensor_parallel_size: 2}")
    with pytest.raises(UserError, match="needs 2 GPUs, but 1 are visible"):
        check_evaluation(watched(recipe, "eval.devices=2"))
    recipe.write_text(text + "\nexecutor: {kind: ray, address: 'localhost:1'}")  # its GPUs are its own affair
    check_evaluation(watched(recipe))


def test_only_first_node_checks_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    check_evaluation(watched("quikstart"))
    monkeypatch.setenv("NODE_RANK", "0")
    with pytest.raises(UserError, match="quikstart"):
        check_evaluation(watched("quikstart"))


@pytest.mark.parametrize(
    ("exit_code", "finished", "expected"),
    [
        (0, False, False),
        (2, False, False),
        (75, False, False),
        (1, False, True),
        (1, True, False),
        (-9, False, True),
        (-9, True, True),
        (137, True, True),
    ],
)
def test_only_crashes_are_restarted(exit_code: int, finished: bool, expected: bool) -> None:
    assert is_worth_restart(exit_code, finished) is expected


@pytest.mark.parametrize(
    ("exit_code", "error", "commands"),
    [
        (0, None, ["status"]),
        (1, "ended with exit code 1 (some of its evaluations failed", ["status", "retry", "watch"]),
        (2, "ended with exit code 2 (no recipe 'x'; specify another)", ["watch"]),
    ],
)
def test_next_commands_depend_on_evaluation_outcome(
    exit_code: int,
    error: str | None,
    commands: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last_line = "error: no recipe 'x'; specify another"
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/watch.log").write_text(f"{last_line}\n")
    monkeypatch.setattr(EvalWatcher, "_run_once", lambda self: exit_code)
    (tmp_path / "run.json").write_text('{"status": "finished", "attempts": []}')
    overrides = (f"trainer.default_local_dir={tmp_path}", "model.partial_pretrain=org/name", "prepare=[]")
    config = load_config("sft", ["recipe=verl", "eval.watch=true", *overrides])
    monkeypatch.setattr("verl_ext.launch.outcome.FIRST_PAUSE_S", 0)
    watching = EvalWatcher(config)
    assert watching.finish(StopSignals()) == 0  # the training is done
    told = capsys.readouterr()
    typed = re.findall(r"run\.sh (\w+) (\S+)$", told.out, re.MULTILINE)
    assert typed == [(command, str(tmp_path)) for command in commands]
    assert error is None or (told.err.startswith("error: training finished, but ") and error in told.err)
    assert error is not None or not told.err
