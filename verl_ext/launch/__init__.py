"""The launcher: from a recipe and overrides to running ranks, and one message at the end."""
