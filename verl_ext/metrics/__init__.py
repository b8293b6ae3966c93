"""What a run measures and where it is recorded: the metric registry, files, sinks and timers.

Importing any module here needs no torch, so that the launcher and the monitor can read a run.
"""
