"""Where recipes and searches of a warehouse come from that a project wrote there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.storage.forms import kept_record

#: The folder of these records, beside the files.
RECORDS = ".of_projects"


@dataclass(frozen=True, slots=True)
class Origin:
    """The digest of a file as it was written, and where its relative paths start ("": here)."""

    text_sha256: str
    folder: str


def origin_path(path: Path) -> Path:
    """The file of the record of a file."""
    return path.parent / RECORDS / f"{path.stem}.json"


def origin_of(path: Path) -> Origin | None:
    """The record of a file; None for one that somebody else wrote, or that was changed."""
    known = kept_record(origin_path(path), Origin)
    is_as_written = known is not None and sha256_hex(path.read_bytes()) == known.text_sha256
    return known if is_as_written else None


def folder_of(path: Path) -> Path:
    """The folder from which the relative paths of a recipe's or search's file start.

    Raises OSError.
    """
    path = path.resolve()
    origin = origin_of(path)
    return Path(origin.folder) if origin is not None and origin.folder else path.parent
