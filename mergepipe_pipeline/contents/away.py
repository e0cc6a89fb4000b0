"""The address at which a checkpoint is read whose files `pack --replace` moved away.

`away_files` reads from it. All merges pass here and few have moved anything, so that no codec is
loaded.
"""

from __future__ import annotations

import os
from dataclasses import replace

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.contents.rests import damaged_rest_named
from mergepipe_pipeline.domain.checkpoint import AWAY, Checkpoint
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.replaced import Replaced
from mergepipe_pipeline.warehouse import Warehouse


def open_root(warehouse: Warehouse, root: str, name: str) -> Checkpoint:
    """The checkpoint at a root, read from its pack if `pack --replace` moved it away.

    Raises as `open_checkpoint`, CorruptionError for a damaged record.
    """
    record = away_from(warehouse, root)
    return open_checkpoint(root, name) if record is None else open_away(warehouse, record, name)


@damaged_rest_named()
def open_away(warehouse: Warehouse, record: Replaced, name: str) -> Checkpoint:
    """The checkpoint of a record, with the id that it had.

    Raises CorruptionError naming the file beside the pack, if its headers are not what they were.
    """
    address = warehouse.replaced.address(record.checkpoint_id)
    recorded = warehouse.catalog.checkpoint(record.checkpoint_id, name, record.root)
    if recorded is None:
        return open_checkpoint(address, name)
    # Probes are of packed tensors, and need not be decoded: the record has them.
    checkpoint = open_checkpoint(address, name, probes=False)
    if checkpoint.stamp != recorded.stamp:  # else a damaged header would be taken for a new version
        raise CorruptionError(
            "The headers of an expert that was moved away are not what they were",
            where=f"{address}, {record.name}",
            expected=f"stamp {recorded.stamp}",
            found=checkpoint.stamp,
            next_step=record.bring_back,
        )
    return replace(checkpoint, files=recorded.files)


def away_from(warehouse: Warehouse, root: str) -> Replaced | None:
    """The record of the checkpoint last at a root, if it was moved away and nothing lies there."""
    store = warehouse.replaced
    if "://" in root or os.path.exists(root) or not store.ids():
        return None
    registered = [i for *_, i, _, at in warehouse.catalog.registrations() if at == root]
    # A later version that lay here and is gone does not bring back the one before it.
    record = store.find(registered[-1]) if registered else None
    return record if record is not None and record.is_away else None


def present_root(warehouse: Warehouse, checkpoint_id: str, root: str) -> str:
    """The root or address of a checkpoint that was at `root`: it may be moved away, or back."""
    record = warehouse.replaced.find(checkpoint_id)
    if record is not None and record.is_away:
        is_there = root == record.root or root.startswith(AWAY)
        return warehouse.replaced.address(checkpoint_id) if is_there else root
    if not root.startswith(AWAY):
        return root
    roots = [at for *_, i, _, at in warehouse.catalog.registrations() if i == checkpoint_id]
    return roots[-1] if roots else root
