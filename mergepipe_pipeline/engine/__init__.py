"""Streams the blocks of a plan through an operator into a layer shard, in bounded memory.

Knows the `MergePlan` only: neither recipe, catalog nor planner. `sources` opens the checkpoints of
a plan, `windows` cuts tensors, `buffers` holds a window's memory, `execute` runs a layer.
"""
