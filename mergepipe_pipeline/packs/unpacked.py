"""Finds the contents of frames, and unpacks those that are not stored as they are.

It does so for all frames of a window at once: Python makes only one call of zstd. A frame's
kind follows from its length and its first bytes, as `frames` says; the length of its content is
known.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import zstandard

from mergepipe_pipeline.arrays import I64Array, U8Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.packs.frames import from_pairs, refuse
from mergepipe_pipeline.storage.compiled_reads import memcpy

#: The place of a frame that is not there: the front of the unpacked bytes, where the decoder puts
#: the content of such a frame.
ABSENT = -1
_LENGTH_NBYTES = 4
_MAGIC = np.uint32(int.from_bytes(zstandard.FRAME_HEADER, "little"))


class _Zstd(threading.local):
    """A thread's decompressor, which is for one thread."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def contents_of(
    raw: U8Array, starts: I64Array, nbytes: I64Array, sizes: I64Array, unpacked: U8Array, at: int
) -> tuple[I64Array, int]:
    """Where the contents of frames lie, in the shape of `starts`, and where `unpacked` is free.

    Args:
        raw: what frames lie in.
        starts: where, int64 of any shape.
        nbytes: their bytes in the same shape; 0 for a frame that is absent.
        sizes: the bytes of their contents.
        unpacked: has room for all contents from `at` on. A place p there is given as ~p.
        at: where the buffer begins.

    Raises CorruptionError.
    """
    places, zipped = np.empty(starts.size, np.int64), np.empty(starts.size, np.int64)
    shape = starts.shape
    starts, nbytes, sizes = (np.ascontiguousarray(x).reshape(-1) for x in (starts, nbytes, sizes))
    stop, n_zipped, bad = _locate(raw, starts, nbytes, sizes, unpacked, at, places, zipped)
    if bad >= 0:
        refuse(f"a frame of {sizes[bad]} bytes, or pairs for them", f"{nbytes[bad]} others")
    if n_zipped:
        of = zipped[:n_zipped]
        _decompress(raw, starts[of], nbytes[of], sizes[of], unpacked, ~places[of])
    return places.reshape(shape), stop


@numba.njit(inline="always")
def content_at(raw: Any, unpacked: Any, place: Any) -> Any:
    """The array that a place is in, and where in it."""
    return (raw, np.uint64(place)) if place >= 0 else (unpacked, np.uint64(~place))


@cached_njit(nogil=True)
def _locate(
    raw: U8Array,
    starts: I64Array,
    nbytes: I64Array,
    sizes: I64Array,
    unpacked: U8Array,
    at: int,
    places: I64Array,
    zipped: I64Array,
) -> tuple[int, int, int]:
    """Fill in the places of contents, and unpack pairs.

    Gives where `unpacked` is free, how many frames zstd has to unpack, whose numbers `zipped`
    gets, and the first frame that makes no sense, or −1.
    """
    n_zipped = 0
    for s in range(len(starts)):
        start, n, size = starts[s], nbytes[s], sizes[s]
        if n == 0:
            places[s] = ABSENT
        elif n == size:
            places[s] = start
        elif n > size:
            return at, n_zipped, s
        else:
            places[s] = ~at
            if n >= _LENGTH_NBYTES and _word(raw, start) == _MAGIC:
                zipped[n_zipped] = s
                n_zipped += 1
            elif not from_pairs(raw[start : start + n], unpacked[at : at + size]):
                return at, n_zipped, s
            at += size
    return at, n_zipped, -1


@numba.njit(inline="always")
def _word(raw: Any, at: Any) -> Any:
    """Four bytes as a little-endian number."""
    word = np.uint32(0)
    for i in range(4):
        word |= np.uint32(raw[at + i]) << np.uint32(8 * i)
    return word


def _addresses(segments: Any) -> I64Array:
    """Where the segments that zstd gave lie: in a few buffers, each of which begins at offset 0."""
    addresses = np.array([segments[i].offset for i in range(len(segments))])
    starts = np.flatnonzero(addresses == 0)
    for a, b in pairwise([*starts.tolist(), len(segments)]):
        addresses[a:b] += np.frombuffer(segments[a], np.uint8).__array_interface__["data"][0]
    return addresses


@cached_njit(nogil=True)
def _scatter(addresses: I64Array, sizes: I64Array, out: U8Array, places: I64Array) -> None:
    """Copy from addresses to places in `out`."""
    for i in range(len(sizes)):
        to = np.uint64(out.ctypes.data) + np.uint64(places[i])
        memcpy(to, np.uint64(addresses[i]), np.uint64(sizes[i]))


def _decompress(
    raw: U8Array,
    starts: I64Array,
    nbytes: I64Array,
    sizes: I64Array,
    out: U8Array,
    places: I64Array,
) -> None:
    """Put the contents of zstd frames into `out`: one call, which leaves Python alone once."""
    segments = np.stack([starts, nbytes], axis=1).astype(np.uint64)
    try:
        compressed = zstandard.BufferWithSegments(raw, segments)  # type: ignore[arg-type]
        # zstd would allocate the stated sizes.
        size_of: Any = zstandard.frame_content_size
        stated = [size_of(compressed[i]) for i in range(len(starts))]
        if stated == sizes.tolist():
            expected = sizes.astype(np.uint64).data
            decompress = _zstd.decompressor.multi_decompress_to_buffer
            contents = decompress(compressed, decompressed_sizes=expected, threads=0)
            _scatter(_addresses(contents), sizes, out, places)
            return
    except zstandard.ZstdError as error:
        refuse("compressed frames", str(error))
    refuse(f"frames of {sizes.tolist()[:4]} bytes", f"of {stated[:4]}")
