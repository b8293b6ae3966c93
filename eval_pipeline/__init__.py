"""Evaluates checkpoints: generates and judges answers, computes metrics, and selects the best checkpoint."""

from verl_ext.processes import suppress_startup_tracebacks

suppress_startup_tracebacks()
