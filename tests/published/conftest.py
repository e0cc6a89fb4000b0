"""Fixtures of the published recipes."""

from tests.parity.conftest import mergekit_is_here

__all__ = ["mergekit_is_here"]
