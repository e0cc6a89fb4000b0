"""Writing to addresses: pushed models, and results in a bucket."""
