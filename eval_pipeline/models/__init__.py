"""The models that are evaluated: checkpoints of a run or any Hugging Face directory, found, checked and held."""
