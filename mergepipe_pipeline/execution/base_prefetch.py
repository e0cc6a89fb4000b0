"""Reads a base into the page cache while planning decides what to read of the experts.

Planning leaves the disk idle, and the base is what a merge reads in any case. Only for merges that
follow at once: a plan alone costs no reads. Nothing depends on it but time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe
from mergepipe_pipeline.storage.source import FetchedAhead, FileRange, open_source
from mergepipe_pipeline.storage.uncached import fits_page_cache

#: Long, since after each step the thread waits for its turn in the interpreter.
_STEP_NBYTES = 32 << 20

#: Checkpoints' roots with the tensors to read, in file order.
_Places = list[tuple[str, list[TensorEntry]]]


def is_worth_prefetching(resolved: ResolvedRecipe) -> bool:
    """Whether the base is worth reading before the plan is made.

    What is analysed first is read there, and what the page cache cannot hold would be read twice.
    """
    return not resolved.cost.analysis_bytes and fits_page_cache(resolved.cost.base_bytes)


@contextmanager
def prefetch_base(resolved: ResolvedRecipe) -> Iterator[None]:
    """While the block runs, read the recipe's base in another thread, if that is worth it."""
    if not is_worth_prefetching(resolved):
        yield
        return
    over = threading.Event()
    reader = threading.Thread(target=_read, args=(_base_tensors(resolved), over), daemon=True)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def _base_tensors(resolved: ResolvedRecipe) -> _Places:
    """What is stored of the tensors that experts are merged on."""
    by_root: dict[str, dict[TensorEntry, None]] = {}
    for t in resolved.recipe.tensors:
        if t.base is None:
            continue
        model = resolved.models[t.base.model]
        for part in model.views[t.base.tensor].stored:
            checkpoint = model.checkpoints[part.source]
            if not checkpoint.is_away:  # decoding would take the cores that planning needs
                by_root.setdefault(checkpoint.root, {})[part.entry] = None
    return [(root, sorted(e, key=lambda e: (e.file, e.start_byte))) for root, e in by_root.items()]


def _read(places: _Places, over: threading.Event) -> None:
    buffer = memoryview(bytearray(_STEP_NBYTES))
    # What is wrong with a file, the merge says when it comes to it.
    with suppress(MergePipeError, OSError):
        for root, entries in places:
            with open_source(root) as source:
                if isinstance(source, FetchedAhead):
                    source.expect(_range(e) for e in entries)
                for e in entries:
                    for start in range(0, e.nbytes, _STEP_NBYTES):
                        if over.is_set():
                            return
                        piece = buffer[: min(_STEP_NBYTES, e.nbytes - start)]
                        source.read_into(e.file, e.start_byte + start, piece)


def _range(entry: TensorEntry) -> FileRange:
    return FileRange(entry.file, entry.start_byte, entry.start_byte + entry.nbytes)
