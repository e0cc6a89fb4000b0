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

#: Higher levels win no point of a percent: neighbouring deltas have nothing in common.
_ZSTD_LEVEL = 1
_MAGIC = bytes(zstandard.FRAME_HEADER)
_LENGTH = struct.Struct("<I")
#: Pairs take at most this part of a section's length: zstd is shorter from there on.
_SPARSE = 8


class _Zstd(threading.local):
    """A thread's compressor and decompressor, which are for one thread each."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=False).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_zstd = _Zstd()


def to_frame(sections: Sequence[Bytes]) -> bytes:
    """The frame of a chunk's sections, in order."""
    stored = [_stored(np.ascontiguousarray(section)) for section in sections]
    return b"".join([*(_LENGTH.pack(len(s)) for s in stored[:-1]), *stored])


class FrameReader:
    """The sections of a frame, one after the other. What does not fit raises CorruptionError."""

    def __init__(self, frame: memoryview, n_sections: int) -> None:
        self._rest = frame
        head = _LENGTH.size * (n_sections - 1)
        if len(frame) < head:
            refuse(f"a frame of {n_sections} sections", f"{len(frame)} bytes")
        self._lengths = [length for (length,) in _LENGTH.iter_unpack(frame[:head])]
        self._rest = frame[head:]

    def section(self, nbytes: int) -> Bytes:
        """The next section, whose content has `nbytes` bytes; not to be written to."""
        length = self._lengths.pop(0) if self._lengths else len(self._rest)
        stored, self._rest = self._rest[:length], self._rest[length:]
        if len(stored) != length:
            refuse(f"a section of {length} bytes", str(len(stored)))
        return content_of(stored, nbytes)


def content_of(stored: memoryview, nbytes: int) -> Bytes:
    """The `nbytes` bytes of a section as it is stored; not to be written to. CorruptionError."""
    if len(stored) >= nbytes:
        if len(stored) > nbytes:
            refuse(f"a section of up to {nbytes} bytes", str(len(stored)))
        return as_array(stored)
    is_zstd = stored[: len(_MAGIC)] == _MAGIC
    return as_array((_decompressed if is_zstd else _spread)(stored, nbytes))


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


def _spread(stored: memoryview, nbytes: int) -> memoryview:
    content = np.empty(nbytes, np.uint8)
    if not from_pairs(as_array(stored), content):
        refuse(f"pairs for {nbytes} bytes", "pairs that lead out of them")
    return content.data


def _decompressed(stored: memoryview, nbytes: int) -> bytes:
    try:
        # What is stated is what would be allocated.
        stated = zstandard.frame_content_size(stored)
        if stated == nbytes:
            return _zstd.decompress(stored, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        refuse(f"a section of {nbytes} bytes, compressed", str(error))
    refuse(f"a section of {nbytes} bytes", f"one of {stated}")
