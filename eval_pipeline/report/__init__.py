"""Results of evaluations: metrics with confidence intervals, result files, checkpoint selection, reports and plots."""
