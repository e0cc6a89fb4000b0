"""Files of exact sums that merges keep: each tensor's in pieces, with a digest of each piece.

The pieces lie first, their sealed table behind them, its length in the last eight bytes. Such a
file can go at any time: what it saves is reading all models again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.digest import blake3_hex, seal
from mergepipe_pipeline.domain.bounds import Size
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import full_disk_named
from mergepipe_pipeline.storage.forms import MAX_NBYTES, read_form

#: Elements between the places where windows are cut into pieces.
_GRID = 1 << 16
_END_NBYTES = 8


class SumsLostError(Exception):
    """Kept sums cannot be used: they are damaged, or what they became is not exact."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The sums of elements [start, stop) of a tensor, and where in the file they lie."""

    start_elem: Size
    stop_elem: Size
    offset: Size
    nbytes: Size
    digest: str


@dataclass(frozen=True, slots=True)
class SumsTable:
    """Whose sums they are: of the models that a plan merges; by tensor, in order of elements."""

    plan_id: str
    tensors: dict[str, tuple[Piece, ...]]


class SumsWriter:
    """Writes a file of sums; a tensor without exact ones is left out. Raises StorageFullError."""

    def __init__(self, path: Path, plan_id: str) -> None:
        self._path = path
        self._file: IO[bytes] = path.open("wb")
        self._plan_id = plan_id
        self._tensors: dict[str, list[Piece]] = {}
        self._inexact: set[str] = set()

    def add(self, tensor: str, start_elem: int, pieces: Sequence[tuple[int, bytes]] | None) -> None:
        """Append pieces, each with its number of elements; None where some sum is not exact."""
        if pieces is None:
            self._inexact.add(tensor)
        for n, data in pieces or ():
            piece = Piece(
                start_elem, start_elem + n, self._file.tell(), len(data), blake3_hex(data)
            )
            self._tensors.setdefault(tensor, []).append(piece)
            with full_disk_named(self._path):
                self._file.write(data)
            start_elem += n

    def finish(self) -> int:
        """Write the table; the file's bytes."""
        whole = {t: tuple(p) for t, p in self._tensors.items() if t not in self._inexact}
        table = seal(asdict(SumsTable(self._plan_id, whole)))
        with full_disk_named(self._path):
            self._file.write(table + len(table).to_bytes(_END_NBYTES, "little"))
            self._file.flush()
        return self._file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class SumsReader:
    """Reads a file of sums. Raises OSError, and CorruptionError for one with a damaged table."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            nbytes = file.seek(0, 2)
            file.seek(max(0, nbytes - _END_NBYTES))
            size = int.from_bytes(file.read(), "little")
            at = nbytes - _END_NBYTES - size
            if at < 0 or size > MAX_NBYTES:
                raise CorruptionError("A file of sums has no table", where=str(path))
            file.seek(at)
            data = file.read(size)
        self._path = path
        self.table, _ = read_form(SumsTable, data, str(path), "A file of sums", "remove it")

    def read(self, tensor: str, start: int, stop: int) -> tuple[F64Array, F64Array, int]:
        """The sums of elements [start, stop), high and low, and the bytes that were read.

        Raises SumsLostError for damaged pieces and for missing ones.
        """
        high, low = np.full(stop - start, np.nan), np.zeros(stop - start)
        n_read = 0
        try:
            with self._path.open("rb") as file:
                for piece in self.table.tensors[tensor]:
                    a, b = max(start, piece.start_elem), min(stop, piece.stop_elem)
                    if a >= b:
                        continue
                    file.seek(piece.offset)
                    data = file.read(piece.nbytes)
                    if blake3_hex(data) != piece.digest:
                        raise SumsLostError(f"{self._path}: damaged at byte {piece.offset}")
                    sums = _unpacked(data, piece.stop_elem - piece.start_elem)
                    inside = slice(a - piece.start_elem, b - piece.start_elem)
                    high[a - start : b - start], low[a - start : b - start] = (
                        s[inside] for s in sums
                    )
                    n_read += len(data)
        except (OSError, KeyError, ValueError) as error:
            raise SumsLostError(f"{self._path}: {error}") from error
        if np.isnan(high).any():
            raise SumsLostError(f"{self._path}: no sums of all of {tensor}")
        return high, low, n_read


def sums_beside(path: Path) -> Path:
    """The file of the sums that are kept of a layer, beside the layer itself."""
    return path.with_suffix(".sums")


def piece_ends(start_elem: int, stop_elem: int) -> list[int]:
    """Where the pieces of a window end, the first at its start, counted from there."""
    inner = range(start_elem // _GRID * _GRID + _GRID, stop_elem, _GRID)
    return [0, *(cut - start_elem for cut in inner), stop_elem - start_elem]


def packed(high: F64Array, low: F64Array) -> bytes:
    """A piece as float32 or float64, whatever is shorter, and the sums that they do not hold."""
    forms: list[bytes] = []
    with np.errstate(over="ignore"):
        for kind in (np.float32, np.float64):
            main = high.astype(kind)
            (odd,) = np.nonzero((main != high) | (low != 0))
            parts = (main, odd.astype(np.uint32), high[odd], low[odd])
            head = np.array([main.itemsize, len(odd)], np.uint32)
            forms.append(b"".join(part.tobytes() for part in (head, *parts)))
            if len(forms[0]) <= high.nbytes:  # less than float64 takes
                break
    return min(forms, key=len)


def _unpacked(data: bytes, n: int) -> tuple[F64Array, F64Array]:
    size, n_odd = np.frombuffer(data, np.uint32, 2)
    at = 8
    main = np.frombuffer(data, np.float32 if size == 4 else np.float64, n, at)
    at += main.nbytes
    odd = np.frombuffer(data, np.uint32, n_odd, at)
    rest = np.frombuffer(data, np.float64, 2 * int(n_odd), at + odd.nbytes)
    high, low = main.astype(np.float64), np.zeros(n)
    high[odd], low[odd] = rest[:n_odd], rest[n_odd:]
    return high, low
