"""Says whether a run is healthy: rules over its metrics, inside the loop and from its files; needs no torch."""
