"""The README, `docs/` and the examples say what is so: their commands are run."""
