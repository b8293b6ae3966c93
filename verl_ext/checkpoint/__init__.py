"""Checkpoints that are complete or are not there: written aside, listed in a manifest, then renamed into place."""
