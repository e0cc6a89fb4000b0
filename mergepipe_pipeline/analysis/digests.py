"""The digest of every tensor of a checkpoint: its content, whatever it is called."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mergepipe_pipeline.digest import new_content_hash
from mergepipe_pipeline.spec.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.storage.reader import BlockReader
from mergepipe_pipeline.storage.source import open_source

_WINDOW_ELEMS = 1 << 21


def digest_checkpoint(
    checkpoint: Checkpoint, progress: Callable[[int], None] | None = None
) -> dict[str, str]:
    """Tensor name to digest (64 hex) of its stored bytes; one pass in bounded memory.

    Raises CheckpointChangedError if a file changes meanwhile.
    """
    with open_source(checkpoint.root) as source, ThreadPoolExecutor(2) as pool:
        reader = BlockReader(source, checkpoint, None)

        def digest(entry: TensorEntry) -> str:
            running = new_content_hash()
            for start in range(0, entry.numel, _WINDOW_ELEMS):
                raw = reader.read(entry, start, min(entry.numel, start + _WINDOW_ELEMS))
                running.update(raw)
                if progress:
                    progress(len(raw))
            return running.hexdigest()

        found = dict(
            zip(
                (t.name for t in checkpoint.tensors),
                pool.map(digest, checkpoint.tensors),
                strict=True,
            )
        )
        reader.verify_unchanged()
    return found
