"""What a push sends, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OutgoingFile:
    """One file of a model folder: its name there, its digest and size, and its path or bytes."""

    name: str
    sha256: str
    nbytes: int
    content: Path | bytes


@dataclass(frozen=True, slots=True)
class Pushed:
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
