"""Tests of the recipe border: YAML text in, plain numbers or every problem at once."""
