"""What one run of an answer may use."""

from __future__ import annotations

from dataclasses import dataclass

_TEST_SHARE = 0.8


@dataclass(frozen=True)
class Limits:
    """What one run of an answer (one test) may use."""

    cpu_s: float = 30.0
    """Seconds of processor time; past it the run is a timeout at once."""
    wall_s: float = 30.0
    """Seconds from start to end, waiting included; a run stopped by it with processor time left is run once more."""
    memory_mb: int = 1024
    """Memory of all its processes together, and address space of each."""
    num_processes: int = 64
    """Processes and threads."""
    file_mb: int = 16
    """Size of any file, and of its temporary directory."""
    output_mb: float = 4.0
    """Standard output and standard error, each; the rest is cut off."""

    @property
    def test_cpu_s(self) -> float:
        """Processor time of a test's own process.

        Less than the wall-clock limit: if that limit stopped a test that hangs, the machine would look too busy for
        the answer, and the test would run again.
        """
        return _TEST_SHARE * self.wall_s
