"""Folders that must not get in."""
