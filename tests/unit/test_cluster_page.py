"""The job scripts and manifests of docs/guides/cluster.md agree with the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import ROOT
from verl_ext.errors import STOPPED_EXIT_CODE, UNHEALTHY_EXIT_CODE, USER_ERROR_EXIT_CODE
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.trainer.stages import load_config

PAGE = (ROOT / "docs/guides/cluster.md").read_text()
SCRIPTS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
JOB, JOB_SET = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
SOMEBODY_SHOULD_LOOK = [USER_ERROR_EXIT_CODE, UNHEALTHY_EXIT_CODE]


def rules_of(job: dict[str, Any]) -> list[tuple[str, Any]]:
    """The actions of the pod failure policy, with their exit codes (None for a lost node)."""
    rules = job["podFailurePolicy"]["rules"]
    return [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules]


def command_of(pod: dict[str, Any]) -> list[str]:
    """The arguments after `run_sft.sh`."""
    [container] = pod["containers"]
    words = shlex.split(" ".join(container["command"]))
    return words[words.index("run_sft.sh") + 1 :]


def assert_pod_suits(pod: dict[str, Any]) -> None:
    """Check that the command parses, saves within the grace period, and mounts only existing volumes."""
    arguments = parse_arguments(["sft", *command_of(pod)])
    config = load_config("sft", arguments.overrides)
    [container] = pod["containers"]
    assert config.trainer.preemption.grace_s < pod["terminationGracePeriodSeconds"]
    assert arguments.num_processes == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert pod["restartPolicy"] == "Never"


def test_manifests_match_exit_codes_and_commands() -> None:
    job = JOB["spec"]
    assert rules_of(job) == [("FailJob", SOMEBODY_SHOULD_LOOK), ("Ignore", [STOPPED_EXIT_CODE]), ("Ignore", None)]
    assert_pod_suits(job["template"]["spec"])
    [node] = JOB_SET["spec"]["replicatedJobs"]
    job = node["template"]["spec"]
    assert rules_of(job) == [("FailJob", SOMEBODY_SHOULD_LOOK)] and job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert_pod_suits(pod)
    environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert int(environment["NNODES"]) == job["completions"] == job["parallelism"]
    name = JOB_SET["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-{node['name']}-0-0.{name}"
    assert "NODE_RANK=$JOB_COMPLETION_INDEX exec bash run_sft.sh" in pod["containers"][0]["command"][-1]


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_scripts_and_their_commands_parse(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(script)
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    commands = re.findall(r"run_sft\.sh ([^'&\n]*)", script.replace("\\\n", " "))
    assert commands
    for command in commands:
        arguments = parse_arguments(["sft", *shlex.split(command)])
        assert load_config("sft", arguments.overrides).recipe == "qwen2.5_coder_7b"


def test_spot_script_forwards_notice_and_exit_code(tmp_path: Path) -> None:
    script = next(text for text in SCRIPTS if "NOTICE_URL" in text)
    (tmp_path / "spot.sh").write_text(script)
    notice = tmp_path / "notice"
    stand_in = f'trap "exit {STOPPED_EXIT_CODE}" USR1\necho "$NODE_RANK $*" > words\ntouch {notice}\n'
    (tmp_path / "run_sft.sh").write_text(stand_in + "while :; do sleep 0.1; done\n")
    environment = {**os.environ, "NOTICE_URL": notice.as_uri()}
    done = subprocess.run(["bash", "spot.sh", "1"], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert done.returncode == STOPPED_EXIT_CODE
    assert (tmp_path / "words").read_text().startswith("1 8 recipe=qwen2.5_coder_7b")
