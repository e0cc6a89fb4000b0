"""Which packs nobody needs: they can be made again from the expert, as long as it is there.

A pack stays while the expert that it holds is what some registered name means, or is offline (`pack
--replace` moved its weight files), and while a plan names it that somebody works on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from mergepipe_pipeline.contents.damaged_packs import irreplaceable_packs
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.warehouse import Warehouse


def idle_packs(warehouse: Warehouse, need: Need, *, certain: bool) -> Iterator[Path]:
    """The folders of packs that nobody needs; none unless it is certain what is needed."""
    store = warehouse.packs
    kept = need.pack_ids | irreplaceable_packs(warehouse).keys()
    current = list(_current(warehouse))
    for pack_id in store.ids() if certain else ():
        try:
            pack = store.open(pack_id)
        except CorruptionError:  # which no merge reads
            pack = None
        is_used = pack is not None and any(map(pack.holds, current))
        if pack_id not in kept and not is_used:
            yield store.path(pack_id)
    for folder in (warehouse.packs_dir, warehouse.offline_dir):
        yield from folder.glob(".*.old-*")  # what a death while replacing left: see `replace_dir`


def _current(warehouse: Warehouse) -> Iterator[Mapping[str, str]]:
    """Tensor to digest of what each registered name means now, where that is known."""
    catalog = warehouse.catalog
    for name in catalog.names():
        with suppress(MergePipeError):
            digests = catalog.digests(catalog.get(name).checkpoint.checkpoint_id)
            if digests is not None:
                yield digests
