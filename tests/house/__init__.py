"""Tests of the house."""
