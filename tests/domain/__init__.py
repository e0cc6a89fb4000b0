"""Tests of the specification: facts without files."""
