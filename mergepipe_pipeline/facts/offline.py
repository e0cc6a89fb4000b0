"""Where a checkpoint is read that may be offline: from its folder, or at an address of its pack.

`pack_source` reads from that address. All merges pass here and few have anything offline, so that
no codec is loaded.
"""

from __future__ import annotations

from dataclasses import replace

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import PACKED, Checkpoint
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.warehouse import Warehouse


def open_root(warehouse: Warehouse, root: str, name: str) -> Checkpoint:
    """The checkpoint at a root, read from its pack if its weight files are offline.

    Raises as `open_checkpoint`, CorruptionError for a damaged record.
    """
    expert = offline_at(warehouse, root)
    return open_checkpoint(root, name) if expert is None else open_offline(warehouse, expert, name)


def open_offline(warehouse: Warehouse, expert: OfflineExpert, name: str) -> Checkpoint:
    """The checkpoint of a record, with the id that it had. Raises CorruptionError."""
    address = warehouse.offline.address(expert.checkpoint_id)
    recorded = warehouse.catalog.checkpoint(expert.checkpoint_id, name, expert.root)
    if recorded is None:
        return open_checkpoint(address, name)
    # Probes are of packed tensors, and need not be decoded: the catalog has them.
    return replace(open_checkpoint(address, name, probes=False), files=recorded.files)


def offline_at(warehouse: Warehouse, root: str) -> OfflineExpert | None:
    """The record of the checkpoint last at a root, if its weight files are not there."""
    store = warehouse.offline
    if "://" in root or not store.ids():
        return None
    registered = [i for *_, i, _, at in warehouse.catalog.registrations() if at == root]
    # A later version that lay here and is gone does not bring back the one before it.
    expert = store.find(registered[-1]) if registered else None
    return expert if expert is not None and expert.is_offline else None


def present_root(warehouse: Warehouse, checkpoint_id: str, root: str) -> str:
    """The root or address of a checkpoint that was at `root`: it may be offline now, or back."""
    expert = warehouse.offline.find(checkpoint_id)
    if expert is not None and expert.is_offline:
        is_there = root == expert.root or root.startswith(PACKED)
        return warehouse.offline.address(checkpoint_id) if is_there else root
    if not root.startswith(PACKED):
        return root
    roots = [at for *_, i, _, at in warehouse.catalog.registrations() if i == checkpoint_id]
    return roots[-1] if roots else root
