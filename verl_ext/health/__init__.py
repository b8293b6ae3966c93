"""Checks the health of a run with rules over its metrics, in the training loop or from its files; without torch."""
