"""Checkpoints by headers and adapters by configs; from stored bytes to float32 rows.

Only this package turns a full checkpoint, a delta, an adapter or a re-indexed embedding into δ or
T. Where an element is not read, the expert equals the base. No statistics and no merge.
"""
