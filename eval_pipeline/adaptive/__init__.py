"""The budget controller against what could be had without it, on the same samples."""
