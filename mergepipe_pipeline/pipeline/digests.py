"""The digest of every tensor of a checkpoint: what it holds, whatever it is called."""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.pipeline.progress import Progress, Silent
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.warehouse import Warehouse


def ensure_digests(
    home: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> Mapping[str, str]:
    """The digest of every tensor of a checkpoint, from the catalog or by one pass over it."""
    catalog = Catalog(home.catalog)
    known = catalog.digests(checkpoint.checkpoint_id)
    if known is not None:
        return known
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    with (progress or Silent()).task(f"digest {checkpoint.name}", checkpoint.nbytes) as advance:
        digests = digest_checkpoint(checkpoint, advance)
    catalog.put_digests(checkpoint.checkpoint_id, digests)
    return digests
