"""From a recipe and the headers of its checkpoints to a resolved recipe. Reads no weight."""
