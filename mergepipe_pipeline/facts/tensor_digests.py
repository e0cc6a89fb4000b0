"""The digest of every tensor of a checkpoint: what it holds, whatever it is called.

The segments of a tensor have digests too, with which `input_segments` compares what is read later.
`verify_place` is the one way to what else is known of a checkpoint: whoever takes something over
by its id asks there first whether these are the files of which it is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.digest import SEGMENT_DIGEST_NBYTES, digest_json
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, Segments, levels_for
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.facts.places import Places, place_of
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import verify_with_progress
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.warehouse import Warehouse

#: Root and stamp of the snapshots that this process has checked.
_CHECKED = set[tuple[str, str]]()


def ensure_digests(
    warehouse: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> Mapping[str, str]:
    """The digest of every tensor of a checkpoint, from the catalog or by one pass over it.

    Only tensors whose segments are not known are read. Raises CorruptionError as
    `refuse_damaged_result`.
    """
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    verify_place(warehouse, checkpoint, progress)
    files = warehouse.catalog.contents(checkpoint.checkpoint_id)
    if (stored := files.digests()) is not None:
        return stored
    unread = [t for t in checkpoint.tensors if t.name not in files.known()]
    taken: dict[str, tuple[Segments, ...]] = {}
    if unread:
        refuse_damaged_result(warehouse, checkpoint, progress)
        levels = levels_for(BlockGrid.for_numel(checkpoint.numel).block_elems)
        nbytes = sum(t.nbytes for t in unread)
        with (progress or Silent()).task(f"digest {checkpoint.name}", nbytes) as advance:
            names = {t.name for t in unread}
            taken = digest_checkpoint(checkpoint, advance, levels=levels, names=names)
    files.put(taken, checkpoint.by_name)
    verify_place(warehouse, checkpoint, progress)  # they may have changed while they were read
    return files.known()


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
    is_known = bool(warehouse.catalog.contents(checkpoint.checkpoint_id).known())
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

    files = warehouse.catalog.contents(checkpoint.checkpoint_id)
    known = files.known()
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
    if files.digests() is None:
        files.put(taken, checkpoint.by_name)


def wrong_elements(
    warehouse: Warehouse, checkpoint: Checkpoint, tensor: str, segments: Segments
) -> str:
    """Which elements of a tensor are not what they were, where the catalog knows it."""
    n = segments.segment_elems
    recorded = warehouse.catalog.contents(checkpoint.checkpoint_id).segments(n)
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


def take_segments(
    warehouse: Warehouse,
    checkpoint: Checkpoint,
    checkpoint_id: str,
    segment_elems: int,
    names: Collection[str],
) -> None:
    """Take the segments of some tensors from files that are known by an id, and store them.

    Raises CorruptionError if the files hold other bytes than were analysed.
    """
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    levels = tuple(dict.fromkeys((COARSE_ELEMS, segment_elems)))
    taken = digest_checkpoint(checkpoint, levels=levels, names=names)
    files = warehouse.catalog.contents(checkpoint_id)
    known = files.known()
    for name, (segments, *_) in taken.items():
        refuse_changed(known, checkpoint, name, segments.content)
    files.put(taken)


def refuse_changed(
    known: Mapping[str, str], checkpoint: Checkpoint, tensor: str, content: str
) -> None:
    """Raise CorruptionError if a tensor that was read has other content than is known."""
    if known.get(tensor, content) != content:
        raise _changed(checkpoint, tensor, known[tensor], content)


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
