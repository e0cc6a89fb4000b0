"""Finds the damage of a warehouse or a result, and where it is, for `verify` and `repair`."""
