"""Packs that another version of the codec wrote: which experts they are of, and what to do.

Where the original is there, the pack is written again. Where it is in cold storage only, the
release that wrote the pack gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import CorruptionError, PackVersionError
from mergepipe_pipeline.packs.contents import holds
from mergepipe_pipeline.packs.index import read_any_contents
from mergepipe_pipeline.warehouse import Warehouse


def refuse_other_codec(warehouse: Warehouse, pack_id: str) -> None:
    """Raise PackVersionError for a pack of another version of the codec; reads its index.

    If the pack stands for an expert in cold storage, the error names it.
    """
    try:
        warehouse.packs.refuse_other_codec(pack_id)
    except PackVersionError as error:
        store = warehouse.replaced
        for record in filter(None, map(store.find, store.ids())):
            if record.pack_id == pack_id and not record.is_back:
                error.where = f"{record.name}, {error.where}"
                error.next_step = (
                    f"run `mergepipe unpack {record.name}` with the release that wrote it, or "
                    f"{record.bring_back}; then `mergepipe pack {record.name}` writes it again"
                )
        raise


def name_experts(error: PackVersionError, names: Iterable[str]) -> PackVersionError:
    """The error, with the command that writes the pack of these experts again."""
    error.next_step = (
        f"run `mergepipe pack {' '.join(names)}`, which writes it again, and then plan again; "
        "without it the originals are read"
    )
    return error


def read_without_packs(warehouse: Warehouse, experts: Iterable[Checkpoint]) -> Iterator[str]:
    """A warning for each expert whose only packs are of another version of the codec."""
    store = warehouse.packs
    errors = store.of_other_codecs()
    if not errors:
        return
    contents = {}
    for pack_id in errors:
        with suppress(CorruptionError):  # a version with another index cannot be read
            contents[pack_id] = read_any_contents(store.path(pack_id))
    current = [pack for pack in map(store.find, store.ids()) if pack is not None]
    for expert in experts:
        digests = warehouse.catalog.digests(expert.checkpoint_id)
        if digests is None or any(pack.holds(digests) for pack in current):
            continue
        for pack_id, of in contents.items():
            if of and holds(of, digests):
                error = errors[pack_id]
                yield (
                    f"the pack of {expert.name} was written by another version of the codec "
                    f"(expected {error.expected}, found {error.found}), so that the original is "
                    f"read; `mergepipe pack {expert.name}` writes it again"
                )
                break
