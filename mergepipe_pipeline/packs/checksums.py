"""A checksum of 64 bits of frames, compiled: many frames are compared while other threads go on.

Words of eight bytes go into lanes in turn. Each step of a lane is a bijection of its state and of
the word, so one changed word is always seen; others go unseen once in 2⁶⁴. It tells damage by
chance from what was written, nothing more: what an expert's bits are is told by their digests.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import I64Array, U8Array
from mergepipe_pipeline.jit import cached_njit

Checksums = npt.NDArray[np.uint64]

_LANES, _WORD_NBYTES = 8, 8
#: Odd, so that a product has an inverse; and the bits by which a lane turns after each word.
_PRIME, _TURN, _BACK = np.uint64(0x9E3779B185EBCA87), np.uint64(29), np.uint64(35)


@cached_njit(nogil=True)
def checksum(frame: U8Array) -> int:
    """The checksum of a frame [n]."""
    n = len(frame)
    whole = n // _WORD_NBYTES
    words = frame[: whole * _WORD_NBYTES].view(np.uint64)
    lanes = np.arange(1, _LANES + 1).astype(np.uint64) * _PRIME
    ends = whole - whole % _LANES
    for at in range(0, ends, _LANES):
        for lane in range(_LANES):
            lanes[lane] = _mixed(lanes[lane], words[at + lane])
    total = np.uint64(n) * _PRIME
    for lane in range(_LANES):
        total = _mixed(total, lanes[lane])
    for at in range(ends, whole):
        total = _mixed(total, words[at])
    last = np.uint64(0)
    for at in range(whole * _WORD_NBYTES, n):
        last = (last << np.uint64(8)) | np.uint64(frame[at])
    mixed: int = _mixed(_mixed(total, last), total >> _BACK)
    return mixed


@cached_njit(nogil=True)
def are_equal(
    raw: U8Array, starts: I64Array, nbytes: I64Array, expected: Checksums, first: int
) -> bool:
    """Whether all frames have the checksums that are expected.

    `starts` and `nbytes` are [tiers, chunks], of frames in `raw`; 0 bytes for none. `expected` is
    [tiers, all chunks], of which `first` is the first here.
    """
    for tier in range(starts.shape[0]):
        for chunk in range(starts.shape[1]):
            start, n = starts[tier, chunk], nbytes[tier, chunk]
            if n and checksum(raw[start : start + n]) != expected[tier, first + chunk]:
                return False
    return True


@numba.njit(inline="always")
def _mixed(state: Any, word: Any) -> Any:
    product = (state ^ word) * _PRIME
    return (product << _TURN) | (product >> _BACK)
