"""Tests of the merge operators."""
