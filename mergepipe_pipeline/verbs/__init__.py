"""The verbs of users, a file for each subject. CLI, Python API and Dagster call these."""
