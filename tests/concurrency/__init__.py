"""Tests of concurrency."""
