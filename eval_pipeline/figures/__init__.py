"""What an evaluation says: figures with intervals, comparisons, the choice of a checkpoint, logs and the report."""
