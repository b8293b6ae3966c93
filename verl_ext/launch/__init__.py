"""The launcher: turns a recipe and overrides into running ranks, and reports how the run ended."""
