"""Lines that are appended as work is done, so that killed work goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

from mergepipe_pipeline.digest import canonical_json, digest_json
from mergepipe_pipeline.storage.atomic import READ_ONLY


class Journal:
    """A file of sealed (key, value) lines; a context manager. Threads take turns outside.

    Where nothing can be written, lines are remembered until the end of the block, and no longer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._values: dict[str, str] = {}

    def __enter__(self) -> Journal:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab+", buffering=0)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            return self
        self._file.seek(0)
        data = self._file.read()
        self._values = dict(pair for line in data.splitlines() if (pair := _read(line)))
        if data and not data.endswith(b"\n"):  # the last one was killed while it wrote
            self._file.write(b"\n")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        """Remove the file; where nothing can be written, there is nothing to do."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise

    def __getitem__(self, key: str) -> str | None:
        return self._values.get(key)

    def __len__(self) -> int:
        return len(self._values)

    def record(self, key: str, value: str) -> None:
        """Remember a value, from now on and after a kill."""
        self._values[key] = value
        if self._file is not None:
            self._file.write(canonical_json([key, value, _seal(key, value)]) + b"\n")


def _read(line: bytes) -> tuple[str, str] | None:
    """Key and value of a line; None for one that is torn or was changed."""
    try:
        key, value, stated = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return (key, value) if stated == _seal(key, value) else None


def _seal(key: str, value: str) -> str:
    return digest_json([key, value])[:16]
