"""What several suites share: families of models, oracles, processes and clusters."""
