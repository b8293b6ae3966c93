"""Measurements beside others' work, each with its committed results."""

from verl_ext.starting import begin_quietly

begin_quietly()
