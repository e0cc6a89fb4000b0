"""How good snapshots are: evaluators as child processes, verdicts, and what made one worse."""
