"""Tests of the package that opens files."""
