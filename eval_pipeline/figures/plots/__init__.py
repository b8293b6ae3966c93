"""Plots of a report, as PNG files. matplotlib is imported inside the functions, for it takes a second."""
