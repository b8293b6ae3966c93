"""The policy whose actions are completions of text."""
