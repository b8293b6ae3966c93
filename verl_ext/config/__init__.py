"""Resolves a recipe and a command line to one configuration, and checks it before heavy imports."""
