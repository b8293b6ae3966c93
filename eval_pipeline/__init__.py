"""Evaluates checkpoints: generates and judges answers, computes metrics, and selects the best checkpoint."""

from verl_ext.processes import begin_quietly

begin_quietly()
