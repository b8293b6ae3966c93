"""Reward functions for texts, built in or the user's own, and the environment that adds up their scores."""
