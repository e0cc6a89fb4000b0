"""A file of the catalog carries its seal in its name: `STEM.SEAL.parquet`; one reader checks it.

Rows that are made for tokens are weights: `STEM.SEAL.safetensors`.

The seal is BLAKE3 over the file's bytes, of a Parquet file over its footer, which has the digest of
all before it; and over the place: the names of two folders and the stem, which say whose facts
these are. So a file that got another's name is as wrong as one whose bytes changed. A file that is
not what its name says counts as unknown: its facts can be computed again from the weights, and
equal facts have equal names, so that the next writer mends it.
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

import pyarrow as pa
import pyarrow.parquet as pq

from mergepipe_pipeline.digest import blake3_hex, new_content_hash
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import remove_tree, write_atomic

_LOG = logging.getLogger("mergepipe")
_SEALED = re.compile(r"(?P<stem>.+)\.(?P<seal>[0-9a-f]{32})\.(parquet|safetensors)")
_SEAL_HEX = 32
#: Key in a footer of the digest of all bytes before it.
BODY_KEY = b"mergepipe.body"
MAGIC = b"PAR1"
#: The footer's length and the magic number.
_END_NBYTES = 8
#: Errors of damaged sectors, checksums and names.
_DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EISDIR})
#: Bytes read at once where a file is only checked.
_PART_NBYTES = 1 << 20
#: Damaged files that were reported and still exist.
_warned: set[Path] = set()
_judged: ContextVar[bool] = ContextVar("_judged", default=False)

T = TypeVar("T")


def seal_of(data: bytes | memoryview, place: str = "") -> str:
    """The seal of a file's bytes at its `place_of`, 32 hexadecimal characters."""
    nbytes = footer_nbytes(data[-_END_NBYTES:], len(data))
    return blake3_hex(data[-nbytes:] if nbytes else data, place.encode())[:_SEAL_HEX]


def body_digest(data: bytes | memoryview) -> str:
    """The digest in the footer of a Parquet file of the bytes before it."""
    return blake3_hex(data)[:_SEAL_HEX]


def footer_nbytes(end: bytes | memoryview, nbytes: int) -> int:
    """The length of a Parquet file's footer, by its last bytes; 0 for a file that has none."""
    if len(end) < _END_NBYTES or end[-4:] != MAGIC:
        return 0
    footer = int.from_bytes(end[-_END_NBYTES:-4], "little") + _END_NBYTES
    return footer if footer <= nbytes else 0


def place_of(folder: Path, stem: str) -> str:
    """The place that a seal covers beside a file's bytes, wherever the warehouse lies."""
    return "/".join((*folder.parts[-2:], stem))


def check_seal(path: Path, data: bytes | memoryview, of: str = "") -> None:
    """Raise CorruptionError if these bytes, or this footer, are not what the file's name seals."""
    stem, seal = name_parts(path)
    own_seal = seal_of(data, place_of(path.parent, stem))
    if seal != own_seal:
        raise damaged(path, f"BLAKE3 {seal}{of}", own_seal)


def verify_sealed(path: Path) -> None:
    """Check every byte of a file, read in small parts; changes nothing.

    Raises CorruptionError and FileNotFoundError.
    """
    with readable(path), path.open("rb") as file:
        file_nbytes = os.fstat(file.fileno()).st_size
        file.seek(max(0, file_nbytes - _END_NBYTES))
        nbytes = footer_nbytes(file.read(_END_NBYTES), file_nbytes)
        hasher, left = new_content_hash(), file_nbytes - nbytes
        file.seek(0)
        while left and (part := file.read(min(left, _PART_NBYTES))):
            hasher.update(part)
            left -= len(part)
        footer = file.read()
    if nbytes:
        check_seal(path, footer, " of the footer")
        _check_body(path, footer, hasher.hexdigest()[:_SEAL_HEX])
        return
    stem, seal = name_parts(path)
    hasher.update(place_of(path.parent, stem).encode())
    if seal != (own_seal := hasher.hexdigest()[:_SEAL_HEX]):
        raise damaged(path, f"BLAKE3 {seal}", own_seal)


def is_good(path: Path) -> bool:
    """Whether a file of facts is as it was written; says it if not, and leaves it."""
    try:
        verify_sealed(path)
    except FileNotFoundError:
        return False
    except CorruptionError as error:
        warn_once(path, error)
        return False
    return True


def _check_body(path: Path, footer: bytes | memoryview, digest: str) -> None:
    """Raise CorruptionError unless the (right) footer of a file names this digest of its body."""
    found = (pq.read_metadata(pa.BufferReader(MAGIC + bytes(footer))).metadata or {}).get(BODY_KEY)
    if found is None or found.decode() != digest:
        raise damaged(path, f"BLAKE3 {found.decode() if found else 'in the footer'}", digest)


def sealed_path(folder: Path, stem: str, seal: str, suffix: str = "parquet") -> Path:
    """Where a file of this seal is or would be."""
    return folder / f"{stem}.{seal}.{suffix}"


def write_sealed(
    folder: Path, stem: str, data: bytes, seal: str | None = None, suffix: str = "parquet"
) -> Path:
    """Write a file under its seal, or one that is given; mends a damaged equal one.

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
    if nbytes := footer_nbytes(data[-_END_NBYTES:], len(data)):
        view = memoryview(data)
        _check_body(path, view[-nbytes:], body_digest(view[:-nbytes]))
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
    """Return what a sealed file says; None if it is gone or damaged: see `drop`.

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
