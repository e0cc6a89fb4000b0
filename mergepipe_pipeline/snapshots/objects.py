"""Merged layers by content, and the action cache that finds them by what determined them.

An object is a read-only file named by its SHA-256. An action says which object a layer key gave.
Anything doubtful counts as unknown and is made again.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import adopt_file, write_atomic


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object: SHA-256 and size in bytes; `tensors` as in `spec.snapshot.ShardEntry`.

    `non_finite`: tensor name and number of elements that are NaN, infinite or cut off, if any.
    """

    sha256: str
    nbytes: int
    tensors: tuple[tuple[str, str], ...]
    non_finite: tuple[tuple[str, int], ...] = ()


class ObjectStore:
    """The folders `objects` and `actions` of a warehouse."""

    def __init__(self, objects: Path, actions: Path) -> None:
        self._objects = objects
        self._actions = actions

    def path_of(self, sha256: str) -> Path:
        """Where the object with this digest lies, or would."""
        return self._objects / sha256[:2] / sha256

    def lookup(self, layer_key: str) -> StoredObject | None:
        """The object that this layer key gave, or None if it must be made (again)."""
        path = self._action(layer_key)
        try:
            value = unseal(path.read_bytes(), str(path))
            stored = StoredObject(
                value["object"],
                value["nbytes"],
                tuple((t, d) for t, d in value["tensors"]),
                tuple(value.get("non_finite", {}).items()),
            )
            found = self.path_of(stored.sha256).stat()
            whole = found.st_size == stored.nbytes
            # Touched, so that a collection running meanwhile sees both as in use; of the object
            # only the time of access, since snapshots link to it and may be models themselves.
            os.utime(self.path_of(stored.sha256), ns=(time.time_ns(), found.st_mtime_ns))
            os.utime(path)
        except (FileNotFoundError, CorruptionError, KeyError):
            return None
        return stored if whole else None

    def adopt(self, temp: Path, stored: StoredObject) -> None:
        """Make a finished file the object it says it is."""
        os.chmod(temp, 0o444)
        adopt_file(temp, self.path_of(stored.sha256))

    def record(self, layer_key: str, stored: StoredObject) -> None:
        """Remember that `layer_key` gives this object, which must be there already."""
        value = {
            "layer_key": layer_key,
            "object": stored.sha256,
            "nbytes": stored.nbytes,
            "tensors": [list(t) for t in stored.tensors],
            "non_finite": dict(stored.non_finite),
        }
        write_atomic(self._action(layer_key), seal(value))

    def all_actions(self) -> list[Path]:
        """Every action file."""
        return sorted(p for p in self._actions.glob("*/*.json"))

    def all_objects(self) -> list[Path]:
        """Every object file."""
        return sorted(p for p in self._objects.glob("*/*") if not p.name.startswith("."))

    def _action(self, layer_key: str) -> Path:
        return self._actions / layer_key[:2] / f"{layer_key}.json"
