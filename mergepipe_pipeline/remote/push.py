"""Puts a model folder at an address, into a repository of the hub or into a bucket.

The hub takes one commit: weights are sent first, one file at a time; it keeps them by content until
a commit names them, so that a push that was killed sends the others alone. Readers see the commit
before or after. Source: https://huggingface.co/docs/huggingface_hub/guides/upload.

In a bucket the first file claims the address: it is won by one writer, and says which model comes.
What readers open first goes last. A push that was killed has left its claim, and goes on when it is
run again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergepipe_pipeline.errors import (
    CommitConflictError,
    CorruptionError,
    MergePipeError,
)
from mergepipe_pipeline.remote.address import Address
from mergepipe_pipeline.remote.bucket import Bucket, Entry
from mergepipe_pipeline.remote.clients import hub_api, need
from mergepipe_pipeline.remote.listing import failures_named
from mergepipe_pipeline.storage.forms import MAX_NBYTES
from mergepipe_pipeline.text import listed

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

_BRANCH = "main"
#: What a reader would take for weights of the model.
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_CONFLICT = 412
_MOST_NAMED = 5


def push_to_hub(
    address: Address,
    files: Sequence[OutgoingFile],
    message: str,
    *,
    older: Callable[[bytes], Sequence[str]] | None,
    public: bool = False,
    replace: bool = False,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> PushResult:
    """Make a branch of a repository hold `files`; makes the repository, private unless `public`.

    What is there with the same content is not sent; if all is, there is no commit. `older` gives
    the files that the first of `files`, as it is there, tells of: those go by the same commit.
    Without it nothing goes: the files come beside what is there.

    Raises MergePipeError for weights of another origin, unless `replace`: then they go, too, as do
    those that a new branch has from main. Raises
    CommitConflictError if somebody commits meanwhile, CorruptionError if the commit does not hold
    what was sent, and RemoteError.
    """
    with failures_named(address.text):
        api, branch = hub_api(), address.revision or _BRANCH
        if not dry_run:
            _make(api, address, branch, public=public)
        parent, there, is_as_main = _state(api, address, branch)
        missing = [f for f in files if not _is_there(there.get(f.name), f)]
        removed: tuple[str, ...] = ()
        if older is not None:
            go = replace or is_as_main
            removed = _removed(api, address, files, parent, there, older, replace=go)
        pushed = PushResult.of(address, files, missing, removed, "")
        if dry_run:
            return pushed
        if not missing and not removed:
            return replaced(pushed, commit=parent)
        advance(pushed.nbytes - pushed.sent_nbytes)
        commit = _commit(api, address, branch, missing, removed, message, parent, advance)
        _refuse_other_commit(address, files, _tree(api, address, commit)[1])
        return replaced(pushed, commit=commit)


def _make(api: HfApi, address: Address, branch: str, *, public: bool) -> None:
    """Make the repository and the branch if they are not there; a branch begins as main is."""
    if _head(api, address, branch) is not None:
        return
    api.create_repo(address.place, private=not public, exist_ok=True)
    if branch != _BRANCH:
        api.create_branch(address.place, branch=branch, exist_ok=True)


def _state(
    api: HfApi, address: Address, branch: str
) -> tuple[str | None, dict[str, RepoFile], bool]:
    """The commit and the files that a push to a branch begins with, and whether they are main's.

    They are where the branch is new: then weights are not its own, and main keeps them.
    """
    parent, there = _tree(api, address, branch)
    if branch == _BRANCH:
        return parent, there, False
    main, there_in_main = _tree(api, address, _BRANCH)
    if parent is None:  # of a dry run
        return main, there_in_main, True
    return parent, there, parent == main


def _head(api: HfApi, address: Address, revision: str) -> str | None:
    """The commit of a revision; None if it is not there."""
    errors = need("huggingface_hub.errors")
    try:
        head: str | None = api.repo_info(address.place, revision=revision).sha
        return head
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        if isinstance(error, errors.GatedRepoError):
            raise
        return None


def _tree(api: HfApi, address: Address, revision: str) -> tuple[str | None, dict[str, RepoFile]]:
    """The commit of a revision and its files by path; None and nothing if it is not there."""
    from huggingface_hub.hf_api import RepoFile

    commit = _head(api, address, revision)
    if commit is None:
        return None, {}
    try:
        tree = list(api.list_repo_tree(address.place, recursive=True, revision=commit))
    except need("huggingface_hub.errors").EntryNotFoundError:  # a repository without any file
        tree = []
    return commit, {f.path: f for f in tree if isinstance(f, RepoFile)}


def _is_there(there: RepoFile | None, file: OutgoingFile) -> bool:
    if there is None or there.size != file.nbytes:
        return False
    if there.lfs is not None:
        return bool(there.lfs.sha256 == file.sha256)
    data = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
    blob = b"blob %d\0" % len(data) + data
    return bool(there.blob_id == hashlib.sha1(blob, usedforsecurity=False).hexdigest())


def _removed(
    api: HfApi,
    address: Address,
    files: Sequence[OutgoingFile],
    parent: str | None,
    there: Mapping[str, RepoFile],
    older: Callable[[bytes], Sequence[str]],
    *,
    replace: bool,
) -> tuple[str, ...]:
    """The files that are to go. Raises MergePipeError for weights of others."""
    names, first = {f.name for f in files}, files[0].name
    pushed_before: Sequence[str] = ()
    if first in there and not _is_there(there[first], files[0]):
        path = api.hf_hub_download(address.place, first, revision=parent)
        with open(path, "rb") as file:
            pushed_before = older(file.read())
    others = [n for n in there if n.endswith(_WEIGHTS) and n not in {*pushed_before, *names}]
    others = [n for n in others if "/" not in n]
    if others and not replace:
        raise MergePipeError(
            "The repository holds another model",
            where=address.text,
            expected="none, or one that mergepipe pushed",
            found=listed(sorted(others), _MOST_NAMED),
            next_step="choose another repository or branch, or let its weights go with --replace: "
            "its history keeps them",
        )
    return tuple(sorted({*others, *(n for n in pushed_before if n in there and n not in names)}))


def _commit(
    api: HfApi,
    address: Address,
    branch: str,
    missing: Sequence[OutgoingFile],
    removed: Sequence[str],
    message: str,
    parent: str | None,
    advance: Callable[[int], None],
) -> str:
    """Send what is missing, then commit; gives the commit's id."""
    hub = need("huggingface_hub")
    operations: list[Any] = []
    with _quiet():
        for file in missing:
            content = file.content if isinstance(file.content, bytes) else str(file.content)
            added = hub.CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=content)
            if isinstance(content, str):
                added.upload_info.sha256 = bytes.fromhex(file.sha256)
                api.preupload_lfs_files(address.place, [added], revision=branch, free_memory=False)
            operations.append(added)
            advance(file.nbytes)
        operations += [hub.CommitOperationDelete(path_in_repo=name) for name in removed]
        try:
            done = api.create_commit(
                address.place,
                operations,
                commit_message=message,
                revision=branch,
                parent_commit=parent,
            )
        except need("huggingface_hub.errors").HfHubHTTPError as error:
            if error.response.status_code != _CONFLICT:
                raise
            raise CommitConflictError(
                "Another writer was first",
                where=address.text,
                expected=f"commit {parent}",
                found="a later one",
                next_step="run this again: what was sent is not sent again",
            ) from error
    return str(done.oid)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars of the client's own: the caller draws."""
    utils = need("huggingface_hub.utils")
    was_off = utils.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Parquet files belong into data sets
        utils.disable_progress_bars()
        try:
            yield
        finally:
            if not was_off:
                utils.enable_progress_bars()


