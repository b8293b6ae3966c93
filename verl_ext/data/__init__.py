"""Datasets, the order of their samples, and batching."""
