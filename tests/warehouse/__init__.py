"""Tests of where a warehouse lies, and of what lies elsewhere."""
