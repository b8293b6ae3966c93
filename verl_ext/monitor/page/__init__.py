"""The web page: a panel each for what can be looked at."""
