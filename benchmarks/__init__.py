"""Benchmarks against other projects and against committed results; `bash benchmarks/run.sh` runs them."""

from verl_ext.processes import begin_quietly

begin_quietly()
