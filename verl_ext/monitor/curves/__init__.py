"""What becomes of numbers before they are drawn: one axis over restarts, few points, smoothing, the time left."""
