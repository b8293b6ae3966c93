"""The budget controller, which decides how much of a vision-language model runs within a latency budget."""
