"""What is wrong with a warehouse or a result, and where. `verify` and `repair` call it."""
