"""The Dagster UI in a real browser."""
