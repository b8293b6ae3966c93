"""Tests of commands, in the processes that users start: killed, stopped, starved, one rank or several."""
