"""The training monitor: follows the files of all runs in a directory and shows them in a browser."""
