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

from mergepipe_pipeline.errors import CommitConflictError, CorruptionError, MergePipeError
from mergepipe_pipeline.progress import Advance
from mergepipe_pipeline.remote.address import HUB, Address
from mergepipe_pipeline.remote.bucket import Bucket, Entry
from mergepipe_pipeline.remote.clients import hub_api, need
from mergepipe_pipeline.remote.listing import OutgoingFile, failures_named
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


@dataclass(frozen=True)
class Parcel:
    """Files that go to an address together, the one that says what they are first.

    `folder` is the one below the address that they go into, if any. `older` gives the files that
    the first one, as it is at the address, tells of: those go where they are no longer needed, and
    without it a repository keeps all that is there. `first_opened` are the names that make a reader
    take the folder for a model: in a bucket they are not there while others are sent. The folder
    `beside` does not count.
    """

    files: Sequence[OutgoingFile]
    message: str
    first_opened: Collection[str]
    beside: str
    folder: str = ""
    older: Callable[[bytes], Sequence[str]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(f.nbytes for f in self.files)


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


def push_parcel(
    address: Address,
    parcel: Parcel,
    *,
    public: bool = False,
    replace: bool = False,
    dry_run: bool = False,
    advance: Advance = lambda nbytes: None,
) -> PushResult:
    """Make a branch of a repository, or the prefix of a bucket, hold the files of a parcel.

    A repository is made, private unless `public`. What is there with the same content is not sent;
    if all is, there is no commit. Raises MergePipeError for an address that holds anything else,
    unless `replace`: then that goes, too, as does what a new branch has from main. Raises
    CommitConflictError if another writer comes first, CorruptionError if what is there at the end
    is not what was sent, StorageFullError and RemoteError.
    """
    if parcel.folder and address.scheme == HUB:
        named = [replaced(f, name=f"{parcel.folder}/{f.name}") for f in parcel.files]
        parcel = replaced(parcel, files=named)
    elif parcel.folder:
        address = Address(address.scheme, f"{address.place}/{parcel.folder}")
    is_hub = address.scheme == HUB
    with failures_named(address.text):
        place: _Repository | _Prefix
        place = _Repository(address, parcel, public) if is_hub else _Prefix(address, parcel)
        missing, removed = place.look(replace=replace, dry_run=dry_run)
        sent_nbytes = sum(f.nbytes for f in missing)
        pushed = PushResult(
            address.text,
            len(parcel.files),
            parcel.nbytes,
            tuple(f.name for f in missing),
            sent_nbytes,
            tuple(sorted(removed)),
            "" if is_hub else None,
        )
        if dry_run:
            return pushed
        advance(pushed.nbytes - sent_nbytes)
        return replaced(pushed, commit=place.send(missing, removed, advance))


class _Repository:
    """A branch of a repository of the hub.

    `look` gives the files to send, and those that are to go; `send` makes the place hold the
    parcel, sees that it does, and gives the commit.
    """

    def __init__(self, address: Address, parcel: Parcel, public: bool) -> None:
        self._api, self._address, self._parcel = hub_api(), address, parcel
        self._branch, self._public = address.revision or _BRANCH, public
        self._parent: str | None = None

    def look(self, *, replace: bool, dry_run: bool) -> tuple[list[OutgoingFile], list[str]]:
        api, address = self._api, self._address
        if not dry_run:
            self._make()
        self._parent, there = _tree(api, address, self._branch)
        if self._branch != _BRANCH:
            main, there_in_main = _tree(api, address, _BRANCH)
            if self._parent is None:  # of a dry run
                self._parent, there = main, there_in_main
            # In a new branch weights are not its own, and main keeps them.
            replace |= self._parent == main
        missing = [f for f in self._parcel.files if not _is_there(there.get(f.name), f)]
        return missing, self._removed(there, replace=replace)

    def send(
        self, missing: Sequence[OutgoingFile], removed: Sequence[str], advance: Advance
    ) -> str | None:
        if not missing and not removed:
            return self._parent
        commit = self._commit(missing, removed, advance)
        there = _tree(self._api, self._address, commit)[1]
        for file in self._parcel.files:
            if not _is_there(there.get(file.name), file):
                raise CorruptionError(
                    "The hub's commit does not hold what was sent",
                    where=f"{self._address.text}, {file.name}",
                    expected=f"{file.nbytes} bytes, sha256 {file.sha256[:16]}",
                    found="another file" if file.name in there else "no such file",
                    next_step="push again",
                )
        return commit

    def _make(self) -> None:
        """Make the repository and the branch if they are not there; a branch begins as main is."""
        api, place = self._api, self._address.place
        if _head(api, self._address, self._branch) is None:
            api.create_repo(place, private=not self._public, exist_ok=True)
            if self._branch != _BRANCH:
                api.create_branch(place, branch=self._branch, exist_ok=True)

    def _removed(self, there: Mapping[str, RepoFile], *, replace: bool) -> list[str]:
        """The files that are to go. Raises MergePipeError for weights of others."""
        first, older = self._parcel.files[0], self._parcel.older
        if older is None:
            return []
        names = {f.name for f in self._parcel.files}
        pushed_before: Sequence[str] = ()
        if first.name in there and not _is_there(there[first.name], first):
            path = self._api.hf_hub_download(self._address.place, first.name, revision=self._parent)
            pushed_before = older(Path(path).read_bytes())
        others = [n for n in there if n.endswith(_WEIGHTS) and n not in {*pushed_before, *names}]
        others = [n for n in others if "/" not in n]
        if others and not replace:
            raise MergePipeError(
                "The repository holds another model",
                where=self._address.text,
                expected="none, or one that mergepipe pushed",
                found=listed(sorted(others), _MOST_NAMED),
                next_step="choose another repository or branch, or let its weights go with "
                "--replace: its history keeps them",
            )
        return sorted({*others, *(n for n in pushed_before if n in there and n not in names)})

    def _commit(
        self, missing: Sequence[OutgoingFile], removed: Sequence[str], advance: Advance
    ) -> str:
        """Send what is missing, then commit; gives the commit's id."""
        hub, api, place = need("huggingface_hub"), self._api, self._address.place
        operations: list[Any] = []
        with _quiet():
            for file in missing:
                content = file.content if isinstance(file.content, bytes) else str(file.content)
                added = hub.CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=content)
                if isinstance(content, str):
                    added.upload_info.sha256 = bytes.fromhex(file.sha256)
                    api.preupload_lfs_files(
                        place, [added], revision=self._branch, free_memory=False
                    )
                operations.append(added)
                advance(file.nbytes)
            operations += [hub.CommitOperationDelete(path_in_repo=name) for name in removed]
            try:
                done = api.create_commit(
                    place,
                    operations,
                    commit_message=self._parcel.message,
                    revision=self._branch,
                    parent_commit=self._parent,
                )
            except need("huggingface_hub.errors").HfHubHTTPError as error:
                if error.response.status_code != _CONFLICT:
                    raise
                raise CommitConflictError(
                    "Another writer was first",
                    where=self._address.text,
                    expected=f"commit {self._parent}",
                    found="a later one",
                    next_step="run this again: what was sent is not sent again",
                ) from error
        return str(done.oid)


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


