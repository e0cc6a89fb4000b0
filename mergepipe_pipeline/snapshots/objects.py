"""Merged layers by content, and the action cache that finds them by what determined them.

An object is a read-only file named by its SHA-256. An action says which object a layer key gave.
Anything doubtful counts as unknown and is made again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from mergepipe_pipeline.digest import new_hash, seal, unseal
from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.snapshot import ShardEntry
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import adopt_file, remove_tree, rename, write_atomic

_LOG = logging.getLogger("mergepipe")


def layer_key_of(action_key: str) -> str:
    """The layer key in an action's key, which is the stem of its file's name."""
    return action_key.partition(".")[0]


def object_of(action: Path) -> str | None:
    """The digest of the object that an action's file names; None for a damaged one."""
    with suppress(OSError, CorruptionError, KeyError):
        return str(unseal(action.read_bytes(), str(action))["object"])
    return None


def stored_of(data: bytes, action_key: str, where: str = "an action") -> StoredObject | None:
    """The object that the record of an action names; None for a damaged one, or another's."""
    # They load pydantic, which commands that only list refs start without.
    from mergepipe_pipeline.snapshots.foreign import ActionForm
    from mergepipe_pipeline.storage.forms import read_form

    with suppress(CorruptionError):
        action, _ = read_form(ActionForm, data, where, "An action", "merge again")
        if action.action_key == action_key:
            non_finite = tuple(action.non_finite.items())
            return StoredObject(action.object, action.nbytes, action.tensors, non_finite)
    return None


class ObjectStore:
    """The folders `objects` and `actions` of a warehouse."""

    def __init__(self, objects: Path, actions: Path) -> None:
        self._objects = objects
        self._actions = actions

    def path_of(self, sha256: str) -> Path:
        """Where the object with this digest lies, or would."""
        return self._objects / sha256[:2] / sha256

    def lookup(self, action_key: str) -> StoredObject | None:
        """The object that this action gave, or None if it must be made (again)."""
        path = self._action(action_key)
        try:
            stored = stored_of(path.read_bytes(), action_key, str(path))
            if stored is None:
                return None
            stat = self.path_of(stored.sha256).stat()
            whole = stat.st_size == stored.nbytes
            # Touched, so that a collection running meanwhile sees both as in use; of the object
            # only the time of access, since snapshots link to it and may be models themselves.
            with suppress(PermissionError):  # another user's; his group may not set its times
                os.utime(self.path_of(stored.sha256), ns=(time.time_ns(), stat.st_mtime_ns))
            os.utime(path)
        except FileNotFoundError:
            return None
        return stored if whole else None

    def adopt(self, temp: Path, stored: StoredObject) -> None:
        """Make a finished file the object it says it is."""
        os.chmod(temp, 0o444)
        adopt_file(temp, self.path_of(stored.sha256))

    def is_intact(self, stored: StoredObject) -> bool:
        """Whether an object's bytes are those that were written; reads all of them."""
        try:
            with self.path_of(stored.sha256).open("rb") as file:
                return hashlib.file_digest(file, new_hash).hexdigest() == stored.sha256
        except OSError:
            return False

    def set_aside(self, action_key: str, stored: StoredObject, folder: Path) -> None:
        """Let a layer be made again: its object is damaged, and moves below `folder`."""
        remove_tree(self._action(action_key))
        path = self.path_of(stored.sha256)
        with suppress(FileNotFoundError):
            rename(path, folder / self._objects.name / path.relative_to(self._objects))

    def record(self, action_key: str, stored: StoredObject) -> None:
        """Remember that an action gives this object, which must be there already.

        Warns if an action with the same layer key gave another object: they obeyed different facts,
        one of which was wrong.
        """
        for path in self._actions.glob(f"{action_key[:2]}/{layer_key_of(action_key)}.*.json"):
            digest = object_of(path)
            if digest not in (None, stored.sha256):
                _LOG.warning(
                    "Two executions of one layer differ. Where: %s. Expected object %s, found %s. "
                    "Next: `mergepipe verify --all --scope lineage` names the snapshots that have "
                    "either.",
                    path,
                    stored.sha256[:16],
                    str(digest)[:16],
                )
        value = {
            "action_key": action_key,
            "object": stored.sha256,
            "nbytes": stored.nbytes,
            "tensors": [list(t) for t in stored.tensors],
            "non_finite": dict(stored.non_finite),
        }
        write_atomic(self._action(action_key), seal(value))

    def actions_of(self, shard: ShardEntry) -> list[Path]:
        """The files of the actions that gave a shard's object."""
        key = shard.layer_key
        paths = sorted(self._actions.glob(f"{key[:2]}/{key}*.json"))
        return [path for path in paths if object_of(path) == shard.sha256]

    def all_actions(self) -> list[Path]:
        """Every action file."""
        return sorted(p for p in self._actions.glob("*/*.json"))

    def all_objects(self) -> list[Path]:
        """Every object file."""
        return sorted(p for p in self._objects.glob("*/*") if not p.name.startswith("."))

    def _action(self, action_key: str) -> Path:
        return self._actions / action_key[:2] / f"{action_key}.json"
