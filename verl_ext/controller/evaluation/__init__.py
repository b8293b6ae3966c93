"""Evaluation of a budget controller: against baselines of the same model, and within lmms-eval."""
