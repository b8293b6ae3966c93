"""Benchmarks against other projects and against committed results; `bash benchmarks/run.sh` runs them."""

from verl_ext.processes import suppress_startup_tracebacks

suppress_startup_tracebacks()
