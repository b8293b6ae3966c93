"""Reward functions for texts, by name or of the user's own, and the environment that adds them up."""
