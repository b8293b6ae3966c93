"""Loads recipes: the configuration of an evaluation by a name and overrides."""
