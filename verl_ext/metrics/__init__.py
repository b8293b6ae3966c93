"""Metrics of a run and where they are recorded: registry, files, sinks and timers.

No module here imports torch, so that the launcher and the monitor can read a run quickly.
"""
