"""The digests of a checkpoint's tensors and of their segments, by one pass over the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack

from mergepipe_pipeline.checkpoints.reader import BlockReader, open_reader
from mergepipe_pipeline.checkpoints.stored import Verifiers, read_stored
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import segment_digests
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, KnownSegments, Segments
from mergepipe_pipeline.domain.view import Part, TensorView, view_of_part
from mergepipe_pipeline.dtypes import itemsize

#: A multiple of all segments.
_WINDOW_ELEMS = 1 << 21


def digest_checkpoint(
    checkpoint: Checkpoint,
    progress: Callable[[int], None] | None = None,
    *,
    levels: Sequence[int] = (COARSE_ELEMS,),
    names: Collection[str] | None = None,
) -> dict[str, tuple[Segments, ...]]:
    """Tensor name to the digests of its segments, per level; one pass in bounded memory.

    `levels`: lengths of segments in elements. `names`: which tensors (None: all). Raises
    CheckpointChangedError if a file changes meanwhile.
    """
    tensors = [t for t in checkpoint.tensors if names is None or t.name in names]
    with open_reader(checkpoint) as reader, Workers(threads.FILES) as workers:
        reader.expect(tensors)

        def digest(entry: TensorEntry) -> tuple[Segments, ...]:
            by_level: list[list[bytes]] = [[] for _ in levels]
            for start in range(0, entry.numel, _WINDOW_ELEMS):
                raw = reader.read(entry, start, min(entry.numel, start + _WINDOW_ELEMS))
                for parts, n in zip(by_level, levels, strict=True):
                    parts.append(segment_digests(memoryview(raw), n * itemsize(entry.dtype)))
                if progress:
                    progress(len(raw))
            return tuple(Segments(n, b"".join(p)) for n, p in zip(levels, by_level, strict=True))

        taken = dict(zip((t.name for t in tensors), workers.map(digest, tensors), strict=True))
        reader.verify_unchanged()
    return taken


def digest_view(
    view: TensorView,
    checkpoints: Mapping[int, Checkpoint],
    segment_elems: int,
    known: KnownSegments,
) -> Segments:
    """The digests of a view's own segments: its stored elements in another order, or decoded.

    What is stored is verified against `known` segments: while it is decoded; or of rows in another
    order by another reading afterwards, which shows any earlier change. `checkpoints` are by source
    number. Raises CorruptionError, CheckpointChangedError.
    """
    with ExitStack() as stack:
        readers = {number: stack.enter_context(open_reader(c)) for number, c in checkpoints.items()}
        verifiers = Verifiers(readers.__getitem__, known)
        if not view.runs:
            verifiers.of_stored(view.stored[0])
        digests = b"".join(
            segment_digests(raw, segment_elems * itemsize(view.dtype), is_made=True)
            for raw in _windows(readers, view)
        )
        for part in (Part(p.source, e) for p in view.stored for e in p.entries if view.runs):
            verifiers.of_stored(part)
            for _ in _windows(readers, view_of_part(part, part.entry.name)):
                pass
        verifiers.finish()
        for reader in readers.values():
            reader.verify_unchanged()
    return Segments(segment_elems, digests)


def _windows(readers: Mapping[int, BlockReader], view: TensorView) -> Iterator[memoryview]:
    """The stored bytes of a view, each window valid until the next."""
    buffer = bytearray(min(view.numel, _WINDOW_ELEMS) * itemsize(view.dtype))
    for start in range(0, view.numel, _WINDOW_ELEMS):
        stop = min(view.numel, start + _WINDOW_ELEMS)
        raw = memoryview(buffer)[: (stop - start) * itemsize(view.dtype)]
        read_stored(readers.__getitem__, view, start, stop, raw)
        yield raw
