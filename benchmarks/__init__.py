"""Measurements beside others, or beside what was committed, with their results; `bash benchmarks/run.sh` has them."""

from verl_ext.processes import begin_quietly

begin_quietly()
