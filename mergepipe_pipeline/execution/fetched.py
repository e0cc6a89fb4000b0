"""Layers that another warehouse has merged: found by key in the bucket, and taken from there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.plan import LayerTask
from mergepipe_pipeline.errors import CorruptionError, RemoteError
from mergepipe_pipeline.execution.plan_leases import staging as staging_of
from mergepipe_pipeline.progress import Advance, Progress
from mergepipe_pipeline.snapshots.mirror import Mirror
from mergepipe_pipeline.warehouse import Warehouse

_LOG = logging.getLogger("mergepipe")


def fetch_layers(
    warehouse: Warehouse, layers: Sequence[LayerTask], progress: Progress
) -> dict[str, StoredObject]:
    """Put those layers that the bucket has into the object store; what they are, by name.

    Nothing without a bucket. Every byte is compared with its digest; a layer that is damaged there,
    or cannot be fetched, is logged, left out and merged here.
    """
    mirror = warehouse.mirror
    if mirror is None or not layers:
        return {}
    fetched: dict[str, StoredObject] = {}
    try:
        looked_up = list(zip(layers, mirror.lookup([w.action_key for w in layers]), strict=True))
        total = sum(stored.nbytes for _, stored in looked_up if stored)
        with (
            staging_of(warehouse, "fetch") as staging,
            progress.task(f"fetch from {mirror.bucket.address.text}", total) as advance,
        ):
            for layer, stored in looked_up:
                if stored and _fetched(warehouse, mirror, layer, stored, staging, advance):
                    fetched[layer.name] = stored
    except RemoteError as error:
        _LOG.warning("Layers are merged here that a bucket may have. %s", error)
    return fetched


def _fetched(
    warehouse: Warehouse,
    mirror: Mirror,
    layer: LayerTask,
    stored: StoredObject,
    staging: Path,
    advance: Advance,
) -> bool:
    path = staging / stored.sha256
    try:
        if not mirror.fetch(stored, path, advance):
            return False
    except CorruptionError as error:
        _LOG.warning("A layer is merged here. %s", error)
        return False
    warehouse.objects.adopt(path, stored)
    warehouse.objects.record(layer.action_key, stored)
    return True
