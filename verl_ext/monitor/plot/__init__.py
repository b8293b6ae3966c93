"""The monitor's charts without a browser: PNG files, and one HTML page that needs nothing else."""
