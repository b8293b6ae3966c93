"""Evaluates checkpoints: models answer, sandboxes judge, figures have intervals, and the best checkpoint is chosen."""

from verl_ext.processes import begin_quietly

begin_quietly()
