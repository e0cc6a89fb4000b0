"""Tracing a regression to its expert, and keeping that one out."""
