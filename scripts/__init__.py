"""Scripts of the repository. This file makes `python -m scripts.NAME` find them, and not another package `scripts`."""
