"""How many examples a law is tried with."""

from __future__ import annotations

from hypothesis import settings

#: What the profile `default` tries of a law that says nothing.
_DEFAULT = 25


def examples(count: int) -> int:
    """Of a law that the profile `default` tries so often: fewer or more by the profile in use."""
    return max(1, count * settings().max_examples // _DEFAULT)
