"""What is known of a checkpoint's contents, and whether the files that lie there now hold it.

A tensor's digest tells what it holds, whatever it is called. Its segments have digests too, with
which `input_segments` compares what is read later. `Contents.verify` is the one way to what else is
known of a checkpoint: whoever takes something over by its id asks there first whether these are the
files of which it is known.

Names, sizes, times, headers and samples give a checkpoint its id, and another model may have the
same: container layers, Nix and `tar --mtime` give all files one time. What the catalog knows of an
id is therefore believed of files at a place alone at which they were read for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.contents import refuse_changed
from mergepipe_pipeline.catalog.places import PlaceFiles
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.segments import Segments, levels_for
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import verify_with_progress
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.warehouse import Warehouse

#: Root and stamp of the snapshots that this process has checked.
_CHECKED = set[tuple[str, str]]()


class Contents:
    """The contents of a checkpoint's tensors, as known of the files that lie there now."""

    def __init__(
        self, warehouse: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> None:
        self._warehouse, self._checkpoint = warehouse, checkpoint
        self._progress = progress or Silent()
        self._files = warehouse.catalog.contents(checkpoint.checkpoint_id)
        self.places = PlaceFiles(
            warehouse.catalog_dir, warehouse.roots, warehouse.snapshots, checkpoint.checkpoint_id
        )

    def learn(self) -> Mapping[str, str]:
        """Return the digest of every tensor, from the catalog or by one pass over them.

        Only tensors whose segments are not known are read. Raises CorruptionError as `verify`.
        """
        from mergepipe_pipeline.analysis.digests import digest_checkpoint

        self.verify()
        if (stored := self._files.all_known()) is not None:
            return stored
        checkpoint, known = self._checkpoint, self._files.known()
        unread = {t.name: t.nbytes for t in checkpoint.tensors if t.name not in known}
        taken: dict[str, tuple[Segments, ...]] = {}
        if unread:
            levels = levels_for(BlockGrid.for_numel(checkpoint.numel).block_elems)
            with self._progress.task(f"digest {checkpoint.name}", sum(unread.values())) as advance:
                taken = digest_checkpoint(checkpoint, advance, levels=levels, names=unread)
        self._files.put(taken, checkpoint.by_name)
        self.verify()  # they may have changed while they were read
        return {**known, **{name: levels[0].content for name, levels in taken.items()}}

    def verify(self) -> None:
        """Make sure that what is known of the checkpoint is known of the files that lie there now.

        Files at a place where they were not read yet are read once, all of them. Where nothing is
        known there is nothing to compare with: it is learned here, and nowhere else at the same
        time. Raises CorruptionError for another model with the same id, or a damaged one.
        """
        self._verify_result()
        checkpoint, places = self._checkpoint, self.places
        place = places.place_of(checkpoint)
        if place is None or place in places:
            return
        is_known = bool(self._files.known())
        if not is_known and places.claim(place, checkpoint.root):
            return
        first = places.first()
        if not is_known and first is not None and first.place != place:
            other = replace(checkpoint, root=first.root)
            if places.place_of(other) == first.place:
                Contents(self._warehouse, other, self._progress).learn()
        self.verify_tensors()
        if places.place_of(checkpoint) == place:
            places.add(place, checkpoint.root)

    def _verify_result(self) -> None:
        """Raise CorruptionError for a snapshot of the warehouse that is not what was merged.

        Its manifest is all that knows it before it is read as an input for the first time, which
        may be in several passes: a process checks it before the first of them.
        """
        checkpoint, snapshots = self._checkpoint, self._warehouse.snapshots
        folder, checked = Path(checkpoint.root), (checkpoint.root, checkpoint.stamp)
        if (
            folder.parent == snapshots
            and checked not in _CHECKED
            and self._files.all_known() is None
        ):
            verify_with_progress(load_snapshot(snapshots, folder.name), self._progress)
            _CHECKED.add(checked)

    def verify_tensors(self) -> None:
        """Read all of the checkpoint. Raises CorruptionError for a tensor that is not as known.

        Afterwards all its digests are known.
        """
        from mergepipe_pipeline.analysis.digests import digest_checkpoint

        checkpoint = self._checkpoint
        with self._progress.task(f"verify {checkpoint.name}", checkpoint.nbytes) as advance:
            taken = digest_checkpoint(checkpoint, advance)
        known = self._files.known()
        for name, (segments,) in taken.items():
            try:
                refuse_changed(known, checkpoint, name, segments.content)
            except CorruptionError as error:
                elements = self._files.wrong_elements(checkpoint.by_name[name], segments)
                error.where = f"{error.where}{elements}"
                first = self.places.first()
                if first is not None and first.root != checkpoint.root:
                    error.expected = f"{error.expected}, as it was read at {first.root}"
                raise
        if self._files.all_known() is None:
            self._files.put(taken, checkpoint.by_name)


def content_of(catalog: Catalog, checkpoint: Checkpoint) -> str:
    """The digest of all tensors and of what gives them their meaning, as an adapter's scale.

    Raises NotFoundError if the tensors' digests are not known.
    """
    tensors = catalog.content_sha256(checkpoint.checkpoint_id)
    if checkpoint.kind == "full":
        return tensors
    return digest_json([tensors, checkpoint.kind, checkpoint.adapter_config])
