"""How good an answer to a question about an image is."""
