"""A file of the catalog carries its seal in its name: `STEM.SEAL.parquet`; one reader checks it.

Rows that are made for tokens are weights: `STEM.SEAL.safetensors`.

The seal is BLAKE3 over the file's bytes, or, of a file that is read in parts (see `row_groups`),
over its footer; and over the place: the names of two folders and the stem, which say whose facts
these are. So a file that got another's name is as wrong as one whose bytes changed. A file that is
not what its name says counts as unknown: its facts can be computed again from the weights, and
equal facts have equal names, so that the next writer mends it. Older files, whose seals cover bytes
alone, are read.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from mergepipe_pipeline.digest import blake3_hex, new_content_hash
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import remove_tree, write_atomic

_LOG = logging.getLogger("mergepipe")
_SEALED = re.compile(r"(?P<stem>.+)\.(?P<seal>[0-9a-f]{32})\.(parquet|safetensors)")
_SEAL_HEX = 32
#: Errors of damaged sectors, checksums and names.
_DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EISDIR})
#: Bytes read at once where a file is only checked.
_PART_NBYTES = 1 << 20
#: Damaged files that were reported and still exist.
_warned: set[Path] = set()
_judged: ContextVar[bool] = ContextVar("_judged", default=False)

T = TypeVar("T")


def seal_of(data: bytes | memoryview, place: str = "") -> str:
    """The first 32 hexadecimal characters of BLAKE3 over bytes and a file's `place_of`."""
    return blake3_hex(data, place.encode())[:_SEAL_HEX]


def place_of(folder: Path, stem: str) -> str:
    """What a seal covers beside a file's bytes; the same wherever the warehouse lies."""
    return "/".join((*folder.parts[-2:], stem))


def check_seal(path: Path, data: bytes | memoryview, of: str = "") -> None:
    """Raise CorruptionError if these bytes `of` a file are not what its name seals."""
    stem, seal = name_parts(path)
    own_seal = seal_of(data, place_of(path.parent, stem))
    if seal not in (own_seal, seal_of(data)):
        raise damaged(path, f"BLAKE3 {seal}{of}", own_seal)


def is_sealed(path: Path) -> bool:
    """As `check_seal` of all bytes, read in small parts; says whether the seal is theirs."""
    hasher = new_content_hash()
    with readable(path), path.open("rb") as file:
        while part := file.read(_PART_NBYTES):
            hasher.update(part)
    stem, seal = name_parts(path)
    older = hasher.hexdigest()[:_SEAL_HEX]
    hasher.update(place_of(path.parent, stem).encode())
    return seal in (hasher.hexdigest()[:_SEAL_HEX], older)


def sealed_path(folder: Path, stem: str, seal: str, suffix: str = "parquet") -> Path:
    """Where a file of this seal is or would be."""
    return folder / f"{stem}.{seal}.{suffix}"


def write_sealed(
    folder: Path, stem: str, data: bytes, seal: str | None = None, suffix: str = "parquet"
) -> Path:
    """Write a file under its seal (default: of all its bytes); mends a damaged equal one.

    Raises StorageFullError.
    """
    path = sealed_path(folder, stem, seal or seal_of(data, place_of(folder, stem)), suffix)
    write_atomic(path, data)
    return path


def find_sealed(folder: Path, stem: str | None = None) -> list[Path]:
    """The sealed files of a folder, of one stem or of all; sorted, empty without the folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    start = "" if stem is None else f"{stem}."  # most names are another's: they are not matched
    matches = (_SEALED.fullmatch(name) for name in names if name.startswith(start))
    return sorted(folder / m.string for m in matches if m and stem in (None, m["stem"]))


def name_parts(path: Path) -> tuple[str, str]:
    """Stem and seal of a sealed file's name. Raises CorruptionError for another name."""
    match = _SEALED.fullmatch(path.name)
    if match is None:
        raise damaged(path, "STEM.SEAL.parquet as the name", path.name)
    return match["stem"], match["seal"]


def read_sealed(path: Path) -> bytes:
    """All bytes of a file. Raises CorruptionError if they do not have the seal in its name.

    Raises FileNotFoundError if there is none.
    """
    with readable(path):
        data = path.read_bytes()
    check_seal(path, data)
    return data


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the disk's errors about damaged data into a CorruptionError.

    Other errors, such as too many open files, say nothing about the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise damaged(path, "a file that can be read", str(error)) from error


def damaged(path: Path, expected: str, found: str) -> CorruptionError:
    """The error for a file that is not what its name says."""
    return CorruptionError(
        "A catalog file was changed after it was written",
        where=str(path),
        expected=expected,
        found=found,
        next_step="delete the file; its facts are computed again where they are needed",
    )


def version(path: Path) -> tuple[int, int] | None:
    """Tells a file from one that replaced it (time, size); None where there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


def read_facts(path: Path, decode: Callable[[bytes], T]) -> T | None:
    """What a sealed file says; None if there is none, or if it is damaged: see `drop`.

    An undamaged file that cannot be decoded is reported and stays.
    """
    seen = version(path)
    try:
        data = read_sealed(path)
    except FileNotFoundError:
        return None
    except CorruptionError as error:
        drop(path, error, seen)
        return None
    try:
        return decode(data)
    except CorruptionError as error:
        warn_once(path, error)
        return None


@contextmanager
def untouched() -> Iterator[None]:
    """Leave damaged files in place, without a warning: for checks of a catalog."""
    token = _judged.set(True)
    try:
        yield
    finally:
        _judged.reset(token)


def drop(path: Path, error: CorruptionError, seen: tuple[int, int] | None) -> None:
    """Report a damaged file and remove it, so that its facts are computed again.

    `seen` is its version as it was read: a file that another process has mended since stays.
    """
    if _judged.get():
        return
    warn_once(path, error)
    if version(path) == seen:
        with suppress(OSError):  # a warehouse that may only be read
            remove_tree(path)
            _warned.discard(path)


#: The next step for a damaged file of facts.
_COMPUTED_AGAIN = "nothing; it is left out, and its facts are computed again where they are needed"


def warn_once(path: Path, error: CorruptionError, next_step: str = _COMPUTED_AGAIN) -> None:
    """Warn of a damaged file that is left out, once."""
    if path in _warned:
        return
    _warned.add(path)
    warning = CorruptionError(
        error.what,
        where=error.where,
        expected=error.expected,
        found=error.found,
        next_step=next_step,
    )
    _LOG.warning("%s", warning)
