"""Predicts memory, speed and disk use of a recipe on a number of GPUs without any GPU; no other package imports it."""
