"""Tests of the search in the unit cube."""
