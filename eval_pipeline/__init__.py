"""Evaluates checkpoints: models answer, sandboxes judge, figures have intervals, and the best checkpoint is chosen."""
