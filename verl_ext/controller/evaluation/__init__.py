"""Evaluation of a budget controller, against baselines of the same model and in lmms-eval."""
