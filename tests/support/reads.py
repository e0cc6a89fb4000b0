"""Counts what is read of tensors, whoever reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from unittest import mock

from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.domain.checkpoint import TensorEntry

#: Bytes by (checkpoint's folder or file, tensor).
Reads = Counter[tuple[str, str]]


@contextmanager
def tensor_reads() -> Iterator[Reads]:
    """The bytes of tensors that are read meanwhile, each time they are."""
    reads: Reads = Counter()
    lock, real = Lock(), BlockReader._start_byte

    def start_byte(
        self: BlockReader, entry: TensorEntry, start: int, stop: int, nbytes: int
    ) -> int:
        found = real(self, entry, start, stop, nbytes)
        with lock:
            reads[Path(self._checkpoint.root).name, entry.name] += nbytes
        return found

    # Where every read begins, by itself or in a batch.
    with mock.patch.object(BlockReader, "_start_byte", start_byte):
        yield reads


def of(reads: Reads, checkpoint: str) -> int:
    """Bytes read of one checkpoint."""
    return sum(n for (name, _), n in reads.items() if name == checkpoint)