def _refuse_other_commit(
    address: Address, files: Sequence[OutgoingFile], there: Mapping[str, RepoFile]
) -> None:
    """Raise CorruptionError unless the commit holds every file as it is here."""
    for file in files:
        if not _is_there(there.get(file.name), file):
            raise CorruptionError(
                "The hub's commit does not hold what was sent",
                where=f"{address.text}, {file.name}",
                expected=f"{file.nbytes} bytes, sha256 {file.sha256[:16]}",
                found="another file" if file.name in there else "no such file",
                next_step="push again",
            )


@dataclass(frozen=True, slots=True)
class OutgoingFile:
    """One file of a model folder: its name there, its digest and size, and its path or bytes."""

    name: str
    sha256: str
    nbytes: int
    content: Path | bytes


@dataclass(frozen=True, slots=True)
class PushResult:
    """A model at an address: all its files and bytes, and those that were sent (or would be).

    `removed` are files of another model that are no longer there; `commit` is the hub's, where the
    address is one; "" for a dry run.
    """

    address: str
    files: int
    nbytes: int
    sent_files: tuple[str, ...]
    sent_nbytes: int
    removed: tuple[str, ...] = ()
    commit: str | None = None

    @staticmethod
    def of(
        address: Address,
        files: Sequence[OutgoingFile],
        missing: Sequence[OutgoingFile],
        removed: tuple[str, ...],
        commit: str | None = None,
    ) -> PushResult:
        """What comes of sending the `missing` ones of `files`."""
        names, nbytes = tuple(f.name for f in missing), sum(f.nbytes for f in missing)
        total = sum(f.nbytes for f in files)
        return PushResult(address.text, len(files), total, names, nbytes, removed, commit)


def push_to_bucket(
    bucket: Bucket,
    files: Sequence[OutgoingFile],
    *,
    first_opened: Collection[str],
    beside: str,
    replace: bool = False,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> PushResult:
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
    pushed = PushResult.of(bucket.address, files, missing, tuple(sorted(removed)))
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
