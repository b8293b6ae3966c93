"""Metrics of every training: what is learnt, where the time goes, the start, the machine."""

from __future__ import annotations

from verl_ext.metrics.registry.metric import LARGEST, RANK_0, RATE, SAME, SUM, TOKEN_MEAN, Metric

TRAINING: dict[str, Metric] = {
    "train/loss": Metric(
        "nat/token",
        "Cross-entropy over the loss tokens of the whole global batch; in the stage grpo the clipped policy loss, in "
        "the stage budget `train/policy_gradient_loss`.",
        TOKEN_MEAN,
    ),
    "train/perplexity": Metric("1", "exp(`train/loss`).", "from the reduced loss"),
    "train/lr(1e-3)": Metric("1e-3", "Learning rate used by this step, times 1000.", SAME),
    "train/grad_norm": Metric("1", "L2 norm of the whole gradient before clipping.", "over all shards"),
    "train/num_loss_tokens": Metric("token", "Tokens of the global batch that have a loss.", SUM),
    "train/epoch": Metric("epoch", "Passes over the training data since the run began, with its fraction.", SAME),
    "train/skipped_steps": Metric(
        "step", "Updates since the run began that were left out: loss or gradient was not finite.", SAME
    ),
    "train/time(s)": Metric("s", "Forward, backward and update, without the wait for data; verl's name.", LARGEST),
}

VALIDATION: dict[str, Metric] = {
    "val/loss": Metric("nat/token", "Cross-entropy over the loss tokens of the whole validation set.", TOKEN_MEAN),
    "val/perplexity": Metric("1", "exp(`val/loss`).", "from the reduced loss"),
    "val/num_loss_tokens": Metric("token", "Tokens of the validation set that have a loss.", SUM),
}

THROUGHPUT: dict[str, Metric] = {
    "throughput/train/tokens_per_s": Metric("token/s", "Tokens, padding left out, processed per second.", RATE),
    "throughput/train/samples_per_s": Metric("sample/s", "Samples processed per second.", RATE),
    "throughput/train/mfu": Metric(
        "1", "Model FLOPs per second over the devices' peak FLOPs per second; on GPUs only.", "mean over ranks"
    ),
}

TIME: dict[str, Metric] = {
    "time/train/step_s": Metric("s", "The whole training step.", LARGEST),
    "time/train/data_s": Metric("s", "Waiting for the next batch.", LARGEST),
    "time/train/forward_backward_s": Metric("s", "Forward and backward passes of all micro-batches.", LARGEST),
    "time/train/optimizer_s": Metric("s", "Clipping the gradient and updating the weights.", LARGEST),
    "time/train/save_s": Metric("s", "Saving a checkpoint, as far as the step waited for it.", RANK_0),
    "time/checkpoint/write_s": Metric(
        "s", "Writing a checkpoint until it is committed, the part in the background included.", RANK_0
    ),
    "time/val/step_s": Metric("s", "A whole validation pass.", RANK_0),
}

_START_PARTS = {
    "launcher": "From the command to a checked configuration.",
    "torchrun": "Importing torch for torchrun, and torchrun's way to a new process for each rank.",
    "imports": "Starting Python and importing the stage.",
    "process_group": "Meeting the other ranks.",
    "tokenizer": "Loading the tokenizer.",
    "data": "Reading and tokenising the data.",
    "model": "Loading the model, sharding it, and making the optimizer.",
    "checkpoint": "Choosing and loading a checkpoint, and waiting for the other ranks.",
    "trackers": "Opening run.json, tables and trackers.",
    "validation": "The validation before the first step.",
    "first_step": "The first step.",
    "total": "All of it.",
}
"""In the order in which they pass."""

START: dict[str, Metric] = {
    f"time/start/{part}_s": Metric("s", meaning, RANK_0) for part, meaning in _START_PARTS.items()
}

SYSTEM: dict[str, Metric] = {
    "system/disk_free_gib": Metric("GiB", "Free space where checkpoints are written, after a save.", RANK_0),
    "system/peak_memory_gib": Metric("GiB", "Peak memory: of the device on GPUs, of the process on CPUs.", LARGEST),
}
