"""What the merge methods are put together from, and the registry that they are entered in."""
