"""Searches over a tiny family, with real merges and a real evaluator."""
