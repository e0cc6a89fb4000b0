"""Dagster assets: one family per file; each body calls one verb and reports."""
