"""Dagster assets: one family per file, each body calls one verb of `mergepipe_pipeline.pipeline` and reports."""
