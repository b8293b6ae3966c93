"""A generated set of questions about images, and a tiny vision-language model to learn it."""
