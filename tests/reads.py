"""Counts what is read of tensors, whoever reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from unittest import mock

from mergepipe_pipeline.spec.checkpoint import TensorEntry
from mergepipe_pipeline.storage.reader import BlockReader

#: Bytes by (checkpoint's folder or file, tensor).
Reads = Counter[tuple[str, str]]


@contextmanager
def tensor_reads() -> Iterator[Reads]:
    """The bytes of tensors that are read meanwhile, each time they are."""
    reads: Reads = Counter()
    lock, real = Lock(), BlockReader.read_into

    def read_into(self: BlockReader, entry: TensorEntry, *args: object) -> None:
        real(self, entry, *args)  # type: ignore[arg-type]
        with lock:
            reads[Path(self._checkpoint.root).name, entry.name] += len(args[2])  # type: ignore[arg-type]

    with mock.patch.object(BlockReader, "read_into", read_into):
        yield reads


def of(reads: Reads, checkpoint: str) -> int:
    """Bytes read of one checkpoint."""
    return sum(n for (name, _), n in reads.items() if name == checkpoint)
