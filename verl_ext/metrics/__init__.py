"""What a run measures: metric names, reduction over ranks, timers, the run's record, and where the figures go.

The package itself imports nothing heavy, so that the launcher and the monitor can read a run without torch.
"""