class _Prefix:
    """The prefix of a bucket; methods as of `_Repository`."""

    def __init__(self, address: Address, parcel: Parcel) -> None:
        self._bucket, self._parcel = Bucket(address), parcel
        self._there: dict[str, Entry] = {}

    @property
    def _claim(self) -> OutgoingFile:
        return self._parcel.files[0]

    def look(self, *, replace: bool, dry_run: bool) -> tuple[list[OutgoingFile], list[str]]:
        files, beside = self._parcel.files, f"{self._parcel.beside}/"
        self._there = {e.key: e for e in self._bucket.entries() if not e.key.startswith(beside)}
        older = {f.name: self._bucket.find(f.name) for f in files if f.name in self._there}
        missing = [f for f in files if not _is_same(older.get(f.name), f)]
        removed = self._in_the_way(older, missing)
        if removed and not replace:
            raise MergePipeError(
                "The address holds something else",
                where=self._bucket.address.text,
                expected="nothing, or a part of the same snapshot",
                found=listed(sorted(removed), _MOST_NAMED),
                next_step="choose another address, or let it go with --replace: readers find no "
                "model until the push has ended",
            )
        late = self._last(missing)
        return [f for f in files if f in missing or f.name in late], removed

    def send(
        self, missing: Sequence[OutgoingFile], removed: Sequence[str], advance: Advance
    ) -> None:
        bucket, claim = self._bucket, self._claim
        seen = self._there.get(claim.name)
        if claim in missing:
            assert isinstance(claim.content, bytes)
            # Made in place of the one that was seen, unless it is made already.
            if not bucket.put_if(claim.name, claim.content, claim.sha256, seen):
                self._refuse_other_claim(seen)
            advance(claim.nbytes)
        hidden = [name for name in self._there if name in self._last(missing)]
        bucket.remove([*hidden, *(n for n in removed if n not in {*hidden, claim.name})])
        etags = {f.name: _put(bucket, f, advance) for f in missing if f is not claim}
        _refuse_other(bucket, self._parcel.files, etags)
        self._refuse_other_claim(seen)

    def _in_the_way(
        self, older: Mapping[str, Entry | None], missing: Sequence[OutgoingFile]
    ) -> list[str]:
        """The files of another origin: of other names, those of these names that no push
        put, and those by which another model is known.
        """
        names = {f.name for f in self._parcel.files}
        pushed = {name for name, entry in older.items() if entry and entry.sha256}
        may_change = pushed.difference(self._parcel.first_opened, {self._claim.name})
        changed = [f.name for f in missing if f.name in self._there and f.name not in may_change]
        return [*(name for name in self._there if name not in names), *changed]

    def _last(self, missing: Sequence[OutgoingFile]) -> set[str]:
        """The files that readers must not find until the push has ended; none if no shard is sent.

        Another model may have the same config and index: readers would open them with shards of
        both. What is made for the push, such as the card, only describes a model.
        """
        is_partial = any(isinstance(f.content, Path) for f in missing)
        return {*self._parcel.first_opened} - {self._claim.name} if is_partial else set()

    def _refuse_other_claim(self, seen: Entry | None) -> None:
        if self._bucket.read(self._claim.name, MAX_NBYTES) != self._claim.content:
            raise CommitConflictError(
                "Another push came first",
                where=self._bucket.where(self._claim.name),
                expected="no model" if seen is None else "the model that was there",
                found="another one",
                next_step="push to another address, or run this again when that push has ended",
            )


def _is_same(there: Entry | None, file: OutgoingFile) -> bool:
    return there is not None and (there.nbytes, there.sha256) == (file.nbytes, file.sha256)


def _put(bucket: Bucket, file: OutgoingFile, advance: Advance) -> str:
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
