"""Who does the work: processes of this machine, or a Ray cluster. The driver gives out batches and gets events."""
