"""Damage as a disk makes it."""

from __future__ import annotations


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit, counted from the first byte's lowest, the other way round."""
    at, mask = bit // 8, 1 << bit % 8
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
