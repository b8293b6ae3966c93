"""Scripts of the repository. The file makes `python -m scripts.NAME` find them, not the packages of others."""
