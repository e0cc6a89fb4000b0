"""Addresses of checkpoints as texts (`hf://org/model@revision`, `s3://bucket/prefix`); asks nobody.

Models of the hub that were downloaded lie in its cache on this machine.
Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.errors import CheckpointError, RemoteError
from mergepipe_pipeline.secrets import discreet
from mergepipe_pipeline.storage.regular import read_small

BUCKETS, WEB, HUB = ("s3", "gs", "az"), ("http", "https"), "hf"
SCHEMES = (HUB, *BUCKETS, *WEB)
_FILE = ".safetensors"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a checkpoint lies: `place` is what follows `://`, without a revision.

    Only the hub (`hf`) has revisions: a branch, a tag or a commit.
    """

    scheme: str
    place: str
    revision: str | None = None

    @property
    def text(self) -> str:
        """The address as users write it."""
        return f"{self.scheme}://{self.place}" + (f"@{self.revision}" if self.revision else "")

    @property
    def folder(self) -> Address:
        """Where the files lie, which is above an address of a single file."""
        if self.only is None:
            return self
        return Address(self.scheme, self.place.rpartition("/")[0])

    @property
    def only(self) -> str | None:
        """The name of the one file that is meant; None for a folder."""
        last = self.place.rpartition("/")[2]
        return last if self.scheme != HUB and last.endswith(_FILE) else None

    @property
    def name(self) -> str:
        """The name that a folder of the same content would have: `org/model`, or the last part."""
        if self.scheme == HUB:
            return self.place
        return self.place.rpartition("/")[2].removesuffix(_FILE)


def is_address(text: str) -> bool:
    """Whether a text has one of the schemes that are served."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in SCHEMES


def is_hub_name(text: str) -> bool:
    """Whether a text may name a model of the hub without saying so: `org/model`."""
    return "/" in text and REPO.fullmatch(text) is not None


def parse_address(text: str, revision: str | None = None) -> Address:
    """The address of a text; a `revision` given beside it counts. Raises RemoteError."""
    refuse_secrets(text)
    scheme, _, rest = text.partition("://")
    place, given = rest.rstrip("/"), revision
    if scheme == HUB:
        place, _, after = rest.partition("@")
        place, given = place.rstrip("/"), revision or after or None
        if not REPO.fullmatch(place):
            raise _refused(text, "hf://org/model or hf://org/model@revision")
    elif scheme not in SCHEMES:
        raise _refused(text, "one of " + ", ".join(f"{s}://" for s in SCHEMES))
    elif revision is not None:
        raise RemoteError(
            "Only models of the hub have revisions",
            where=f"{text}@{revision}",
            expected="an address without a revision",
            found=repr(revision),
            next_step="leave it out: what is there is pinned while it is read",
        )
    elif not place or place.startswith("/"):
        raise _refused(text, f"{scheme}:// with a place")
    return Address(scheme, place, given)


def refuse_secrets(text: str) -> None:
    """Raise RemoteError for an address with a password, a signature or a token in it.

    It would be kept in catalogs, provenance and cards, and is not repeated even here.
    """
    if is_address(text) and discreet(text) != text:
        raise RemoteError(
            "An address holds what may be a secret",
            where=text,
            expected="an address without user, password, ? and #",
            found="one with them",
            next_step="give what may read buckets and the hub in the environment "
            "(AWS_ACCESS_KEY_ID, HF_TOKEN and others); what a signed link leads to, download it "
            "and give its folder",
        )


def _refused(text: str, expected: str) -> RemoteError:
    return RemoteError(
        "An address cannot be read",
        where=text,
        expected=expected,
        found="something else",
        next_step="correct the address",
    )


#: The name of a model of the hub.
REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")

_COMMIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def cached_model(name: str, revision: str | None = None) -> Path | None:
    """The snapshot folder of `org/model` at a branch, tag or commit (default `main`), or None.

    Raises CheckpointError for a branch whose file in the cache is damaged.
    """
    if not REPO.fullmatch(name):
        return None
    repo = _cache() / f"models--{name.replace('/', '--')}"
    ref_name = revision or "main"
    if "/" in ref_name or ".." in ref_name:
        return None
    ref = repo / "refs" / ref_name
    commit = _commit(ref) if ref.is_file() else ref_name
    snapshot = repo / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def hub_name(folder: Path) -> str | None:
    """The name of the model whose snapshot in a cache of the hub this is; None for another."""
    if folder.parent.name != "snapshots":
        return None
    kind, separator, name = folder.parent.parent.name.partition("models--")
    name = name.replace("--", "/")
    return name if separator and not kind and REPO.fullmatch(name) else None


def _commit(ref: Path) -> str:
    """The commit that a branch or tag of the cache names."""
    text = read_small(ref, 4096).decode("utf-8", "replace").strip()
    if not _COMMIT.fullmatch(text):
        raise CheckpointError(
            "A ref of the hub's cache names no commit",
            where=str(ref),
            expected="a commit's digest",
            found=repr(text[:80]),
            next_step="download the model again",
        )
    return text


def _cache() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(home).expanduser() / "hub"
