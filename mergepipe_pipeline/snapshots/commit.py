"""From a staged folder to a snapshot: built with the manifest last, verified, and one rename.

Verification hashes every byte again and names the file and tensor that is wrong. Committing the
same result twice succeeds.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.header import LENGTH_NBYTES, header_nbytes, parse_header
from mergepipe_pipeline.digest import digest_json, new_hash, seal, sha256_hex, unseal
from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.plan import ENGINE_VERSION
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Manifest, ShardEntry, Snapshot
from mergepipe_pipeline.errors import CheckpointError, CorruptionError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.snapshots.find import files_below, load_snapshot, read_manifest
from mergepipe_pipeline.snapshots.model_folder import RECIPE_FILE, has_own_card
from mergepipe_pipeline.snapshots.stores import ObjectStore
from mergepipe_pipeline.storage.atomic import (
    adopt_file,
    link_file,
    publish_dir,
    replace_dir,
    write_atomic,
)
from mergepipe_pipeline.storage.side_files import CARD
from mergepipe_pipeline.text import now

_CHUNK_NBYTES = 1 << 22
_AGAIN = "merge its recipe again: the snapshot is made anew, and the damaged one is set aside"
#: Seconds for which bytes that were read count as still the same.
_TRUSTED_S = 3600.0


#: Nanoseconds in which a file may change twice with one time of its file system.
_TICK_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Verification:
    """A snapshot that was checked and found right."""

    snapshot_id: str
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Shards, by their digests, of which every byte was right when it was read, after `at_ns`."""

    digests: frozenset[str] = frozenset()
    at_ns: int = 0

    def trusts(self, path: Path, shard: ShardEntry) -> bool:
        """Whether a shard's file was read not long ago and nothing was done to it since."""
        stat = present(path).stat()
        return (
            shard.sha256 in self.digests
            and stat.st_size == shard.nbytes
            and max(stat.st_mtime_ns, stat.st_ctime_ns) <= self.at_ns
            and time.time_ns() - self.at_ns < _TRUSTED_S * 1e9
        )


_NOTHING = Checked()


def verify_snapshot(
    folder: Path,
    progress: Callable[[int], None] | None = None,
    *,
    checked: Checked = _NOTHING,
    is_copy: bool = False,
) -> Verification:
    """Check manifest, provenance, side files and every shard.

    A copy (`is_copy`), as `--out` writes one, has a name of its own, and may have the recipe beside
    its files and measurements in its card.
    Shards that were `checked` a moment ago are not read again. Raises CorruptionError with the file
    and, inside a shard, the first tensor whose bytes are wrong; also for files that are missing or
    that the manifest does not know.
    """
    manifest = read_manifest(folder)
    if folder.name != manifest.snapshot_id and not is_copy:
        raise wrong_bytes(folder / MANIFEST, folder.name, manifest.snapshot_id)
    provenance = present(folder / PROVENANCE).read_bytes()
    record = unseal(provenance, str(folder / PROVENANCE))
    added = {RECIPE_FILE: str(record.get("recipe", "")).encode()} if is_copy else {}
    names = {
        MANIFEST,
        PROVENANCE,
        *(s.file for s in manifest.shards),
        *(f.file for f in manifest.side_files),
        *added,
    }
    for error in unexpected_files(folder, names):
        raise error
    nbytes = len(provenance) + (folder / MANIFEST).stat().st_size
    for name, data in added.items():
        if (folder / name).is_file():
            nbytes += check_side(folder / name, sha256_hex(data))
    for side in manifest.side_files:
        is_own = is_copy and side.file == CARD and has_own_card(record)
        nbytes += check_side(folder / side.file, None if is_own else side.sha256)
    for shard in manifest.shards:
        if not checked.trusts(folder / shard.file, shard):
            verify_shard(folder / shard.file, shard, progress)
        nbytes += shard.nbytes
    return Verification(manifest.snapshot_id, len(names - added.keys()), nbytes)


