"""Judges programs that nobody trusts: each in a sandbox, the verdict decided outside of it."""
