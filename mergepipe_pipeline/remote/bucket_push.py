"""Puts a model folder into a bucket, so that a reader finds it whole or not at all.

The first file claims the address: it is won by one writer, and says which model comes. What readers
open first goes last. A push that was killed has left its claim, and goes on when it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from mergepipe_pipeline.errors import CommitConflictError, CorruptionError, MergePipeError
from mergepipe_pipeline.remote.bucket import Bucket, Entry
from mergepipe_pipeline.remote.outgoing import OutgoingFile, Pushed
from mergepipe_pipeline.storage.forms import MAX_NBYTES
from mergepipe_pipeline.text import listed

#: Names that an error tells.
_MOST_NAMED = 5


def push_to_bucket(
    bucket: Bucket,
    files: Sequence[OutgoingFile],
    *,
    first_opened: Collection[str],
    beside: str,
    replace: bool = False,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Pushed:
    """Put `files` at the bucket's address; the first is the claim, the others go in this order.

    `first_opened` are the names that make a reader take the folder for a model: they are not there
    while others are sent. The folder `beside` does not count. What is there with the same digest is
    not sent.

    Raises MergePipeError if the address holds anything else, unless `replace`: then that goes, what
    readers open before all else. Raises CommitConflictError if another push claims the address
    meanwhile, StorageFullError, RemoteError, and CorruptionError if what is there at the end is not
    what was sent.
    """
    claim, *others = files
    there = {e.key: e for e in bucket.entries() if not e.key.startswith(f"{beside}/")}
    older = {f.name: bucket.find(f.name) for f in files if f.name in there}
    missing = [f for f in files if not _is_same(older.get(f.name), f)]
    removed = _in_the_way(there, older, files, missing, {*first_opened, claim.name})
    if removed and not replace:
        raise _taken(bucket, removed)
    late = _put_last(first_opened, claim, missing)
    missing = [f for f in files if f in missing or f.name in late]
    pushed = Pushed(
        bucket.address.text,
        len(files),
        sum(f.nbytes for f in files),
        tuple(f.name for f in missing),
        sum(f.nbytes for f in missing),
        tuple(sorted(removed)),
    )
    if dry_run:
        return pushed
    advance(pushed.nbytes - pushed.sent_nbytes)
    if claim in missing:
        _claim(bucket, claim, there.get(claim.name))
        advance(claim.nbytes)
    hidden = [name for name in there if name in late]
    bucket.remove([*hidden, *(n for n in removed if n not in {*hidden, claim.name})])
    etags = {f.name: _put(bucket, f, advance) for f in others if f in missing}
    _refuse_other(bucket, files, etags)
    _refuse_other_claim(bucket, claim, there.get(claim.name))
    return pushed


def _in_the_way(
    there: Collection[str],
    older: Mapping[str, Entry | None],
    files: Sequence[OutgoingFile],
    missing: Sequence[OutgoingFile],
    known_by: Collection[str],
) -> list[str]:
    """What is there of another origin: files of other names, those of these names that no push put,
    and those by which another model is known.
    """
    names = {f.name for f in files}
    pushed = {name for name, entry in older.items() if entry and entry.sha256}
    may_change = pushed.difference(known_by)
    changed = (f.name for f in missing if f.name in there and f.name not in may_change)
    return [*(name for name in there if name not in names), *changed]


def _put_last(
    first_opened: Collection[str], claim: OutgoingFile, missing: Sequence[OutgoingFile]
) -> set[str]:
    """The files that readers must not find until the push has ended; none if no shard is sent.

    Another model may have the same config and index: readers would open them with shards of both.
    What is made for the push, such as the card, only describes a model.
    """
    is_partial = any(isinstance(f.content, Path) for f in missing)
    return {*first_opened} - {claim.name} if is_partial else set()


def _is_same(there: Entry | None, file: OutgoingFile) -> bool:
    return there is not None and (there.nbytes, there.sha256) == (file.nbytes, file.sha256)


def _claim(bucket: Bucket, claim: OutgoingFile, seen: Entry | None) -> None:
    """Make the claim, in place of the one that was `seen`, unless it is made already."""
    assert isinstance(claim.content, bytes)
    if not bucket.put_if(claim.name, claim.content, claim.sha256, seen):
        _refuse_other_claim(bucket, claim, seen)


def _refuse_other_claim(bucket: Bucket, claim: OutgoingFile, seen: Entry | None) -> None:
    if bucket.read(claim.name, MAX_NBYTES) != claim.content:
        raise CommitConflictError(
            "Another push came first",
            where=bucket.where(claim.name),
            expected="no model" if seen is None else "the model that was there",
            found="another one",
            next_step="push to another address, or run this again when that push has ended",
        )


def _put(bucket: Bucket, file: OutgoingFile, advance: Callable[[int], None]) -> str:
    if isinstance(file.content, bytes):
        etag = bucket.put(file.name, file.content, file.sha256)
        advance(file.nbytes)
        return etag
    return bucket.put_file(file.name, file.content, file.sha256, advance)


def _refuse_other(bucket: Bucket, files: Sequence[OutgoingFile], etags: dict[str, str]) -> None:
    """Raise CorruptionError unless every file is there with its size, and as it was just put."""
    there = {e.key: e for e in bucket.entries()}
    for file in files:
        entry = there.get(file.name)
        etag = etags.get(file.name) or (entry.etag if entry else "")
        if entry is None or (entry.nbytes, entry.etag) != (file.nbytes, etag):
            raise CorruptionError(
                "A bucket does not hold what was put there",
                where=bucket.where(file.name),
                expected=f"{file.nbytes} bytes, ETag {etag}",
                found=f"{entry.nbytes} bytes, ETag {entry.etag}" if entry else "no such object",
                next_step="see that nobody else writes there, and push again",
            )


def _taken(bucket: Bucket, names: Sequence[str]) -> MergePipeError:
    return MergePipeError(
        "The address holds something else",
        where=bucket.address.text,
        expected="nothing, or a part of the same snapshot",
        found=listed(sorted(names), _MOST_NAMED),
        next_step="choose another address, or let it go with --replace: readers find no model "
        "until the push has ended",
    )
