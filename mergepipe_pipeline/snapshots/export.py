"""Copies a snapshot out into a plain model folder that its owner may edit."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from glob import escape
from pathlib import Path

from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.snapshots.load import read_manifest
from mergepipe_pipeline.spec.snapshot import Snapshot
from mergepipe_pipeline.storage.atomic import copy_file, publish_dir, remove_tree, write_atomic


def check_out(out: Path) -> None:
    """Refuse an output folder that holds something else, before any work is done."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or _snapshot_in(out))):
        raise MergePipeError(
            "The output folder is not empty",
            where=str(out),
            expected="no such folder, an empty one, or one written by mergepipe",
            found="other files",
            next_step="choose another --out, or empty the folder",
        )


def export_snapshot(snapshot: Snapshot, out: Path, extra: Mapping[str, bytes]) -> None:
    """Make `out` a copy of the snapshot plus `extra` files, by one rename at the end.

    A folder that holds this snapshot already is left as it is; one that holds another snapshot is
    refused, like any other content, with MergePipeError. Raises StorageFullError.
    """
    check_out(out)
    existing = _snapshot_in(out)
    if existing == snapshot.snapshot_id:
        return
    if existing is not None:
        raise MergePipeError(
            "The output folder holds another snapshot",
            where=str(out),
            expected=snapshot.snapshot_id,
            found=existing,
            next_step="choose another --out, or remove the folder",
        )
    with _staging_beside(out) as staged:
        for file in sorted(Path(snapshot.path).iterdir()):
            copy_file(file, staged / file.name)
        for name, data in extra.items():
            write_atomic(staged / name, data)
        if not publish_dir(staged, out):
            check_out(out)


@contextmanager
def _staging_beside(out: Path) -> Iterator[Path]:
    """A fresh folder beside `out`, gone afterwards; those of killed exports to `out` go first.

    An export that lives holds a lock on its folder, which the system takes from one that is killed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    with ExitStack() as ours:
        with _lock(out.parent, wait=True):  # none is seen between its making and its locking
            for old in out.parent.glob(f".{escape(out.name)}.????????.tmp/"):
                with _lock(old, wait=False) as is_dead:
                    if is_dead:
                        remove_tree(old)
            staged.mkdir()
            ours.enter_context(_lock(staged, wait=False))
        try:
            yield staged
        finally:
            remove_tree(staged)


@contextmanager
def _lock(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a folder; False if another does, it is gone, or the system has no locks."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except OSError:
            locked = False
        yield locked


def _snapshot_in(out: Path) -> str | None:
    try:
        return read_manifest(out).snapshot_id
    except CorruptionError:
        return None
