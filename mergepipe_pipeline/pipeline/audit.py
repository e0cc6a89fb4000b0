"""The audits that stand between a snapshot and its release."""

from __future__ import annotations

from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.pipeline.progress import Progress, Silent
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.storage.checkpoint import open_checkpoint
from mergepipe_pipeline.storage.reader import BlockReader
from mergepipe_pipeline.storage.source import open_source

_WINDOW_ELEMS = 1 << 20


def non_finite(snapshot: Snapshot, progress: Progress | None = None) -> dict[str, int]:
    """Tensor name to the number of NaN and infinite elements, for tensors that have any.

    Opens the snapshot as any other checkpoint, so headers and index are audited on the way.
    """
    import numpy as np

    from mergepipe_pipeline.tensors.stored import as_float32

    checkpoint = open_checkpoint(snapshot.path, snapshot.snapshot_id[:12])
    found: dict[str, int] = {}
    with (
        open_source(snapshot.path) as source,
        (progress or Silent()).task("audit", checkpoint.nbytes) as advance,
    ):
        reader = BlockReader(source, checkpoint, None)
        for t in checkpoint.tensors:
            if t.dtype not in FLOATING:
                continue
            for start in range(0, t.numel, _WINDOW_ELEMS):
                raw = reader.read(t, start, min(t.numel, start + _WINDOW_ELEMS))
                values = as_float32(np.frombuffer(raw, dtype=np.uint8), t.dtype)
                bad = int((~values.isfinite()).sum())
                if bad:
                    found[t.name] = found.get(t.name, 0) + bad
                advance(len(raw))
    return found
