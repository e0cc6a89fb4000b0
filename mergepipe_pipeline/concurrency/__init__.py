"""Threads: work that runs ahead while its results are taken in order, and steps done in order.

Knows nothing of tensors, files or merges. No other package starts a thread or waits for one.
"""
