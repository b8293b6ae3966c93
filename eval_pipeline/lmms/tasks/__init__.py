"""Empty, because lmms-eval requires this folder in a plugin."""
