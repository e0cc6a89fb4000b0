"""Our results against those of mergekit."""
