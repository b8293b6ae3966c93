"""The training monitor: follows the runs below a directory from their files, and shows them in a browser."""
