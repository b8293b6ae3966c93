"""Whether a run is healthy: rules over its metrics, in the training loop and from its files; needs no torch."""
