"""The files at an address, in whatever depth, each taken whole: of a bucket, or of the hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from mergepipe_pipeline.errors import CorruptionError, RemoteError
from mergepipe_pipeline.remote.address import BUCKETS, HUB, Address
from mergepipe_pipeline.remote.bucket import Bucket
from mergepipe_pipeline.remote.clients import hub_api
from mergepipe_pipeline.remote.failures import failures_named
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.storage.hashing import file_sha256


class Folder(Protocol):
    """Files by path below an address. Methods raise RemoteError."""

    def names(self, below: str) -> list[str]:
        """The paths of all files below a folder, sorted."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None without one."""
        ...

    def download(self, name: str, path: Path, sha256: str, advance: Callable[[int], None]) -> bool:
        """Write a file to `path`; False if it is not there. Raises CorruptionError (digest)."""
        ...


def folder_at(address: Address) -> Folder:
    """The files at the address of a bucket or of the hub. Raises RemoteError for another."""
    if address.scheme == HUB:
        return _HubFolder(address)
    if address.scheme in BUCKETS:
        return _BucketFolder(address)
    raise RemoteError(
        "Files cannot be listed there",
        where=address.text,
        expected=f"hf://org/model, or a bucket: {', '.join(f'{s}://' for s in BUCKETS)}",
        found=f"{address.scheme}://",
        next_step="choose another address",
    )


class _BucketFolder:
    def __init__(self, address: Address) -> None:
        self._bucket = Bucket(address)

    def names(self, below: str) -> list[str]:
        return sorted(e.key for e in self._bucket.entries(below))

    def read(self, name: str) -> bytes | None:
        return self._bucket.read(name)

    def download(self, name: str, path: Path, sha256: str, advance: Callable[[int], None]) -> bool:
        return self._bucket.download(name, path, sha256, advance)


class _HubFolder:
    """The files of a repository at the commit that its revision was when they were listed."""

    def __init__(self, address: Address) -> None:
        self._address = address
        with failures_named(address.text):
            self._api = hub_api()
            self._commit = self._api.repo_info(address.place, revision=address.revision).sha

    @cached_property
    def _tree(self) -> list[str]:
        with failures_named(self._address.text):
            entries: Any = self._api.list_repo_tree(
                self._address.place, recursive=True, revision=self._commit
            )
            return sorted(f.path for f in entries)

    def names(self, below: str) -> list[str]:
        return [name for name in self._tree if name.startswith(f"{below}/")]

    def read(self, name: str) -> bytes | None:
        return self._got(name, None).read_bytes() if name in self._tree else None

    def download(self, name: str, path: Path, sha256: str, advance: Callable[[int], None]) -> bool:
        if name not in self._tree:
            return False
        parts = path.parent / f"{path.name}.parts"
        got = self._got(name, parts)
        if (found := file_sha256(got)) != sha256:
            raise CorruptionError(
                "A file of the hub is not what was put there",
                where=f"{self._address.text}, {name}",
                expected=f"sha256 {sha256[:16]}",
                found=f"sha256 {found[:16]}",
                next_step="push it again",
            )
        got.replace(path)
        remove_tree(parts)  # the client keeps notes there
        advance(path.stat().st_size)
        return True

    def _got(self, name: str, into: Path | None) -> Path:
        """A file that the hub's client downloads into a folder, or into its cache."""
        with failures_named(f"{self._address.text}, {name}"):
            return Path(
                self._api.hf_hub_download(
                    self._address.place, name, revision=self._commit, local_dir=into
                )
            )
