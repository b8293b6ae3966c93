"""The entry point of every rank, which torchrun starts: `python -m verl_ext.trainer CONFIG.yaml`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from verl_ext.cli import child_process_args
from verl_ext.commands import program
from verl_ext.config.schema import flat
from verl_ext.console import print_line
from verl_ext.console_log import recording_console
from verl_ext.errors import STOP_SIGNALS, USER_ERROR_EXIT_CODE, Stop, UserError
from verl_ext.files import replace_file
from verl_ext.metrics.sinks import drop_tensorboard_errors
from verl_ext.metrics.timing import process_start, startup
from verl_ext.processes import LAUNCHER_PID, StopSignals, defer_gc, end_with_parent, quiet_stdout
from verl_ext.trainer.stages import STAGES, RunConfig, read_config

MAY_DIFFER_BETWEEN_NODES = ("trainer.default_local_dir", "trainer.resume_mode", "eval.")
"""Keys that only the first node uses, or whose values are paths; a launcher that restarts its ranks sets the mode."""


def main() -> None:
    """Train the stage of the configuration; a `UserError` goes to the launcher, which prints it once."""
    [path] = child_process_args("verl_ext.trainer", "Trains as one rank of torchrun.", f"{program('sft')} 2", "config")
    end_with_launcher()
    end_at_first_signal()
    startup.load(Path(path).parent)
    startup.mark("torchrun", process_start())
    try:
        config = read_config(Path(path))
    except UserError as error:
        report_to_launcher(str(error))
        leave(USER_ERROR_EXIT_CODE)
    rank = os.environ.get("RANK", "0")
    with recording_console(config.trainer.run_dir, f"rank {rank}"):
        try:
            exit_code = run_rank(config)
        except UserError as error:
            report_to_launcher(str(error))
            exit_code = error.exit_code
        except Exception as error:  # printed within the block, so that it is recorded
            from verl_ext.distributed import lost_connection

            if reason := lost_connection(error):
                print_line(f"rank {rank}: lost the connection to another rank ({reason}); exiting", sys.stderr)
            else:
                traceback.print_exc()
            exit_code = 1
    leave(exit_code)


def leave(exit_code: int) -> NoReturn:
    """End this process as `sys.exit` does, but without destructors, which take seconds of the grace period.

    If it holds vLLM's memory on a GPU, also without exit handlers: the memory pools of a sleeping engine are unmapped,
    and may be unmapped again.
    """
    if "vllm" not in sys.modules or not sys.modules["torch"].cuda.is_initialized():
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads; Python does so before exit handlers
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def end_with_launcher() -> None:
    """Make the kernel kill this rank when its launcher dies.

    torchrun starts each rank in its own session. Without this, if the launcher were killed by SIGKILL, the ranks would
    keep training in a run directory that the next start of the same command uses.
    """
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    end_with_parent()
    if os.getppid() != launcher:  # the launcher died before, perhaps while this interpreter started
        os._exit(1)


def end_at_first_signal() -> None:
    """Let the kernel end this rank at the first signal, until `StopVote.arm`: there is nothing to save yet."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler raises KeyboardInterrupt


def report_to_launcher(message: str) -> None:
    """Write a message to the file that torchrun reads after a rank has failed; if it cannot be written, print it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    with suppress(OSError):  # the disk of the temporary directory is full
        if path is not None:
            return replace_file(Path(path), [json.dumps({"message": message})])
    print_line(f"error: {message}", sys.stderr)


def run_rank(config: RunConfig) -> int:
    """Join the process group, build the stage's data and trainer, and train.

    Returns:
        0 if all steps completed, otherwise the exit code of the stop.

    Raises:
        UserError: the input cannot be used.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    drop_tensorboard_errors()
    stage = STAGES[config.stage]
    with defer_gc():  # here, because they take seconds, and `end_with_launcher` must run first
        import torch.distributed as dist
        from transformers import set_seed

        from verl_ext.distributed import (
            build_meshes,
            init_process_group,
            local_rank_zero_first,
            local_world_size,
            on_every_rank,
            on_rank_zero,
            require_same_settings,
            require_shared_directory,
        )
        from verl_ext.trainer.device import prepare_device
        from verl_ext.trainer.tokenizer import load_tokenizer

        trainer_class = stage.trainer_class()
    startup.mark("imports")

    device_name = prepare_device(config)
    with quiet_stdout():
        init_process_group(device_name)
    if config.trainer.nnodes > 1:
        settings = {key: value for key, value in flat(config).items() if not key.startswith(MAY_DIFFER_BETWEEN_NODES)}
        require_same_settings(settings)
    with quiet_stdout():
        meshes = build_meshes(device_name, config.sequence_parallel_size)
    # Dropout differs between ranks, but not between ranks that share a sequence.
    set_seed(config.trainer.seed + dist.get_rank() // config.sequence_parallel_size)
    startup.mark("process_group")
    if config.trainer.nnodes > 1:
        require_shared_directory(config.trainer.run_dir)
    tokenizer = on_every_rank(lambda: load_tokenizer(config))
    startup.mark("tokenizer")
    each_rank = local_rank_zero_first if stage.caches_tokens else on_every_rank
    datasets = each_rank(lambda: stage.load_datasets(config, tokenizer, progress=dist.get_rank() == 0))
    if device_name == "cpu":
        from verl_ext.plan.cpu_memory import check_memory

        num_ranks, num_ranks_here = dist.get_world_size(), local_world_size()
        on_rank_zero(lambda: check_memory(config, datasets[0], num_ranks, num_ranks_here))
    startup.mark("data")

    trainer = trainer_class(config, *meshes, tokenizer, *datasets, StopSignals(STOP_SIGNALS))
    exit_code = 0
    try:
        trainer.fit()
    except Stop as stop:
        exit_code = stop.exit_code
    # torchrun ends all ranks when the first one exits with an error; rank 0 may still be closing the trackers.
    dist.barrier()
    dist.destroy_process_group()
    return exit_code


if __name__ == "__main__":
    main()
