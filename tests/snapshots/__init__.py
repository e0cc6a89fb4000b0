"""Tests of objects, snapshots and refs."""
