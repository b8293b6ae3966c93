"""Predicts memory and speed of a recipe on so many GPUs, before any of them is there; nothing else imports it."""
