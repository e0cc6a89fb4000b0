"""Tests; folders mirror the core."""
