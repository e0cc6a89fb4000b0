"""Packs in `verify --all`: indexes in the scope *structure*, every frame in the scope *digests*.

A finding is about the folder of a pack, since `repair` takes it away as a whole: it can be made
again, unless the expert's own weight files are offline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.pack import PackedTensor, Tier
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.facts.damaged_packs import irreplaceable_packs
from mergepipe_pipeline.integrity.auditor import Auditor
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.index import SUMMED_ELEMS, frames_path
from mergepipe_pipeline.packs.offline import OfflineExpert, original_named, sound_leftover
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.warehouse import Warehouse

#: Chunks that are read at once.
_CHUNKS_AT_ONCE = 64

T = TypeVar("T")
_REMADE = "`mergepipe pack` makes it again"


def verify_indexes(warehouse: Warehouse, audit: Auditor) -> None:
    """Check the records of packs and of the experts that they stand for; reads no frame."""
    irreplaceable = irreplaceable_packs(warehouse)
    for pack_id in warehouse.packs.ids():
        path, act = warehouse.packs.path(pack_id), partial(_read_all, warehouse, pack_id)
        audit.check(
            "structure",
            path,
            partial(_named, irreplaceable.get(pack_id), path, act),
            is_derivable=pack_id not in irreplaceable,
            remade=_REMADE,
        )
    for checkpoint_id in warehouse.offline.ids():
        path = warehouse.offline.path(checkpoint_id)
        audit.check("structure", path, partial(warehouse.offline.find, checkpoint_id))


def verify_frames(warehouse: Warehouse, audit: Auditor, progress: Progress) -> None:
    """Compare every frame with its checksum, and what stays beside packs with its digest."""
    for checkpoint_id in warehouse.offline.ids():
        path = warehouse.offline.path(checkpoint_id)
        audit.check("digests", path, partial(_check_leftovers, warehouse, checkpoint_id))
    irreplaceable = irreplaceable_packs(warehouse)
    for pack_id in warehouse.packs.ids():
        try:
            pack = warehouse.packs.open(pack_id)
        except CorruptionError:  # a finding of the structure
            continue
        tiers = [t for t in pack.tiers if not audit.is_done(frames_path(pack.root, t))]
        with (
            progress.task(f"verify pack {pack_id[:8]}", pack.nbytes) as advance,
            FrameFiles(pack.root, "once") as files,
            Workers(threads.FILES) as workers,
        ):

            def check(tier: Tier, pack: Pack = pack, files: FrameFiles = files) -> int:
                path, act = frames_path(pack.root, tier), partial(_read_tier, pack, files, tier)
                nbytes = audit.check(
                    "digests",
                    pack.root,
                    partial(_named, irreplaceable.get(pack.pack_id), pack.root, act),
                    is_derivable=pack.pack_id not in irreplaceable,
                    remade=_REMADE,
                )
                if nbytes is not None:
                    audit.done(path, nbytes)
                return nbytes or 0

            for nbytes in workers.map(check, tiers):
                advance(nbytes)


def refuse_damaged_frames(pack: Pack, progress: Progress) -> None:
    """Compare every frame of a pack with its checksum. Raises CorruptionError naming a bad one."""
    with (
        progress.task(f"verify pack {pack.pack_id[:8]}", pack.nbytes) as advance,
        FrameFiles(pack.root, "once") as files,
    ):
        for tier in pack.tiers:
            advance(_read_tier(pack, files, tier))


def _named(expert: OfflineExpert | None, root: Path, act: Callable[[], T]) -> T:
    """What `act` gives; its errors say where the original is that a pack stands for."""
    if expert is None:
        return act()
    with original_named(expert, root):
        return act()


def _check_leftovers(warehouse: Warehouse, checkpoint_id: str) -> None:
    """Compare the bytes that stay of an offline expert's weights. Raises CorruptionError."""
    expert = warehouse.offline.find(checkpoint_id)
    for number, _ in enumerate(expert.files if expert else ()):
        assert expert is not None
        sound_leftover(warehouse.offline.path(checkpoint_id), expert, number)


def _read_all(warehouse: Warehouse, pack_id: str) -> None:
    """Read all of a pack but its frames."""
    pack = warehouse.packs.open(pack_id)
    for _ in chain(pack.tensors.values(), pack.sizes(SUMMED_ELEMS)):
        pass


def _read_tier(pack: Pack, files: FrameFiles, tier: Tier) -> int:
    """Read all frames of a tier; their bytes. Raises CorruptionError naming the first bad one."""
    nbytes = 0
    for tensor in pack.tensors.values():
        for first in range(0, _n_chunks(tensor), _CHUNKS_AT_ONCE):
            stop = min(first + _CHUNKS_AT_ONCE, _n_chunks(tensor))
            nbytes += int(files.read(tensor, (tier,), first, stop).nbytes.sum())
    return nbytes


def _n_chunks(tensor: PackedTensor) -> int:
    return int(tensor.nbytes.shape[1])
