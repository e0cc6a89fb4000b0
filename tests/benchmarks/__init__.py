"""Benchmarks: each file opens with its claim and the command that shows it."""
