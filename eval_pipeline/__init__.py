"""Judges a checkpoint: greedy answers from vLLM, run against each problem's own tests, summed up in a few figures."""

from verl_ext.starting import begin_quietly

begin_quietly()
