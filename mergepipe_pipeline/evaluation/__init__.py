"""How good snapshots are: evaluators as child processes, what they measured, and verdicts."""
