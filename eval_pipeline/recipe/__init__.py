"""What an evaluation does: the data sets, how answers are drawn and judged, who works on it."""
