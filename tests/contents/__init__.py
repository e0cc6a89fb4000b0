"""Tests of contents."""
