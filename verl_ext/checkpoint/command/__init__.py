"""The commands of `python -m verl_ext.checkpoint`, a module each; none imports torch, so that they answer at once."""
