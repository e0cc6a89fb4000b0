"""Tests of the tokenizer package."""
