"""Immutable results: objects by content, snapshots by manifest, refs by version.

Children before parents: objects, then the staged folder with its manifest last, one rename, then
the ref.
"""
