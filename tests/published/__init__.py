"""Published recipes, run here and in mergekit."""
