"""The frame of a chunk in an approximate tier's file, as it is or compressed, and its content.

A frame whose length is that of its content is stored as it is. A shorter one is a zstd frame, which
its first bytes show, or pairs. A decoder allocates by the chunk's length alone, never by what a
frame says.

Pairs are for almost only zeros: two bytes for each byte that is none. The first says how many
elements it lies after the one before, the second is the byte; a longer distance than 255 takes
pairs of 255 and zero first.

The contents of all frames of a window are found at once: Python makes only one call of zstd.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numba
import numpy as np
import zstandard

from mergepipe_pipeline.arrays import I64Array, U8Array
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, Tier
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.storage.compiled_reads import memcpy

#: Neighbouring deltas have nothing in common: all but long runs repeat by chance. So zstd looks for
#: a few matches of seven bytes and more; with short ones, as at level 1, frames are 1 to 10 %
#: longer and take twice the time.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    target_length=0,
    write_checksum=False,
)
_MAGIC = bytes(zstandard.FRAME_HEADER)
_MAGIC_WORD = np.uint32(int.from_bytes(_MAGIC, "little"))
_LENGTH_NBYTES = 4
#: The place of a frame that is not there: the front of the unpacked bytes, where the decoder puts
#: the content of such a frame.
ABSENT = -1
#: Pairs take at most this part of a content's length: zstd is shorter from there on.
_SPARSE = 8
#: The longest distance of a pair.
_FAR = 255


class _Zstd(threading.local):
    """A thread's compressor and decompressor, which are for one thread."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress
        self.decompress = zstandard.ZstdDecompressor().multi_decompress_to_buffer


_zstd = _Zstd()


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """Frames of consecutive chunks of one tensor, which lie anywhere in `raw`.

    `starts` and `nbytes` are int64 [tiers, chunks] in the order of TIERS; what a chunk does not
    have has no bytes.
    """

    raw: U8Array
    starts: I64Array
    nbytes: I64Array

    @classmethod
    def of(cls, by_tier: Mapping[Tier, Sequence[bytes | memoryview | None]]) -> Frames:
        """A copy of frames that lie by themselves; each tier has those of the same chunks."""
        n_chunks = max(map(len, by_tier.values()))
        every = [by_tier.get(tier, [None] * n_chunks) for tier in TIERS]
        nbytes = np.array([[len(f or b"") for f in of] for of in every], np.int64)
        starts = nbytes.cumsum().reshape(nbytes.shape) - nbytes
        return cls(as_array(b"".join(f or b"" for of in every for f in of)), starts, nbytes)

    def __getitem__(self, chunks: slice) -> Frames:
        return Frames(self.raw, self.starts[:, chunks], self.nbytes[:, chunks])

    def frame(self, tier: Tier, chunk: int) -> memoryview:
        """One chunk's frame of a tier; without bytes if there is none."""
        at = TIERS.index(tier), chunk
        start = int(self.starts[at])
        return self.raw.data[start : start + int(self.nbytes[at])]


class Places(NamedTuple):
    """Where the elements of chunks lie in an array: int64 [chunks], and how many these are."""

    starts: I64Array
    elems: I64Array

    @classmethod
    def one_after_another(cls, n: int) -> Places:
        """Of n elements of one tensor, from the start of a chunk on."""
        starts = np.arange(0, n, CHUNK_ELEMS)
        return cls(starts, np.minimum(CHUNK_ELEMS, n - starts))


def to_frame(content: U8Array) -> bytes:
    """The frame of an approximate tier's content."""
    whole, pairs = content.tobytes(), np.empty(len(content) // _SPARSE, np.uint8)
    zipped = min(whole, _zstd.compress(whole), key=len)
    n = to_pairs(content, pairs)
    sparse = pairs[: max(n, 0)].tobytes()
    # Pairs may be longer than zstd by a quarter, as they are many times as fast.
    is_sparse = n >= 0 and 4 * n <= 5 * len(zipped) and n < len(whole)
    return sparse if is_sparse and not sparse.startswith(_MAGIC) else zipped


def as_array(raw: bytes | memoryview) -> U8Array:
    """The bytes as a read-only array, so that compiled loops have one type of it."""
    array = np.frombuffer(raw, np.uint8)
    array.flags.writeable = False
    return array


def refuse(expected: str, found: str) -> NoReturn:
    """Raise CorruptionError; a caller that knows the frame's place adds it."""
    raise CorruptionError(
        "A frame of a pack cannot be decoded",
        expected=expected,
        found=found,
        next_step="`mergepipe verify --all` finds what is damaged; then pack the expert again",
    )


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
            if n >= _LENGTH_NBYTES and _word(raw, start) == _MAGIC_WORD:
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
            contents = _zstd.decompress(compressed, decompressed_sizes=expected, threads=0)
            _scatter(_addresses(contents), sizes, out, places)
            return
    except zstandard.ZstdError as error:
        refuse("compressed frames", str(error))
    refuse(f"frames of {sizes.tolist()[:4]} bytes", f"of {stated[:4]}")
