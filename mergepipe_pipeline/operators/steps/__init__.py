"""The steps that merge methods share, and the registry of all methods."""
