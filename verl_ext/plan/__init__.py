"""Predicts memory, speed and disk use of a recipe on a number of GPUs before any exists; nothing else imports it."""
