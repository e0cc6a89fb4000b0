"""Tests of packs: frames, files, index and store."""
