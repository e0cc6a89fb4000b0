"""The digest of every tensor of a checkpoint: what it holds, whatever it is called.

The segments of a tensor have digests too, with which `input_segments` compares what is read later.
`verify_place` is the one way to what else is known of a checkpoint: whoever takes something over
by its id asks there first whether these are the files of which it is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.segment_files import SegmentFiles, put_segments
from mergepipe_pipeline.contents.places import Places, place_of
from mergepipe_pipeline.digest import SEGMENT_DIGEST_NBYTES, digest_json
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, Segments, levels_for
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import verify_with_progress
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.warehouse import Warehouse

#: Root and stamp of the snapshots that this process has checked.
_CHECKED = set[tuple[str, str]]()


class Known(NamedTuple):
    """A checkpoint under the id by which the catalog knows it."""

    checkpoint_id: str
    checkpoint: Checkpoint


def ensure_digests(
    warehouse: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> Mapping[str, str]:
    """The digest of every tensor of a checkpoint, from the catalog or by one pass over it.

    They follow from the digests of segments; only tensors without them are read. Raises
    CorruptionError as `refuse_damaged_result`.
    """
    catalog = warehouse.catalog
    verify_place(warehouse, checkpoint, progress)
    stored = catalog.digests(checkpoint.checkpoint_id)
    if stored is not None:
        return stored
    files = SegmentFiles(warehouse.catalog_dir, checkpoint.checkpoint_id, COARSE_ELEMS)
    unread = {t.name for t in checkpoint.tensors if t.name not in files}
    if unread:
        refuse_damaged_result(warehouse, checkpoint, progress)
    taken = _take(warehouse, checkpoint, unread, progress) if unread else {}
    digests = {
        t.name: taken.get(t.name) or Segments(COARSE_ELEMS, files[t.name]).content
        for t in checkpoint.tensors
    }
    catalog.put_digests(checkpoint.checkpoint_id, digests)
    verify_place(warehouse, checkpoint, progress)  # they may have changed while they were read
    return digests


def verify_place(
    warehouse: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Make sure that what is known of a checkpoint is known of the files that lie there now.

    Files at a place where they were not read yet are read once, all of them. Where nothing is known
    there is nothing to compare with: it is learned here, and nowhere else at the same time. Raises
    CorruptionError for another model with the same id, or a damaged one.
    """
    place = place_of(warehouse, checkpoint)
    places = Places(warehouse, checkpoint.checkpoint_id)
    if place is None or place in places:
        return
    is_known = bool(_known(warehouse, checkpoint))
    if not is_known and places.claim(place, checkpoint.root):
        return
    first = places.first()
    if not is_known and first is not None and first.place != place:
        other = replace(checkpoint, root=first.root)
        if place_of(warehouse, other) == first.place:
            ensure_digests(warehouse, other, progress)
    refuse_changed_tensors(warehouse, checkpoint, progress)
    if place_of(warehouse, checkpoint) == place:
        places.add(place, checkpoint.root)


def _known(warehouse: Warehouse, checkpoint: Checkpoint) -> Mapping[str, str]:
    """The digests of a checkpoint's tensors: of those that an analysis got to, if it was killed."""
    digests = warehouse.catalog.digests(checkpoint.checkpoint_id)
    if digests is not None:
        return digests
    files = SegmentFiles(warehouse.catalog_dir, checkpoint.checkpoint_id, COARSE_ELEMS)
    names = (t.name for t in checkpoint.tensors if t.name in files)
    return {name: Segments(COARSE_ELEMS, files[name]).content for name in names}


