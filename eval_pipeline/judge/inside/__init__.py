"""Code that runs inside the sandboxes: standard library only, and modules import each other by plain names."""
