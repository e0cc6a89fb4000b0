"""Removes from a bucket what no version of a ref names; publishers may work meanwhile.

While a collection runs, a marker lies in the bucket. A publisher looks for it after its manifest is
there: a collection that begins later sees the manifest, and what an earlier one took is put again.
So the marker must not last: a collection ends by itself in time, and one that was killed does not
count for longer. What is young stays, since its publisher may not have come to its ref yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mergepipe_pipeline.digest import seal
from mergepipe_pipeline.errors import BusyError, MergePipeError
from mergepipe_pipeline.remote.bucket import Entry
from mergepipe_pipeline.snapshots.collection import GcReport
from mergepipe_pipeline.snapshots.mirror import (
    ACTIONS,
    COLLECTING,
    OBJECTS,
    SNAPSHOTS,
    STALE_S,
    Mirror,
    is_collecting,
    manifest_key,
)
from mergepipe_pipeline.snapshots.stores import layer_key_of

#: What is younger is never removed, in seconds: between a manifest and its ref are a few requests.
LEAST_AGE_S = 3600.0
#: A collection removes for so long, in seconds: half of what its marker counts, for wrong clocks.
_LASTS_S = STALE_S / 2
_NOTE = "the time for one collection is over: run it again for the rest"


@dataclass(frozen=True, slots=True)
class _Idle:
    """The objects that may go, parents first, and the snapshots among them."""

    snapshot_ids: tuple[str, ...]
    entries: tuple[Entry, ...]


def collect_bucket(mirror: Mirror, *, older_than_s: float, dry_run: bool) -> GcReport:
    """Remove snapshots that no version of a ref names, and objects and actions of no snapshot.

    Of these, what was put longer than `older_than_s` ago. Raises MergePipeError for less than an
    hour, BusyError while another collection runs, CorruptionError for a ref or manifest that cannot
    be read: then nothing is removed; and RemoteError.
    """
    if older_than_s < LEAST_AGE_S:
        raise MergePipeError(
            "What publishers have just put is not to be removed",
            where="--older-than",
            expected=f"at least {LEAST_AGE_S:.0f} seconds for a bucket",
            found=f"{older_than_s:g}",
            next_step="give more, or leave it out",
        )
    if dry_run:
        return _report(_idle(mirror, time.time() - older_than_s), ())
    with _marked(mirror) as began_s:
        ends_s = time.monotonic() + _LASTS_S
        idle = _idle(mirror, began_s - older_than_s)
        done = 0
        for entry in idle.entries:
            if time.monotonic() > ends_s:
                break
            mirror.bucket.remove([entry.key])
            done += 1
    remaining = len(idle.entries) - done
    removed = _Idle(idle.snapshot_ids, idle.entries[:done])
    return _report(removed, (_NOTE,) if remaining else ())


@contextmanager
def _marked(mirror: Mirror) -> Iterator[float]:
    """Let the marker be there until the context ends; when it came, by the server's clock."""
    bucket, marker = mirror.bucket, mirror.bucket.find(COLLECTING)
    data = seal({"by": "mergepipe gc --bucket", "began_s": time.time()})
    if is_collecting(marker) or not bucket.put_if(COLLECTING, data, "", marker):
        raise BusyError(
            "Another collection runs in the bucket",
            where=bucket.where(COLLECTING),
            next_step="let it end; the marker of one that was killed counts for two hours",
        )
    try:
        own_marker = bucket.find(COLLECTING)
        yield own_marker.modified_s if own_marker else time.time()
    finally:
        bucket.remove([COLLECTING])


def _idle(mirror: Mirror, limit_s: float) -> _Idle:
    """The objects that nobody needs and that were put before `limit_s` (Unix seconds)."""
    named = {
        mirror.version(ref, number).snapshot_id
        for ref, numbers in mirror.versions().items()
        for number in numbers
    }
    old = {e.key: e for e in mirror.bucket.entries(SNAPSHOTS) if e.modified_s < limit_s}
    ids = mirror.snapshot_ids()
    idle_ids = tuple(i for i in ids if i not in named and manifest_key(i) in old)
    used = [s for i in ids if i not in idle_ids for s in mirror.manifest(i).shards]
    keys, digests = {s.layer_key for s in used}, {s.sha256 for s in used}
    kept = {*ids} - {*idle_ids}
    folders = [e for e in old.values() if e.key.split("/")[1] not in kept]
    folders.sort(key=lambda e: (e.key not in map(manifest_key, idle_ids), e.key))
    actions = (
        e
        for e in mirror.bucket.entries(ACTIONS)
        if layer_key_of(_stem(e.key)) not in keys and e.modified_s < limit_s
    )
    objects = (
        e
        for e in mirror.bucket.entries(OBJECTS)
        if _stem(e.key) not in digests and e.modified_s < limit_s
    )
    return _Idle(idle_ids, (*folders, *actions, *objects))


def _stem(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")


def _report(idle: _Idle, notes: tuple[str, ...]) -> GcReport:
    nbytes = sum(e.nbytes for e in idle.entries)
    keys = tuple(e.key for e in idle.entries)
    return GcReport(len(keys), nbytes, keys, idle.snapshot_ids, notes)
