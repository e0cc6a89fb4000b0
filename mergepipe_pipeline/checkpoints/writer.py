"""Writes one safetensors shard front to back, hashing as it goes.

Not atomic by itself: the file is written in staging and adopted by `atomic`. Hash states at tensor
ends are kept, so that verification can name the first tensor whose bytes are wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path

from mergepipe_pipeline.checkpoints.header import Described, build_header, parse_header
from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import full_disk_named
from mergepipe_pipeline.storage.uncached import DirectFile


class ShardWriter:
    """A new file at `path` for `tensors` (name, dtype, shape); a context manager.

    The scales of those that are `coded` come after their codes. Space is reserved at once, so a
    full disk shows before any work: StorageFullError. Without `finish` the file is removed on exit.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Sequence[Described],
        metadata: dict[str, str],
        coded: Collection[str] = (),
    ) -> None:
        self._path = Path(path)
        self._header = build_header(tensors, metadata, coded)
        entries = _entries(self._header, tensors)
        self.order: tuple[str, ...] = tuple(e.name for e in entries)
        self._ends = [(e.name, e.start_byte + e.nbytes) for e in entries]
        self._nbytes = self._ends[-1][1] if self._ends else len(self._header)
        self._hash = new_hash()
        self._at = 0
        self._prefixes: list[tuple[str, str]] = []
        self._finished = False

    def __enter__(self) -> ShardWriter:
        with full_disk_named(self._path):
            self._file = DirectFile(self._path, self._nbytes)
        try:
            self._put(memoryview(self._header))
            self._close_tensors()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            self._discard()

    def write(self, data: memoryview) -> None:
        """Append bytes of tensors in `order`; a call may end inside a tensor or span several.

        Raises StorageFullError, and ValueError past the last tensor.
        """
        data = data.cast("B")
        if self._at + len(data) > self._nbytes:
            raise ValueError(f"{self._path}: more bytes than the header says")
        while len(data):
            end = self._ends[len(self._prefixes)][1]
            part = data[: end - self._at]
            self._put(part)
            data = data[len(part) :]
            self._close_tensors()

    @property
    def is_complete(self) -> bool:
        """Whether every byte that the header promises was written."""
        return self._at == self._nbytes

    def finish(self) -> tuple[str, int]:
        """Close the file; SHA-256 (64 hex) and size in bytes.

        Raises CorruptionError if bytes are missing.
        """
        if not self.is_complete:
            raise CorruptionError(
                "A shard was not written to its end",
                where=str(self._path),
                expected=f"{self._nbytes} bytes",
                found=f"{self._at} bytes",
                next_step="this is a defect of mergepipe: please report it",
            )
        with full_disk_named(self._path):
            self._file.close()
        self._finished = True
        return self._hash.hexdigest(), self._nbytes

    @property
    def prefix_digests(self) -> tuple[tuple[str, str], ...]:
        """(tensor, SHA-256 of the file up to the tensor's end) in file order."""
        return tuple(self._prefixes)

    def _put(self, data: memoryview) -> None:
        self._hash.update(data)
        with full_disk_named(self._path):
            self._file.append(data)
        self._at += len(data)

    def _close_tensors(self) -> None:
        while (
            len(self._prefixes) < len(self._ends) and self._at == self._ends[len(self._prefixes)][1]
        ):
            self._prefixes.append((self._ends[len(self._prefixes)][0], self._hash.hexdigest()))

    def _discard(self) -> None:
        self._file.abandon()
        self._path.unlink(missing_ok=True)


def _entries(header: bytes, tensors: Sequence[Described]) -> list[TensorEntry]:
    data = sum(prod(shape) * itemsize(dtype) for _, dtype, shape in tensors)
    return parse_header(header[8:], len(header) + data, "shard")[0]
