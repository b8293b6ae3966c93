"""Memory limits of the trainers, which `verl_ext.plan` needs for its predictions too."""

CHUNK_ELEMENTS = 1 << 24
"""Logits that the fused loss holds at a time: 64 MiB of fp32, or 110 tokens of a vocabulary of 152,000."""
MIN_CHUNK_TOKENS = 128
"""Tokens of a chunk of logits, at least; matrix products of fewer rows are slow."""
