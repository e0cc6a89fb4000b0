"""The files of checkpoints that `pack --replace` moved away, read as if they were still there.

A packed tensor's bytes come from the pack's exact tiers and the base, all others from what stays
beside the pack. Readers compare them with the expert's digests, as for any other file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from threading import RLock
from typing import Self

from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.contents.away import open_root
from mergepipe_pipeline.contents.input_segments import checkpoint_inputs
from mergepipe_pipeline.contents.rests import refuse_damaged_rest
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError, CorruptionError
from mergepipe_pipeline.packs.decoded import Decoder, StoredBytes
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.replaced import MovedFile, Replaced, came_back
from mergepipe_pipeline.storage.source import LocalSource, Reading, open_source
from mergepipe_pipeline.warehouse import Warehouse

#: Tensors whose decoding is kept prepared.
_HELD_TENSORS = 64


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file from `start_byte` on: of a packed tensor, or of the rest at `at_byte`.

    `tensor` is "" for the rest.
    """

    start_byte: int
    tensor: str
    at_byte: int


class AwayFiles:
    """The files of one checkpoint that is away (a `CheckpointSource`). Safe for several threads."""

    def __init__(self, folder: Path, reading: Reading = "ahead") -> None:
        """`folder` is that of its record. Raises CheckpointError if there is none."""
        self._warehouse = Warehouse(folder.parents[1])
        record = self._warehouse.replaced.find(folder.name)
        if record is None:
            raise came_back(folder)
        self._record, self._reading = record, reading
        self._files = {file.path: (n, file) for n, file in enumerate(record.files)}
        self._spans = {file.path: tuple(_spans(file)) for file in record.files}
        self._rest = LocalSource(folder, reading)
        self._lock = RLock()
        self._tensors: _PackedTensors | None = None

    def list(self, folder: str = "") -> list[str]:
        """Names of what there was at the top, or in a folder there, sorted."""
        above = f"{folder}/" if folder else ""
        below = (p.removeprefix(above) for p in self._files if p.startswith(above))
        return sorted({path.partition("/")[0] for path in below})

    def size(self, path: str) -> int:
        """Size in bytes. Raises CheckpointError if there was no such file."""
        return self._file(path)[1].nbytes

    def mtime_ns(self, path: str) -> int:
        """Time of last change in nanoseconds. Raises CheckpointError if there was no such file."""
        return self._file(path)[1].mtime_ns

    def read_range(self, path: str, start_byte: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `start_byte`; raises as `read_into`."""
        buffer = bytearray(nbytes)
        self.read_into(path, start_byte, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`. Raises CheckpointChangedError past the end.

        CorruptionError names what is damaged of pack, base or rest, and where the original is.
        """
        number, file = self._file(path)
        if start_byte + len(buffer) > file.nbytes:
            raise CheckpointChangedError(
                "A file ended while it was read",
                where=f"{self._record.root}, {path}",
                expected=f"{len(buffer)} bytes from byte {start_byte}",
                found=f"{file.nbytes} bytes in all",
                next_step="this is a defect of mergepipe: please report it",
            )
        rest = self._warehouse.replaced.rest(self._record.checkpoint_id, number)
        try:
            for span, start, stop in self._pieces(path, start_byte, start_byte + len(buffer)):
                out = buffer[start - start_byte : stop - start_byte]
                at = span.at_byte + start - span.start_byte
                if span.tensor:
                    self._packed.read_into(span.tensor, at, out)
                else:
                    self._read_rest(rest.name, at, out)
        except CorruptionError as error:
            own = (self._warehouse.packs.path(self._record.pack_id), rest.parent)
            if any(str(path) in (error.where or "") for path in own):  # and not the base's
                error.next_step = self._record.bring_back
            raise

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Do nothing: bytes are read when they are decoded."""

    def close(self) -> None:
        """Close all files."""
        self._rest.close()
        with self._lock:
            if self._tensors is not None:
                self._tensors.close()
                self._tensors = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_rest(self, rest: str, start_byte: int, out: memoryview) -> None:
        """Fill `out` from a file beside the pack. Raises CorruptionError for one that is short."""
        try:
            self._rest.read_into(rest, start_byte, out)
        except CheckpointError as error:
            refuse_damaged_rest(self._warehouse.replaced.path(self._record.checkpoint_id), error)
            raise

    @property
    def _packed(self) -> _PackedTensors:
        with self._lock:
            if self._tensors is None:
                self._tensors = _PackedTensors(self._warehouse, self._record, self._reading)
            return self._tensors

    def _file(self, path: str) -> tuple[int, MovedFile]:
        if path not in self._files:
            raise CheckpointError(
                "A file of a checkpoint is not there",
                where=f"{self._record.root}, {path}",
                found="no such file when the checkpoint was moved away",
                next_step="check the path",
            )
        return self._files[path]

    def _pieces(self, path: str, start: int, stop: int) -> Iterator[tuple[_Span, int, int]]:
        """The spans that bytes [start, stop) of a file are in, with the bytes of each."""
        spans = self._spans[path]
        number = bisect_right(spans, start, key=lambda span: span.start_byte) - 1
        for span, after in pairwise(spans[number:]):
            if span.start_byte >= stop:
                break
            yield span, max(start, span.start_byte), min(stop, after.start_byte)


class _PackedTensors:
    """The stored bytes of a record's packed tensors, from its pack and the base."""

    def __init__(self, warehouse: Warehouse, record: Replaced, reading: Reading) -> None:
        self._catalog, self._record = warehouse.catalog, record
        self._pack = warehouse.packs.open(record.pack_id)
        self._base = open_root(warehouse, warehouse.catalog.root(record.base), record.base)
        segments = checkpoint_inputs(warehouse, [self._base])
        self._source = open_source(self._base.root, reading)
        reader = BlockReader(self._source, self._base, None)
        self._files = FrameFiles(self._pack.root, reading)
        self._decoder = Decoder(self._files, lambda _: reader, segments)
        self._of = lru_cache(maxsize=_HELD_TENSORS)(self._opened)

    def read_into(self, tensor: str, start_byte: int, out: memoryview) -> None:
        """Fill `out` with bytes of a tensor from `start_byte` on. Raises CorruptionError."""
        self._of(tensor).read_into(start_byte, out)

    def close(self) -> None:
        """Close all files."""
        self._files.__exit__()
        self._source.close()

    def _opened(self, tensor: str) -> StoredBytes:
        packed = self._pack.tensors[tensor]
        digests = self._catalog.digests(self._base.checkpoint_id) or {}
        refuse_other_base(self._record, self._base, digests, packed.base_name, packed.base_digest)
        return self._decoder.bytes_of(packed, view_of(self._base.by_name[packed.base_name]))


def refuse_other_base(
    record: Replaced,
    base: Checkpoint,
    digests: Mapping[str, str],
    tensor: str,
    expected: str,
) -> None:
    """Raise CorruptionError if a base's tensor is not the one that the record's pack is against.

    `digests` are those of the base's tensors, `expected` is of this `tensor`.
    """
    content = digests.get(tensor, "no such tensor")
    if content != expected:
        raise CorruptionError(
            "The base is not the one that the expert was packed against",
            where=f"{base.root}, tensor {tensor}",
            expected=f"content {expected[:16]}",
            found=f"{content[:16]}",
            next_step=f"put the files of that {record.base!r} back, or take the original from "
            f"{record.cold}",
        )


def _spans(file: MovedFile) -> Iterator[_Span]:
    """A file cut into what is packed and what is not; the last span begins at its end."""
    at = kept = 0
    for tensor, start, nbytes in (*file.tensors, ("", file.nbytes, 0)):
        if start > at:
            yield _Span(at, "", kept)
            kept += start - at
        if nbytes:
            yield _Span(start, tensor, 0)
        at = start + nbytes
    yield _Span(file.nbytes, "", kept)
