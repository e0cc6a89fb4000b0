"""The test suite of mergekit, whose merges our command makes."""
