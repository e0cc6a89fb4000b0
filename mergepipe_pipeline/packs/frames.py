"""How a chunk lies in a tier's file: sections, each as it is or compressed.

A section whose length is that of its content is stored as it is. A shorter one is a zstd frame,
told by its first bytes, or pairs as `sparse` says. The lengths of all sections but the last come
first, 4 bytes each. What a decoder allocates follows from the chunk's length alone, never from what
a frame says.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import zstandard

from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.sparse import from_pairs, to_pairs

Bytes = npt.NDArray[np.uint8]

#: Neighbouring deltas have nothing in common: what repeats is by chance, but for long runs. So a
#: few matches of seven bytes and more; level 1 takes short ones, which are 1 to 10 % longer in all
#: and take twice the time.
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
_LENGTH = struct.Struct("<I")
#: Pairs take at most this part of a section's length: zstd is shorter from there on.
_SPARSE = 8


class _Zstd(threading.local):
    """A thread's compressor and decompressor, which are for one thread each."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def to_frame(sections: Sequence[Bytes]) -> bytes:
    """The frame of a chunk's sections, in order."""
    stored = [_stored(np.ascontiguousarray(section)) for section in sections]
    return b"".join([*(_LENGTH.pack(len(s)) for s in stored[:-1]), *stored])


def sections_of(frame: memoryview, n_sections: int) -> list[memoryview]:
    """The sections of a frame, as they are stored. Raises CorruptionError."""
    head = _LENGTH.size * (n_sections - 1)
    if len(frame) < head:
        refuse(f"a frame of {n_sections} sections", f"{len(frame)} bytes")
    found, at = [], head
    for (length,) in _LENGTH.iter_unpack(frame[:head]):
        found.append(frame[at : at + length])
        at += length
    if at > len(frame):
        refuse(f"sections of {at - head} bytes", str(len(frame) - head))
    return [*found, frame[at:]]


def contents_of(
    sections: Sequence[memoryview | None], nbytes: Sequence[int], absent: int, out: Bytes
) -> None:
    """Fill `out` with the contents of sections, one after the other; they have `nbytes` bytes.

    Where there is no section, all bytes are `absent`. Raises CorruptionError.
    """
    zipped: list[memoryview] = []
    places: list[memoryview] = []
    stop, room = 0, out.data
    for section, n in zip(sections, nbytes, strict=True):
        start, stop = stop, stop + n
        into = room[start:stop]
        if not section:
            out[start:stop] = absent
        elif len(section) == n:
            into[:] = section
        elif len(section) < n and section[: len(_MAGIC)] == _MAGIC:
            zipped.append(section)
            places.append(into)
        elif len(section) > n:
            refuse(f"a section of up to {n} bytes", str(len(section)))
        elif not from_pairs(as_array(section), out[start:stop]):
            refuse(f"pairs for {n} bytes", "pairs that lead out of them")
    if zipped:
        _decompress(zipped, places)


def as_array(raw: bytes | memoryview) -> Bytes:
    """The bytes as an array that nobody writes to, so that compiled loops have one type of it."""
    array = np.frombuffer(raw, np.uint8)
    array.flags.writeable = False
    return array


def refuse(expected: str, found: str) -> NoReturn:
    """Raise CorruptionError; who knows where the frame lies adds that."""
    raise CorruptionError(
        "A frame of a pack cannot be decoded",
        expected=expected,
        found=found,
        next_step="`mergepipe verify --all` finds what is damaged; then pack the expert again",
    )


def _stored(content: Bytes) -> bytes:
    whole, pairs = content.tobytes(), np.empty(len(content) // _SPARSE, np.uint8)
    found = min(whole, _zstd.compress(whole), key=len)
    n = to_pairs(content, pairs)
    sparse = pairs[: max(n, 0)].tobytes()
    # Pairs may be longer than zstd by a quarter, as they are many times as fast.
    is_sparse = n >= 0 and 4 * n <= 5 * len(found) and n < len(whole)
    return sparse if is_sparse and not sparse.startswith(_MAGIC) else found


def _decompress(zipped: list[memoryview], places: Sequence[memoryview]) -> None:
    """Fill each place with a zstd frame's content: one call, which leaves Python alone once."""
    sizes = np.array([len(into) for into in places], np.uint64)
    try:
        # What is stated is what would be allocated.
        stated = [zstandard.frame_content_size(section) for section in zipped]
        if stated == sizes.tolist():
            decompress = _zstd.decompressor.multi_decompress_to_buffer
            found = decompress([*zipped], decompressed_sizes=sizes.data, threads=0)
            for number, into in enumerate(places):
                into[:] = memoryview(found[number])  # type: ignore[arg-type]
            return
    except zstandard.ZstdError as error:
        refuse("compressed sections", str(error))
    refuse(f"sections of {sizes.tolist()[:4]} bytes", f"of {stated[:4]}")
