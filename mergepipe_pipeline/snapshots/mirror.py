"""The copy of a warehouse's results in a bucket, which warehouses of several machines share.

The layout is that of a warehouse: objects and actions by digest and key, a folder of each snapshot
(without its shards, which are objects), and chains of versions of refs. Children come before
parents, and whatever has a name is whole: a publisher that is killed leaves what readers can use.
A version of a ref is made by who is first; nothing is ever changed, and `bucket_collection` alone
removes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.digest import seal, sha256_hex
from mergepipe_pipeline.domain.bounds import SnapshotId, Text
from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.snapshot import (
    MANIFEST,
    PROVENANCE,
    Manifest,
    Ref,
    ShardEntry,
    Snapshot,
)
from mergepipe_pipeline.errors import (
    BusyError,
    CommitConflictError,
    CorruptionError,
    NotFoundError,
    RemoteError,
)
from mergepipe_pipeline.progress import Advance
from mergepipe_pipeline.remote.address import BUCKETS, parse_address
from mergepipe_pipeline.remote.bucket import Bucket, Entry
from mergepipe_pipeline.snapshots.find import manifest_of
from mergepipe_pipeline.snapshots.stores import ObjectStore, stored_of
from mergepipe_pipeline.storage.forms import MAX_NBYTES, read_form
from mergepipe_pipeline.storage.hashing import file_sha256

OBJECTS, ACTIONS, SNAPSHOTS, REFS = "objects", "actions", "snapshots", "refs"
#: There while a collection runs, and for how long it counts if it was killed (seconds).
COLLECTING = "collecting.json"
STALE_S = 7200.0
_VERSION = re.compile(rf"{REFS}/(?P<name>[^/]+)/(?P<number>\d{{8}})\.json")
_LOOKUP_RETRIES = 2
#: Requests of small objects under way at once.
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Version:
    """A version of a ref, as its object has it."""

    snapshot_id: SnapshotId
    reason: Text
    version_of: Text


@dataclass(frozen=True)
class Mirror:
    """A bucket with results. Methods raise RemoteError, and those that write StorageFullError."""

    bucket: Bucket

    def lookup(self, action_keys: Sequence[str]) -> Iterator[StoredObject | None]:
        """The object that each action gave, in order; None where that is not known.

        A damaged record is as none. A bucket that cannot be reached is given up soon: who asks can
        merge instead.
        """
        impatient = Mirror(replace(self.bucket, max_retries=_LOOKUP_RETRIES))
        with Workers(_AT_ONCE) as workers:
            yield from workers.map(impatient._action, action_keys)

    def _action(self, action_key: str) -> StoredObject | None:
        data = self.bucket.read(_action_key(action_key), MAX_NBYTES)
        return None if data is None else stored_of(data, action_key)

    def fetch(self, stored: StoredObject, path: Path, advance: Advance) -> bool:
        """Write an object's bytes to a file; False if it is not there. Raises CorruptionError."""
        key, nbytes = object_key(stored.sha256), stored.nbytes
        return self.bucket.download(key, path, stored.sha256, nbytes, advance)

    def publish(
        self,
        snapshot: Snapshot,
        objects: ObjectStore,
        ref: str,
        reason: str,
        advance: Advance = lambda nbytes: None,
    ) -> Ref:
        """Put what a snapshot is made of, then let the ref name it; what is there is not put again.

        Raises CommitConflictError if another publisher let the ref name another snapshot meanwhile:
        then this snapshot is in the bucket, too. Raises BusyError while a collection runs there.
        """
        current = self.current(ref)
        for shard in snapshot.manifest.shards:
            self._put_object(snapshot, shard)
            advance(shard.nbytes)
        for shard in snapshot.manifest.shards:
            for path in objects.actions_of(shard):
                self.bucket.create(_action_key(path.stem), path.read_bytes())
        self._put_folder(snapshot)
        # A collection that begins later sees the manifest; one that has ended may have taken what
        # was there before.
        self._refuse_collecting()
        for shard in snapshot.manifest.shards:
            self._put_object(snapshot, shard)
        if current is not None and current.snapshot_id == snapshot.snapshot_id:
            return current
        return self._name(ref, snapshot.snapshot_id, reason, current.number if current else 0)

    def _put_object(self, snapshot: Snapshot, shard: ShardEntry) -> None:
        key = object_key(shard.sha256)
        stored = self.bucket.find(key)
        if stored is None or (stored.nbytes, stored.sha256) != (shard.nbytes, shard.sha256):
            self.bucket.put_file(key, Path(snapshot.path) / shard.file, shard.sha256)

    def _put_folder(self, snapshot: Snapshot) -> None:
        """Side files and provenance, the manifest last."""
        folder = Path(snapshot.path)
        present = {e.key: e.nbytes for e in self.bucket.entries(_folder(snapshot.snapshot_id))}
        sides = [(s.file, s.sha256) for s in snapshot.manifest.side_files]
        for name, sha256 in (*sides, (PROVENANCE, file_sha256(folder / PROVENANCE))):
            key = f"{_folder(snapshot.snapshot_id)}/{name}"
            if key not in present:
                self.bucket.put_file(key, folder / name, sha256)
        # Put again though it may be there: a collection leaves what is young.
        data = seal(snapshot.manifest.to_json())
        self.bucket.put(manifest_key(snapshot.snapshot_id), data, sha256_hex(data))

    def _refuse_collecting(self) -> None:
        if is_collecting(self.bucket.find(COLLECTING)):
            raise BusyError(
                "A collection runs in the bucket",
                where=self.bucket.where(COLLECTING),
                next_step="publish again when it has ended; the marker of one that was killed "
                "counts for two hours, and may be removed by hand",
            )

    def _name(self, ref: str, snapshot_id: str, reason: str, seen: int) -> Ref:
        number = seen + 1
        key, value = _version_key(ref, number), {"snapshot_id": snapshot_id, "reason": reason}
        data = seal({**value, "version_of": f"{ref}/{number}"})
        # A repeated request may find what the first one made.
        if not self.bucket.create(key, data) and self.bucket.read(key, MAX_NBYTES) != data:
            raise CommitConflictError(
                "Another warehouse published first",
                where=self.bucket.where(key),
                expected=f"{ref} at version {seen}",
                found=f"version {number} by another",
                next_step="look at what it names, by `mergepipe pull`, then publish again: what is "
                "there is not sent again",
            )
        return Ref(ref, number, snapshot_id, reason)

    def versions(self, ref: str | None = None) -> Mapping[str, list[int]]:
        """The version numbers of one ref or of all, by name, ascending."""
        by_ref: dict[str, list[int]] = {}
        for entry in self.bucket.entries(REFS if ref is None else f"{REFS}/{ref}"):
            if version := _VERSION.fullmatch(entry.key):
                by_ref.setdefault(version["name"], []).append(int(version["number"]))
        return {name: sorted(numbers) for name, numbers in by_ref.items()}

    def current(self, ref: str) -> Ref | None:
        """The current version of a ref; None if nobody has published it. Raises CorruptionError."""
        numbers = self.versions(ref).get(ref, [])
        return self.version(ref, numbers[-1]) if numbers else None

    def version(self, ref: str, number: int) -> Ref:
        """One version of a ref. Raises NotFoundError, CorruptionError."""
        key = _version_key(ref, number)
        where, next_step = self.bucket.where(key), "remove it from the bucket, or publish again"
        data = self._present(key, "No such version")
        version, _ = read_form(_Version, data, where, "A version of a ref", next_step)
        if version.version_of != f"{ref}/{number}":
            raise CorruptionError(
                "A version is another's",
                where=where,
                expected=f"{ref}/{number}",
                found=version.version_of[:80],
                next_step=next_step,
            )
        return Ref(ref, number, version.snapshot_id, version.reason)

    def snapshot_ids(self) -> list[str]:
        """The ids of all snapshots, sorted."""
        keys = (e.key.split("/") for e in self.bucket.entries(SNAPSHOTS))
        return sorted(parts[1] for parts in keys if len(parts) == 3 and parts[2] == MANIFEST)

    def manifest(self, snapshot_id: str) -> Manifest:
        """The manifest of a snapshot. Raises NotFoundError, CorruptionError."""
        key = manifest_key(snapshot_id)
        manifest = manifest_of(self._present(key, "No such snapshot"), self.bucket.where(key))
        if manifest.snapshot_id != snapshot_id:
            raise _changed(self.bucket.where(key), snapshot_id, manifest.snapshot_id)
        return manifest

    def side_files(self, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
        """Name and content of each side file, then of the provenance. Raises CorruptionError."""
        folder = _folder(manifest.snapshot_id)
        for side in manifest.side_files:
            data = self._present(f"{folder}/{side.file}", most_nbytes=side.nbytes)
            if sha256_hex(data) != side.sha256:
                where = self.bucket.where(f"{folder}/{side.file}")
                raise _changed(where, side.sha256[:16], sha256_hex(data)[:16])
            yield side.file, data
        yield PROVENANCE, self._present(provenance_key(manifest.snapshot_id))

    def actions(self, shard: ShardEntry) -> Iterator[tuple[str, StoredObject]]:
        """The actions that gave a shard's object, by key."""
        prefix = f"{ACTIONS}/{shard.layer_key[:2]}"
        for entry in self.bucket.entries(prefix):
            action_key = entry.key.removeprefix(f"{prefix}/").removesuffix(".json")
            stored = self._action(action_key) if action_key.startswith(shard.layer_key) else None
            if stored is not None and stored.sha256 == shard.sha256:
                yield action_key, stored

    def _present(
        self,
        key: str,
        missing: str = "A file of a snapshot is not there",
        most_nbytes: int = MAX_NBYTES,
    ) -> bytes:
        data = self.bucket.read(key, most_nbytes)
        if data is None:
            raise NotFoundError(
                missing,
                where=self.bucket.where(key),
                found="no such object",
                next_step="choose another, or publish it there",
            )
        return data


def mirror_at(address: str, where: str) -> Mirror:
    """The mirror at a bucket's address. Raises RemoteError for another, which `where` gave."""
    place = parse_address(address)
    if place.scheme not in BUCKETS:
        raise RemoteError(
            "Results cannot be kept there",
            where=where,
            expected="a bucket: " + ", ".join(f"{scheme}://" for scheme in BUCKETS),
            found=address,
            next_step="correct it, or leave it out",
        )
    return Mirror(Bucket(place))


def is_collecting(marker: Entry | None) -> bool:
    """Whether a collection may run, by its marker."""
    return marker is not None and time.time() - marker.modified_s < STALE_S


def object_key(sha256: str) -> str:
    """Where an object lies."""
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


def manifest_key(snapshot_id: str) -> str:
    """Where a snapshot's manifest lies."""
    return f"{_folder(snapshot_id)}/{MANIFEST}"


def provenance_key(snapshot_id: str) -> str:
    """Where a snapshot's provenance lies."""
    return f"{_folder(snapshot_id)}/{PROVENANCE}"


def _folder(snapshot_id: str) -> str:
    return f"{SNAPSHOTS}/{snapshot_id}"


def _action_key(action_key: str) -> str:
    return f"{ACTIONS}/{action_key[:2]}/{action_key}.json"


def _version_key(ref: str, number: int) -> str:
    return f"{REFS}/{ref}/{number:08d}.json"


def _changed(where: str, expected: str, found: str) -> CorruptionError:
    return CorruptionError(
        "A file in a bucket is not what was put there",
        where=where,
        expected=expected,
        found=found,
        next_step="remove it from the bucket, and publish the snapshot again",
    )
