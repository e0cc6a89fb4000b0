"""Streams what a plan bought through an operator into a layer shard, in bounded memory.

Knows the `MergePlan` only: neither recipe, catalog nor planner. `sources` opens the checkpoints of
a plan, `delta` turns bytes into float32 rows, `windows` says how much is held at once, `execute`
runs a layer.
"""
