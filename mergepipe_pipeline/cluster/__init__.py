"""What runs the steps of a run: this process, several, or the workers of a cluster."""
