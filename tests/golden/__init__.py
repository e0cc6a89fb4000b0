"""Tests of golden."""
