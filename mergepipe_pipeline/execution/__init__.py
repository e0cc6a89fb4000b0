"""From a resolved recipe to a plan, from a plan to merged layers, from these to a snapshot."""
