"""Which evaluations are to be done, are being done and are done; one SQLite file for each run."""
