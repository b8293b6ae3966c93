"""Engines that draw completions, and the way of the weights to them."""
