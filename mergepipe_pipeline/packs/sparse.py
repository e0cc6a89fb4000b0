"""Sections of almost only zeros, compiled: two bytes for each byte that is none.

The first says how many elements it lies after the one before, the second is the byte; a longer
distance than 255 takes pairs of 255 and zero first. Upper bytes of distances are no longer so than
by zstd, and take no time: zstd needs a sixth of an exact chunk's time for them.
"""

from __future__ import annotations

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.jit import cached_njit

_FAR = 255


@cached_njit(nogil=True)
def to_pairs(content: U8Array, out: U8Array) -> int:
    """Fill `out` with the pairs of `content`; how many bytes these are, −1 if they do not fit."""
    at, last = 0, 0
    for e in range(len(content)):
        if content[e]:
            while e - last > _FAR:
                if at + 2 > len(out):
                    return -1
                out[at], out[at + 1] = _FAR, 0
                at, last = at + 2, last + _FAR
            if at + 2 > len(out):
                return -1
            out[at], out[at + 1] = e - last, content[e]
            at, last = at + 2, e
    return at


@cached_njit(nogil=True)
def from_pairs(pairs: U8Array, out: U8Array) -> bool:
    """Fill `out` [n] with the content of pairs; False if they lead out of it."""
    out[:] = 0
    e = 0
    for at in range(0, len(pairs) - 1, 2):
        e += pairs[at]
        if e >= len(out):
            return False
        if pairs[at + 1]:
            out[e] = pairs[at + 1]
    return len(pairs) % 2 == 0
