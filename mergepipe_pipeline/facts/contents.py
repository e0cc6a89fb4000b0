"""What is known of a checkpoint's contents, and at which places its files are known to hold them.

A tensor's digest tells what it holds, whatever it is called. Its segments have digests too, with
which `input_segments` compares what is read later. `Contents.verify` is the one way to what else is
known of a checkpoint: whoever takes something over by its id asks there first whether these are the
files of which it is known.

Names, sizes, times, headers and samples give a checkpoint its id, and another model may have the
same: container layers, Nix and `tar --mtime` give all files one time. What the catalog knows of an
id is therefore believed of files at a place alone at which they were read for it.

A place is, of every file: its path, its inode, the time of its last change that nobody can set
(ctime), and its file system. Of that the id that `statvfs` tells, which comes from the volume: the
number in `stat` is that of a mount, another one on another host and, of NFS, overlays and btrfs,
after each. Where a file system tells none (0, as NFS), the other three decide. A link of the hub's
cache stands for its blob, so that revisions share what they share. The files of a snapshot here
are shared with other snapshots, whose links change ctime: its own folder is its place, named by
what was merged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.formats import PLACES
from mergepipe_pipeline.digest import SEGMENT_DIGEST_NBYTES, digest_json, seal, unseal
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.segments import Segments, levels_for
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.commit import verify_with_progress
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.storage.atomic import READ_ONLY, create_exclusive, write_atomic
from mergepipe_pipeline.warehouse import Warehouse

_FIRST = "first.json"
#: What a warehouse that may only be read could not remember: its root, the id, the place.
_UNWRITTEN = set[tuple[Path, str, str]]()


class First(NamedTuple):
    """The place at which something was learned of a checkpoint first, and its folder."""

    place: str
    root: str


def place_of(warehouse: Warehouse, checkpoint: Checkpoint) -> str | None:
    """32 hexadecimal characters that tell where a checkpoint's files lie, and in which state.

    None for what has no place: files at an address, or other ones than the checkpoint's.
    """
    if "://" in checkpoint.root:
        return None
    root = Path(checkpoint.root)
    recorded = warehouse.roots.recorded
    folder, is_file = recorded(checkpoint.root), root.is_file()
    is_own = root.parent == warehouse.snapshots
    systems: dict[int, int] = {}
    files: list[tuple[str, int, int, int]] = []
    for entry in checkpoint.files:
        path = root if is_file else root / entry.path
        try:
            stat = path.stat()
            if stat.st_dev not in systems:
                systems[stat.st_dev] = os.statvfs(path).f_fsid
            is_link = path.is_symlink()
        except OSError:
            return None
        if (stat.st_size, stat.st_mtime_ns) != (entry.nbytes, entry.mtime_ns):
            return None
        name = recorded(os.path.realpath(path)) if is_link else f"{folder}/{entry.path}"
        changed_ns = 0 if is_own else stat.st_ctime_ns
        files.append((name, stat.st_ino, changed_ns, systems[stat.st_dev]))
    return digest_json(files)[:32]


def read_place(path: Path) -> First:
    """Read a record of a place. Raises CorruptionError if it is not what was written there."""
    value = unseal(path.read_bytes(), str(path))
    named = {"checkpoint_id": path.parent.name}
    if path.name != _FIRST:
        named["place"] = path.stem
    for key, name in named.items():
        if value.get(key) != name:
            raise CorruptionError(
                "A record of a place is not that of its name",
                where=str(path),
                expected=f"{key} {name}",
                found=str(value.get(key)),
                next_step="delete the file; the inputs are read once more where they are needed",
            )
    return First(str(value["place"]), str(value["root"]))


class Places:
    """The places of one checkpoint's id. Each is a file, there or not; nothing is changed in one.

    The first one is claimed before anything is learned there, so that of two models with one id
    that are analysed at the same time the second one knows whom to be compared with.
    """

    def __init__(self, warehouse: Warehouse, checkpoint_id: str) -> None:
        self._warehouse, self._id = warehouse, checkpoint_id
        self._folder = warehouse.catalog_dir / PLACES / checkpoint_id

    def __contains__(self, place: str) -> bool:
        return self._path(place).exists() or (self._warehouse.root, self._id, place) in _UNWRITTEN

    def claim(self, place: str, root: str) -> bool:
        """Make this the first place; False if another one is."""
        try:
            with suppress(FileExistsError):
                create_exclusive(self._folder / _FIRST, self._record(place, root))
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            return not (self._folder / _FIRST).exists()
        first = self.first()
        if first is None or first.place != place:
            return False
        self.add(place, root)
        return True

    def add(self, place: str, root: str) -> None:
        """Remember that the files at a place agree with what is known."""
        try:
            write_atomic(self._path(place), self._record(place, root))
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            _UNWRITTEN.add((self._warehouse.root, self._id, place))

    def first(self) -> First | None:
        """The first place; None if there is none, or its record is damaged."""
        with suppress(FileNotFoundError, CorruptionError):
            first = read_place(self._folder / _FIRST)
            return First(first.place, self._warehouse.roots.here(first.root))
        return None

    def _record(self, place: str, root: str) -> bytes:
        root = self._warehouse.roots.recorded(root)
        return seal({"checkpoint_id": self._id, "place": place, "root": root})

    def _path(self, place: str) -> Path:
        return self._folder / f"{place}.json"


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
        self._places = Places(warehouse, checkpoint.checkpoint_id)

    def learn(self) -> Mapping[str, str]:
        """Return the digest of every tensor, from the catalog or by one pass over them.

        Only tensors whose segments are not known are read. Raises CorruptionError as
        `verify_result`.
        """
        from mergepipe_pipeline.analysis.digests import digest_checkpoint

        self.verify()
        if (stored := self._files.all_known()) is not None:
            return stored
        checkpoint, known = self._checkpoint, self._files.known()
        unread = {t.name: t.nbytes for t in checkpoint.tensors if t.name not in known}
        taken: dict[str, tuple[Segments, ...]] = {}
        if unread:
            self.verify_result()
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
        checkpoint, places = self._checkpoint, self._places
        place = place_of(self._warehouse, checkpoint)
        if place is None or place in places:
            return
        is_known = bool(self._files.known())
        if not is_known and places.claim(place, checkpoint.root):
            return
        first = places.first()
        if not is_known and first is not None and first.place != place:
            other = replace(checkpoint, root=first.root)
            if place_of(self._warehouse, other) == first.place:
                Contents(self._warehouse, other, self._progress).learn()
        self.verify_tensors()
        if place_of(self._warehouse, checkpoint) == place:
            places.add(place, checkpoint.root)

    def verify_result(self) -> None:
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

        checkpoint, known = self._checkpoint, self._files.known()
        with self._progress.task(f"verify {checkpoint.name}", checkpoint.nbytes) as advance:
            taken = digest_checkpoint(checkpoint, advance)
        for name, (segments,) in taken.items():
            if known.get(name, segments.content) != segments.content:
                error = _changed(checkpoint, name, known[name], segments.content)
                error.where = f"{error.where}{self.wrong_elements(name, segments)}"
                first = self._places.first()
                if first is not None and first.root != checkpoint.root:
                    error.expected = f"{error.expected}, as it was read at {first.root}"
                raise error
        if self._files.all_known() is None:
            self._files.put(taken, checkpoint.by_name)

    def wrong_elements(self, tensor: str, segments: Segments) -> str:
        """Say which elements of a tensor are not what they were, where the catalog knows it."""
        n = segments.segment_elems
        recorded = self._files.segments(n)
        if tensor not in recorded:
            return ""
        old = Segments(n, recorded[tensor])
        count = len(segments.digests) // SEGMENT_DIGEST_NBYTES
        wrong = [i for i in range(count) if segments.of(i, i + 1) != old.of(i, i + 1)]
        if not wrong:
            return ""
        stop = min((wrong[-1] + 1) * n, self._checkpoint.by_name[tensor].numel)
        return f", elements {wrong[0] * n} to {stop}"


def content_of(catalog: Catalog, checkpoint: Checkpoint) -> str:
    """The digest of all tensors and of what gives them their meaning, as an adapter's scale.

    Raises NotFoundError if the tensors' digests are not known.
    """
    tensors = catalog.content_sha256(checkpoint.checkpoint_id)
    if checkpoint.kind == "full":
        return tensors
    return digest_json([tensors, checkpoint.kind, checkpoint.adapter_config])


def refuse_changed(
    known: Mapping[str, str], checkpoint: Checkpoint, tensor: str, content: str
) -> None:
    """Raise CorruptionError if a tensor that was read has other content than is known."""
    if known.get(tensor, content) != content:
        raise _changed(checkpoint, tensor, known[tensor], content)


def _changed(checkpoint: Checkpoint, tensor: str, known: str, content: str) -> CorruptionError:
    return CorruptionError(
        "An input's bytes are not those that were analysed",
        where=f"{checkpoint.root}, tensor {tensor}",
        expected=f"content {known[:16]}",
        found=f"{content[:16]}, in a file of the same size and time",
        next_step="if the file is damaged, copy it again; if it is another model, or the change "
        "is meant, give it a time of its own: `touch` it, or merge a copy that `cp -r` makes",
    )
