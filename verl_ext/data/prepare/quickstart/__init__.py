"""A toy task, tokenizer and model with which the whole pipeline runs in minutes on a CPU."""