def files_state(folder: Path, manifest: Manifest, since_ns: int) -> str | None:
    """32 hexadecimal characters that change with any touch of a snapshot's shards.

    They are made of sizes, inodes and times, of which nobody can set one (ctime). None where a
    shard is not there, or was touched after `since_ns` or so short ago that another change may have
    the same time.
    """
    try:
        stats = [(folder / shard.file).stat() for shard in manifest.shards]
    except OSError:
        return None
    touched_ns = max((s.st_ctime_ns for s in stats), default=0)
    if touched_ns > min(since_ns, time.time_ns() - _TICK_NS):
        return None
    seen = [(s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for s in stats]
    return digest_json([[shard.sha256 for shard in manifest.shards], seen])[:32]


def unexpected_files(folder: Path, names: Collection[str]) -> Iterator[CorruptionError]:
    """The error about each file of a snapshot's folder that is not among its `names`."""
    for name in sorted(files_below(folder, names).difference(names)):
        yield CorruptionError(
            "A file does not belong to the snapshot",
            where=str(folder / name),
            expected="only what the manifest names",
            found=name,
            next_step="remove the file",
        )


def verify_with_progress(
    snapshot: Snapshot, progress: Progress | None, *, is_copy: bool = False
) -> Verification:
    """Do as `verify_snapshot`, with a task of the progress that counts the bytes of shards."""
    total = sum(s.nbytes for s in snapshot.manifest.shards)
    with (progress or Silent()).task(f"verify {snapshot.snapshot_id[:12]}", total) as advance:
        return verify_snapshot(Path(snapshot.path), advance, is_copy=is_copy)


def check_side(path: Path, sha256: str | None) -> int:
    """The size of a file that must be there, with this digest if there is one.

    Raises CorruptionError.
    """
    data = present(path).read_bytes()
    if sha256 not in (None, digest := sha256_hex(data)):
        raise wrong_bytes(path, str(sha256), digest)
    return len(data)


def verify_shard(
    path: Path,
    shard: ShardEntry | StoredObject,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Check every byte of a file that should be this shard. Raises CorruptionError (tensor)."""
    nbytes = present(path).stat().st_size
    if nbytes != shard.nbytes:
        raise CorruptionError(
            "A shard has the wrong length",
            where=str(path),
            expected=f"{shard.nbytes} bytes",
            found=f"{nbytes} bytes",
            next_step=_AGAIN,
        )
    running = new_hash()
    with path.open("rb") as file:
        for tensor, end, expected in _ends(path, shard):
            while (at := file.tell()) < end:
                chunk = file.read(min(_CHUNK_NBYTES, end - at))
                if not chunk:
                    break
                running.update(chunk)
                if progress:
                    progress(len(chunk))
            if running.hexdigest() != expected:
                raise CorruptionError(
                    "A shard's bytes are not the bytes that were written",
                    where=f"{path}, {tensor}",
                    expected=f"sha256 {expected[:16]}",
                    found=f"sha256 {running.hexdigest()[:16]}",
                    next_step=_AGAIN,
                )


def _ends(path: Path, shard: ShardEntry | StoredObject) -> list[tuple[str, int, str]]:
    """(what, end byte, expected digest up to it), in file order; ends with the whole file."""
    with path.open("rb") as file:
        try:
            raw = file.read(header_nbytes(file.read(LENGTH_NBYTES), shard.nbytes, str(path)))
            entries = {e.name: e for e in parse_header(raw, shard.nbytes, str(path))[0]}
            ends = [
                (f"tensor {name}", entries[name].start_byte + entries[name].nbytes, digest)
                for name, digest in shard.tensors
            ]
        except (CheckpointError, KeyError) as error:
            raise CorruptionError(
                "A shard's header is not the one that was written",
                where=f"{path}, header",
                found=str(error),
                next_step=_AGAIN,
            ) from error
    return [*ends, ("whole file", shard.nbytes, shard.sha256)]


def present(path: Path) -> Path:
    """A path of a snapshot, if a file is there. Raises CorruptionError."""
    if not path.is_file():
        raise CorruptionError(
            "A file of a snapshot is missing",
            where=str(path),
            expected=path.name,
            found="no such file",
            next_step=_AGAIN,
        )
    return path


def wrong_bytes(path: Path, expected: str, found: str) -> CorruptionError:
    """The error that a file of a snapshot has another digest."""
    return CorruptionError(
        "A file's bytes are not the bytes that were written",
        where=str(path),
        expected=f"sha256 {expected[:16]}",
        found=f"sha256 {found[:16]}",
        next_step=_AGAIN,
    )


def made_here() -> dict[str, Any]:
    """The part of every provenance: by what, when and where it is made, which no id covers."""
    return {
        "engine_version": ENGINE_VERSION,
        "created": now(),
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in ("mergepipe-pipeline", "torch", "numpy")},
    }


def stage_snapshot(
    staging: Path,
    manifest: Manifest,
    objects: ObjectStore,
    side_files: Mapping[str, bytes | Path],
    provenance: dict[str, Any],
) -> Path:
    """The folder `staging/<snapshot_id>`: hard-linked shards, side files, provenance, manifest.

    A side file is its bytes, or a file in staging, which is moved.
    Raises StorageFullError; FileNotFoundError if an object of the manifest is not in the store.
    """
    folder = staging / manifest.snapshot_id
    folder.mkdir(parents=True)
    for shard in manifest.shards:
        link_file(objects.path_of(shard.sha256), folder / shard.file)
    for name, data in side_files.items():
        if isinstance(data, bytes):
            write_atomic(folder / name, data)
        else:
            adopt_file(data, folder / name)
    write_atomic(folder / PROVENANCE, seal(provenance))
    write_atomic(folder / MANIFEST, seal(manifest.to_json()))
    return folder


_LOG = logging.getLogger("mergepipe")


def commit_snapshot(
    staged: Path, snapshots: Path, new_aside: Callable[[], Path] | None = None
) -> Snapshot:
    """The snapshot of a staged folder, which is named by its id.

    Of a snapshot that exists already every byte is read. If it is whole, it is returned; if it is
    damaged, it moves to the folder that `new_aside` makes, and the staged one takes its place:
    readers see the one or the other. Without `new_aside` it raises CorruptionError.
    """
    final = snapshots / staged.name
    if (final.exists() or not publish_dir(staged, final)) and (damage := damage_of(final)):
        if new_aside is None:
            raise damage
        aside = new_aside() / "snapshots" / final.name
        publish_dir(staged, aside)
        replace_dir(aside, final)
        damage.next_step = None  # it is done
        _LOG.warning("A damaged snapshot was made anew; it lies in %s. %s", aside, damage)
    return load_snapshot(snapshots, staged.name)


def damage_of(
    folder: Path, *, checked: Checked = _NOTHING, is_copy: bool = False
) -> CorruptionError | None:
    """The first damage of a snapshot or a copy; None without any.

    Every byte is read, but of shards that were `checked`.
    """
    try:
        verify_snapshot(folder, checked=checked, is_copy=is_copy)
    except CorruptionError as error:
        return error
    return None
