"""Makes the page of all recipe keys, so that it cannot fall behind the code."""
