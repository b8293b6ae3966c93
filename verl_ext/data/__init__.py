"""Data sets, the order in which their samples are seen, and the batches made of them."""
