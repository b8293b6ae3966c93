"""Whether the evaluation beside a training could start, asked before the training does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from verl_ext.errors import USER_ERROR_EXIT_CODE, UserError
from verl_ext.launch.free_gpus import require_free_gpus
from verl_ext.launch.watch_process import evaluation_environment
from verl_ext.trainer.stages import RunConfig


def check_evaluation(config: RunConfig) -> None:
    """With `eval.watch=true`, refuse what the watcher would refuse, and GPUs that the ranks use; on the first node.

    Raises:
        UserError: the recipe, a data set of it that is a local file, the sandbox, or `eval.devices` cannot be used.
    """
    if not config.eval.watch or int(os.environ.get("NODE_RANK", "0")) != 0:
        return
    if _ask(config)["gpus"]:
        require_free_gpus(config.eval.device_names, config.trainer.n_gpus_per_node)


def _ask(config: RunConfig) -> dict[str, Any]:
    """What `python -m eval_pipeline check` says; a process, because nothing here imports the evaluation."""
    command = [sys.executable, "-m", "eval_pipeline", "check", "--watch", "--json"]
    command.append(f"--recipe={config.eval.recipe_name}")  # one word, whatever it begins with
    asked = subprocess.run(command, env=evaluation_environment(config), capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        return json.loads(asked.stdout)
    reason = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
    if asked.returncode != USER_ERROR_EXIT_CODE:
        reason = f"its check ended with exit code {asked.returncode}: {reason}"
    raise UserError(f"the evaluation during training (eval.watch=true) cannot start: {reason}")
