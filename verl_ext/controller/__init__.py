"""The budget controller: how much of a vision-language model to run within a latency budget."""
