"""The monitor's own database, filled from the files of runs, into which it never writes."""
