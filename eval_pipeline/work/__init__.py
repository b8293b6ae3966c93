"""The work itself: batches of answers, given out to workers, kept as they come, summed up at the end."""
