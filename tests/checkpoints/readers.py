"""Readers of checkpoints by number, as rows ask for them, that keep count of their requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.storage.source import open_source


class CountingReader(BlockReader):
    """A reader that reads anything and notes for which tensor."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.asked: list[str] = []

    @property
    def bytes_read(self) -> int:
        return self._tally.nbytes

    def read_into(
        self, entry: TensorEntry, start_elem: int, stop_elem: int, out: memoryview
    ) -> None:
        self.asked.append(entry.name)
        super().read_into(entry, start_elem, stop_elem, out)


@contextmanager
def opened(checkpoints: Sequence[Checkpoint]) -> Iterator[list[CountingReader]]:
    """Ungated readers of all checkpoints."""
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(c.root)) for c in checkpoints]
        yield [CountingReader(s, c, None) for s, c in zip(sources, checkpoints, strict=True)]
