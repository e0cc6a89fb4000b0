"""Tests of resolution."""