def refuse_damaged_result(
    warehouse: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Raise CorruptionError for a snapshot of the warehouse that is not what was merged.

    Its manifest is all that knows it before it is read as an input for the first time, which may
    be in several passes: a process checks it before the first of them.
    """
    folder, checked = Path(checkpoint.root), (checkpoint.root, checkpoint.stamp)
    if folder.parent != warehouse.snapshots or checked in _CHECKED:
        return
    if warehouse.catalog.digests(checkpoint.checkpoint_id) is None:
        verify_with_progress(load_snapshot(warehouse.snapshots, folder.name), progress)
        _CHECKED.add(checked)


def refuse_changed_tensors(
    warehouse: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Read all of a checkpoint. Raises CorruptionError for a tensor that is not what is known.

    Afterwards all its digests are known.
    """
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    known, catalog = _known(warehouse, checkpoint), warehouse.catalog
    with (progress or Silent()).task(f"verify {checkpoint.name}", checkpoint.nbytes) as advance:
        taken = digest_checkpoint(checkpoint, advance)
    for name, (segments,) in taken.items():
        if known.get(name, segments.content) != segments.content:
            elements = wrong_elements(warehouse, checkpoint, name, segments)
            error = _changed(checkpoint, name, known[name], segments.content, elements)
            first = Places(warehouse, checkpoint.checkpoint_id).first()
            if first is not None and first.root != checkpoint.root:
                error.expected = f"{error.expected}, as it was read at {first.root}"
            raise error
    if catalog.digests(checkpoint.checkpoint_id) is None:
        put_taken(warehouse, checkpoint.checkpoint_id, taken)
        digests = {name: segments.content for name, (segments,) in taken.items()}
        catalog.put_digests(checkpoint.checkpoint_id, digests)


def wrong_elements(
    warehouse: Warehouse, checkpoint: Checkpoint, tensor: str, segments: Segments
) -> str:
    """Which elements of a tensor are not what they were, where the catalog knows it."""
    n = segments.segment_elems
    recorded = SegmentFiles(warehouse.catalog_dir, checkpoint.checkpoint_id, n)
    if tensor not in recorded:
        return ""
    old = Segments(n, recorded[tensor])
    count = len(segments.digests) // SEGMENT_DIGEST_NBYTES
    wrong = [i for i in range(count) if segments.of(i, i + 1) != old.of(i, i + 1)]
    stop = min((wrong[-1] + 1) * n, checkpoint.by_name[tensor].numel) if wrong else 0
    return f", elements {wrong[0] * n} to {stop}" if wrong else ""


def content_of(catalog: Catalog, checkpoint: Checkpoint) -> str:
    """The digest of all tensors and of what gives them their meaning, as an adapter's scale.

    Raises NotFoundError if the tensors' digests are not known.
    """
    tensors = catalog.content_sha256(checkpoint.checkpoint_id)
    if checkpoint.kind == "full":
        return tensors
    return digest_json([tensors, checkpoint.kind, checkpoint.adapter_config])


def _take(
    warehouse: Warehouse, checkpoint: Checkpoint, names: Collection[str], progress: Progress | None
) -> dict[str, str]:
    """Read tensors, store their segments, and give their digests."""
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    nbytes = sum(t.nbytes for t in checkpoint.tensors if t.name in names)
    with (progress or Silent()).task(f"digest {checkpoint.name}", nbytes) as advance:
        levels = levels_for(BlockGrid.for_numel(checkpoint.numel).block_elems)
        taken = digest_checkpoint(checkpoint, advance, levels=levels, names=names)
    put_taken(warehouse, checkpoint.checkpoint_id, taken)
    return {name: segments.content for name, (segments, *_) in taken.items()}


def put_taken(
    warehouse: Warehouse, checkpoint_id: str, taken: Mapping[str, tuple[Segments, ...]]
) -> None:
    """Store the segments of tensors, all levels."""
    by_level: dict[int, dict[str, bytes]] = {}
    for name, levels in taken.items():
        for segments in levels:
            by_level.setdefault(segments.segment_elems, {})[name] = segments.digests
    for segment_elems, digests in by_level.items():
        put_segments(warehouse.catalog_dir, checkpoint_id, segment_elems, digests)


def take_segments(
    warehouse: Warehouse,
    identified: Known,
    segment_elems: int,
    names: Collection[str],
) -> None:
    """Take the segments of some tensors of a checkpoint from its files, and store them.

    Raises CorruptionError if the files hold other bytes than were analysed.
    """
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    checkpoint_id, checkpoint = identified
    levels = tuple(dict.fromkeys((COARSE_ELEMS, segment_elems)))
    taken = digest_checkpoint(checkpoint, levels=levels, names=names)
    contents = Contents(warehouse)
    for name, (segments, *_) in taken.items():
        contents.refuse_changed(identified, name, segments.content)
    put_taken(warehouse, checkpoint_id, taken)


class Contents:
    """What the tensors of checkpoints held before; the catalog is asked once for a checkpoint."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._catalog = warehouse.catalog
        self._digests: dict[str, Mapping[str, str]] = {}

    def refuse_changed(self, identified: Known, tensor: str, content: str) -> None:
        """Raise CorruptionError if a tensor that was read has other content than it had before."""
        digests = self._digests.get(identified.checkpoint_id)
        if digests is None:
            digests = self._catalog.digests(identified.checkpoint_id) or {}
            self._digests[identified.checkpoint_id] = digests
        if digests.get(tensor, content) != content:
            raise _changed(identified.checkpoint, tensor, digests[tensor], content)


def _changed(
    checkpoint: Checkpoint, tensor: str, known: str, content: str, elements: str = ""
) -> CorruptionError:
    return CorruptionError(
        "An input's bytes are not those that were analysed",
        where=f"{checkpoint.root}, tensor {tensor}{elements}",
        expected=f"content {known[:16]}",
        found=f"{content[:16]}, in a file of the same size and time",
        next_step="if the file is damaged, copy it again; if it is another model, or the change "
        "is meant, give it a time of its own: `touch` it, or merge a copy that `cp -r` makes",
    )
