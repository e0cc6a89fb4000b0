"""From stored bytes to float32 rows, for every kind of input: what analysis and engine share.

The one home of how a full checkpoint, a delta, an adapter or a re-indexed embedding becomes δ or T,
and of what an unread element means: the expert equals the base there. No statistics and no merge.
"""
