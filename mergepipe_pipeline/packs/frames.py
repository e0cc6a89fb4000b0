"""The frame of a chunk in an approximate tier's file, as it is or compressed.

A frame whose length is that of its content is stored as it is. A shorter one is a zstd frame, which
its first bytes show, or pairs. A decoder allocates by the chunk's length alone, never by what a
frame says.

Pairs are for almost only zeros: two bytes for each byte that is none. The first says how many
elements it lies after the one before, the second is the byte; a longer distance than 255 takes
pairs of 255 and zero first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
import zstandard

from mergepipe_pipeline.arrays import I64Array, U8Array
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, Tier
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.jit import cached_njit

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
#: Pairs take at most this part of a content's length: zstd is shorter from there on.
_SPARSE = 8
#: The longest distance of a pair.
_FAR = 255


class _Zstd(threading.local):
    """A thread's compressor, which is for one thread."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress


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
