"""The tests, and what they share: small models, real runs and processes; `bash tests/run.sh` runs them."""
