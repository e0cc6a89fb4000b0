"""Streams what a plan bought through an operator into a layer shard, in bounded memory.

Knows the `MergePlan` only: neither recipe, catalog nor planner. `sources` opens the checkpoints of
a plan, `windows` says how much is held at once, `workspace` holds it, `execute` runs a layer.
"""
