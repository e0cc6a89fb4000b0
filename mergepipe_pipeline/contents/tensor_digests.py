"""The digest of every tensor of a checkpoint: what it holds, whatever it is called.

The segments of a tensor have digests too, with which `input_segments` compares what is read later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.segment_files import SegmentFiles, put_segments
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.checks import verify_with_progress
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.segments import COARSE_ELEMS, Segments, levels_for
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
    return digests


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
    """Read all of a checkpoint. Raises CorruptionError for a tensor that is not what is known."""
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    ensure_digests(warehouse, checkpoint, progress)
    with (progress or Silent()).task(f"verify {checkpoint.name}", checkpoint.nbytes) as advance:
        taken = digest_checkpoint(checkpoint, advance)
    contents, identified = Contents(warehouse), Known(checkpoint.checkpoint_id, checkpoint)
    for name, (segments,) in taken.items():
        contents.refuse_changed(identified, name, segments.content)


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
            raise CorruptionError(
                "An input's bytes are not those that were analysed",
                where=f"{identified.checkpoint.root}, tensor {tensor}",
                expected=f"content {digests[tensor][:16]}",
                found=f"{content[:16]}, in a file of the same size and time",
                next_step="copy the file again; if the change is meant, `touch` it, so that it is "
                "analysed anew",
            )
