"""The files of a checkpoint whose weight files a pack stands for (a `CheckpointSource`).

A packed tensor's bytes come from the pack's tier X, its directions and the base, the other bytes of
weight files from their leftovers, and all other files from the expert's folder. Readers compare
them with the expert's digests, as for any other file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import numpy as np

from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.checkpoints.stored import Verifier, Verify, read_stored
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    FACTORED,
    TIERS_OF,
    PackedTensor,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.domain.view import TensorView, view_of
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CheckpointChangedError, CorruptionError
from mergepipe_pipeline.facts.input_segments import checkpoint_inputs
from mergepipe_pipeline.facts.offline import open_root
from mergepipe_pipeline.packs.basis import predicted, product_in
from mergepipe_pipeline.packs.codec import BITS_OF, decode_bits
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.offline import (
    OfflineExpert,
    WeightFile,
    came_back,
    original_named,
    sound_leftover,
)
from mergepipe_pipeline.packs.product import Product
from mergepipe_pipeline.storage.source import (
    CheckpointSource,
    LocalSource,
    Reading,
    open_source,
)
from mergepipe_pipeline.warehouse import Warehouse

#: Tensors whose decoding is kept prepared, and chunks that are decoded at once.
_HELD_TENSORS, _CHUNKS_AT_ONCE = 64, 16
#: Tensors whose product of directions is held: that of all experts of a layer takes 11 MB.
_HELD_PRODUCTS = 4


class Near(NamedTuple):
    """What stands for exact levels: the directions up to `rung`, and tensors as they are stored.

    Of a tensor that has neither, the base's elements do.
    """

    rung: Tier
    stored: Mapping[str, bytes]


class _Span(NamedTuple):
    """Bytes of a file from `start_byte` on: of a packed tensor, or of the leftover at `at_byte`.

    `tensor` is "" for the leftover.
    """

    start_byte: int
    tensor: str
    at_byte: int


def pack_files(folder: Path, reading: Reading = "ahead") -> PackFiles:
    """The files of the checkpoint whose record is in a folder.

    Raises CheckpointError if there is none, CorruptionError.
    """
    warehouse = Warehouse(folder.parents[1])
    expert = warehouse.offline.find(folder.name)
    if expert is None:
        raise came_back(folder)
    return PackFiles(warehouse, expert, folder, reading)


class PackFiles(CheckpointSource):
    """The files of an offline expert. Safe for several threads.

    Args:
        warehouse: has the base, and the pack if no other is given.
        expert: its record.
        folder: of its leftovers.
        reading: how files are read.
        pack_root: the folder of frames, by default that of the expert's pack.
        tensors: the packed tensors, by default those of the expert's pack.
        near: what is read instead of exact levels; then files are not the expert's own.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        expert: OfflineExpert,
        folder: Path,
        reading: Reading = "ahead",
        *,
        pack_root: Path | None = None,
        tensors: Mapping[str, PackedTensor] | None = None,
        near: Near | None = None,
    ) -> None:
        self._expert, self._folder = expert, folder
        self._numbers = {file.path: number for number, file in enumerate(expert.files)}
        self._spans = [tuple(_spans(file)) for file in expert.files]
        self._sound = lru_cache(maxsize=None)(partial(_sound, folder, expert))
        self._own, self._leftovers = (LocalSource(r, reading) for r in (expert.root, folder))
        self._pack_root = pack_root or warehouse.packs.path(expert.pack_id)
        self._open = partial(_Tensors, warehouse, expert, self._pack_root, tensors, reading, near)
        self._lock = RLock()
        self._tensors: _Tensors | None = None

    def list(self, folder: str = "") -> list[str]:
        """Names of what there is at the top, or in a folder there, sorted."""
        above = f"{folder}/" if folder else ""
        weights = {p.removeprefix(above) for p in self._numbers if p.startswith(above)}
        there = self._own.list(folder) if (Path(self._expert.root) / folder).is_dir() else []
        return sorted({*there, *(path.partition("/")[0] for path in weights)})

    def size(self, path: str) -> int:
        """Size in bytes. Raises CheckpointError if the file is not there."""
        file = self._weights(path)
        return self._own.size(path) if file is None else file.nbytes

    def mtime_ns(self, path: str) -> int:
        """Time of last change in nanoseconds. Raises CheckpointError if the file is not there."""
        file = self._weights(path)
        return self._own.mtime_ns(path) if file is None else file.mtime_ns

    def read_into(self, path: str, start_byte: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start_byte`. Raises CheckpointChangedError past the end.

        CorruptionError names what is damaged of pack, base or leftover, and where the original is.
        """
        file = self._weights(path)
        if file is None:
            self._own.read_into(path, start_byte, buffer)
            return
        if start_byte + len(buffer) > file.nbytes:
            raise CheckpointChangedError(
                "A file ended while it was read",
                where=f"{self._expert.root}, {path}",
                expected=f"{len(buffer)} bytes from byte {start_byte}",
                found=f"{file.nbytes} bytes in all",
                next_step="this is a defect of mergepipe: please report it",
            )
        number = self._numbers[path]
        with original_named(self._expert, self._pack_root):
            for span, start, stop in self._pieces(number, start_byte, start_byte + len(buffer)):
                out = buffer[start - start_byte : stop - start_byte]
                at = span.at_byte + start - span.start_byte
                if span.tensor:
                    self._packed.read_into(span.tensor, at, out)
                else:
                    self._leftovers.read_into(self._sound(number), at, out)

    def will_need(self, path: str, start_byte: int, nbytes: int) -> None:
        """Hint at reads of files in the folder; weights are read when they are decoded."""
        if path not in self._numbers:
            self._own.will_need(path, start_byte, nbytes)

    def close(self) -> None:
        """Close all files."""
        self._own.close()
        self._leftovers.close()
        with self._lock:
            if self._tensors is not None:
                self._tensors.close()
                self._tensors = None

    @property
    def _packed(self) -> _Tensors:
        with self._lock:
            if self._tensors is None:
                self._tensors = self._open()
            return self._tensors

    def _weights(self, path: str) -> WeightFile | None:
        number = self._numbers.get(path)
        return None if number is None else self._expert.files[number]

    def _pieces(self, number: int, start: int, stop: int) -> Iterator[tuple[_Span, int, int]]:
        """The spans that bytes [start, stop) of a weight file are in, with the bytes of each."""
        spans = self._spans[number]
        first = bisect_right(spans, start, key=lambda span: span.start_byte) - 1
        for span, after in pairwise(spans[first:]):
            if span.start_byte >= stop:
                break
            yield span, max(start, span.start_byte), min(stop, after.start_byte)


class _Tensors:
    """The stored bytes of packed tensors, from tiers and the base."""

    def __init__(
        self,
        warehouse: Warehouse,
        expert: OfflineExpert,
        pack_root: Path,
        tensors: Mapping[str, PackedTensor] | None,
        reading: Reading,
        near: Near | None,
    ) -> None:
        self._expert, self._near, catalog = expert, near, warehouse.catalog
        self._tensors = warehouse.packs.open(expert.pack_id).tensors if tensors is None else tensors
        self._base = open_root(warehouse, catalog.root(expert.base), expert.base)
        self._known = checkpoint_inputs(warehouse, [self._base])
        self._digests = catalog.digests(self._base.checkpoint_id) or {}
        self._source = open_source(self._base.root, reading)
        self._reader = BlockReader(self._source, self._base, None)
        self._files = FrameFiles(pack_root, reading)
        self._of = lru_cache(maxsize=_HELD_TENSORS)(self._opened)
        self._product = lru_cache(maxsize=_HELD_PRODUCTS)(self._directions)

    def read_into(self, tensor: str, start_byte: int, out: memoryview) -> None:
        """Fill `out` with a tensor's bytes from `start_byte` on; decodes the chunks they are in.

        Raises CorruptionError for frames or base bytes that are not what was written.
        """
        packed, base, check = self._of(tensor)
        step, stop_byte = CHUNK_ELEMS * itemsize(packed.dtype), start_byte + len(out)
        last = -(-stop_byte // step)
        for first in range(start_byte // step, last, _CHUNKS_AT_ONCE):
            stored = self._decoded(packed, base, check, first, min(first + _CHUNKS_AT_ONCE, last))
            at = first * step
            a, b = max(start_byte, at), min(stop_byte, at + len(stored))
            out[a - start_byte : b - start_byte] = stored[a - at : b - at]

    def close(self) -> None:
        """Close all files."""
        self._files.__exit__()
        self._source.close()

    def _decoded(
        self, packed: PackedTensor, base: TensorView, check: Verify, first: int, stop: int
    ) -> memoryview:
        """The stored bytes of chunks [first, stop)."""
        start_elem, stop_elem = first * CHUNK_ELEMS, min(stop * CHUNK_ELEMS, base.numel)
        size = itemsize(base.dtype)
        if self._near and (stored := self._near.stored.get(packed.name)) is not None:
            return memoryview(stored)[start_elem * size : stop_elem * size]
        raw = bytearray((stop_elem - start_elem) * size)
        read_stored(self._readers, base, start_elem, stop_elem, memoryview(raw), check)
        base_bits = np.frombuffer(raw, BITS_OF[base.dtype])  # [elements], as `expert_bits`
        told = predicted(self._product(packed.name), packed, base_bits, start_elem)
        expert_bits = told.bits if told else base_bits
        if self._near is None:
            frames = self._files.read(packed, ["X"], first, stop)
            expert_bits = np.empty_like(base_bits)
            decode_bits(frames, base_bits, expert_bits, told)
        return expert_bits.data.cast("B")

    def _directions(self, tensor: str) -> Product | None:
        rung = self._near.rung if self._near else FACTORED[-1]
        return product_in(self._files, self._tensors[tensor], TIERS_OF[rung])

    def _readers(self, _: int) -> BlockReader:
        return self._reader

    def _opened(self, tensor: str) -> tuple[PackedTensor, TensorView, Verify]:
        packed = self._tensors[tensor]
        refuse_other_base(self._expert, self._base, self._digests, packed.content)
        base = view_of(self._base.by_name[packed.base_name])
        return packed, base, Verifier(base, self._known.of_view(base)).check


def refuse_other_base(
    expert: OfflineExpert, base: Checkpoint, digests: Mapping[str, str], packed: TensorContent
) -> None:
    """Raise CorruptionError unless a tensor was packed against the base's, as its `digests` say."""
    found, entry = digests.get(packed.base_name, "no such tensor"), None
    if found == packed.base_digest:
        entry = base.by_name[packed.base_name]
    if entry is None or (entry.dtype, entry.shape) != (packed.dtype, packed.shape):
        raise CorruptionError(
            "The base is not the one that the expert was packed against",
            where=f"{base.root}, tensor {packed.base_name}",
            expected=f"content {packed.base_digest[:16]}, {packed.dtype} {list(packed.shape)}",
            found=f"{found[:16]}",
            next_step=f"put the files of that {expert.base!r} back, or take the original from "
            f"{expert.cold}",
        )


def _sound(folder: Path, expert: OfflineExpert, number: int) -> str:
    """The name of a leftover that was compared with its digest."""
    return sound_leftover(folder, expert, number).name


def _spans(file: WeightFile) -> Iterator[_Span]:
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
