"""Packs in `verify --all`: indexes in the scope *structure*, every frame in the scope *digests*.

A finding is about the folder of a pack, since `repair` takes it away as a whole: it can be made
again, unless the expert's own weight files are offline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.pack import TIERS, Tier
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.facts.damaged_packs import irreplaceable_packs
from mergepipe_pipeline.integrity.auditor import Auditor, Scope
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.index import SUMMED_ELEMS
from mergepipe_pipeline.packs.offline import OfflineExpert, original_named, sound_leftover
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.warehouse import Warehouse

#: Chunks that are read at once.
_CHUNKS_AT_ONCE = 64

T = TypeVar("T")


def verify_indexes(warehouse: Warehouse, audit: Auditor) -> None:
    """Check the records of packs and of the experts that they stand for; reads no frame."""
    standing = irreplaceable_packs(warehouse)
    for pack_id in warehouse.packs.ids():
        path, act = warehouse.packs.path(pack_id), partial(_read_all, warehouse, pack_id)
        _check(audit, "structure", path, standing, act)
    for checkpoint_id in warehouse.offline.ids():
        path = warehouse.offline.path(checkpoint_id)
        audit.check("structure", path, partial(warehouse.offline.find, checkpoint_id))


def verify_frames(warehouse: Warehouse, audit: Auditor, progress: Progress) -> None:
    """Compare every frame with its checksum, and what stays beside packs with its digest."""
    for checkpoint_id in warehouse.offline.ids():
        path = warehouse.offline.path(checkpoint_id)
        audit.check("digests", path, partial(_check_leftovers, warehouse, checkpoint_id))
    standing = irreplaceable_packs(warehouse)
    for pack_id in warehouse.packs.ids():
        try:
            pack = warehouse.packs.open(pack_id)
        except CorruptionError:  # a finding of the structure
            continue
        with (
            progress.task(f"verify pack {pack_id[:8]}", pack.nbytes) as advance,
            FrameFiles(pack.root, "once") as files,
            Workers(threads.FILES) as workers,
        ):

            def check(tier: Tier, pack: Pack = pack, files: FrameFiles = files) -> int:
                act = partial(_read_tier, pack, files, tier)
                return _check(audit, "digests", pack.root, standing, act) or 0

            for nbytes in workers.map(check, TIERS):
                audit.hashed(nbytes)
                advance(nbytes)


def refuse_damaged_frames(pack: Pack, progress: Progress) -> None:
    """Compare every frame of a pack with its checksum. Raises DamagedPackError naming a bad one."""
    with (
        progress.task(f"verify pack {pack.pack_id[:8]}", pack.nbytes) as advance,
        FrameFiles(pack.root, "once") as files,
    ):
        for tier in TIERS:
            advance(_read_tier(pack, files, tier))


def _check(
    audit: Auditor,
    scope: Scope,
    root: Path,
    standing: Mapping[str, OfflineExpert | None],
    act: Callable[[], T],
) -> T | None:
    """Check the pack in a folder by `act`; a finding says where the original is, if the pack
    is `standing` for it.
    """

    def named() -> T:
        expert = standing.get(root.name)
        with original_named(expert, root) if expert else nullcontext():
            return act()

    is_derivable = root.name not in standing
    remade = "`mergepipe pack` makes it again"
    return audit.check(scope, root, named, is_derivable=is_derivable, remade=remade)


def _check_leftovers(warehouse: Warehouse, checkpoint_id: str) -> None:
    """Compare the bytes that stay of an offline expert's weights. Raises CorruptionError."""
    if (expert := warehouse.offline.find(checkpoint_id)) is not None:
        for number, _ in enumerate(expert.files):
            sound_leftover(warehouse.offline.path(checkpoint_id), expert, number)


def _read_all(warehouse: Warehouse, pack_id: str) -> None:
    """Read all of a pack but its frames."""
    pack = warehouse.packs.open(pack_id)
    for _ in chain(pack.tensors.values(), pack.sizes(SUMMED_ELEMS)):
        pass


def _read_tier(pack: Pack, files: FrameFiles, tier: Tier) -> int:
    """Read all frames of a tier; their bytes. Raises DamagedPackError naming the first bad one."""
    nbytes = 0
    for tensor in pack.tensors.values():
        n_chunks = tensor.nbytes.shape[1]
        for first in range(0, n_chunks, _CHUNKS_AT_ONCE):
            stop = min(first + _CHUNKS_AT_ONCE, n_chunks)
            nbytes += int(files.read(tensor, (tier,), first, stop).nbytes.sum())
    return nbytes
