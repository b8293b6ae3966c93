"""Crash-safe checkpoints: written to a temporary directory, listed in a manifest, then renamed into place."""
