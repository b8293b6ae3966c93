"""The command that users type: from a recipe and overrides to ranks that train, and back to one message."""
