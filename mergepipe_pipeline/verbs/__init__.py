"""What a user can ask for, one verb per file. CLI, Python API and Dagster call these."""
