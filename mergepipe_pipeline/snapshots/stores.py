"""The stores of results: layers by content, refs by version, and marks of who asked for them.

An object is a read-only file named by its SHA-256. An action says which object a layer key gave;
anything doubtful counts as unknown and is made again. Each ref is a chain of versions, the highest
is what readers load.

A snapshot without a mark is a result. `stage` is written once, for a snapshot that a stage has just
made; `result` replaces it when somebody merges the same as a result, and stays. A result keeps its
mark, whichever of the two comes last. `refused` replaces each of them when a gate refuses the
snapshot, with the recipe and the reason, until a gate lets it pass or somebody merges it again.
`collected` stays where a result was removed since only old versions of refs named it. Beside a mark
lies the state in which the snapshot's files were when they were read last, and found right.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergepipe_pipeline.digest import new_hash, seal, unseal
from mergepipe_pipeline.domain.bounds import NAME, Number, Sha256, Size, Text
from mergepipe_pipeline.domain.outcome import StoredObject
from mergepipe_pipeline.domain.snapshot import Ref, ShardEntry
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.storage.atomic import (
    adopt_file,
    create_exclusive,
    remove_tree,
    rename,
    write_atomic,
)
from mergepipe_pipeline.storage.chain import VersionChain, chain_names, is_chain

_LOG = logging.getLogger("mergepipe")


@dataclass(frozen=True, slots=True)
class _Action:
    """The object that a layer key gave, as its file has it."""

    action_key: Text
    object: Sha256
    nbytes: Size
    tensors: tuple[tuple[Text, Sha256], ...]
    non_finite: dict[str, Size]
    sq_rounding: Number = 0.0


def layer_key_of(action_key: str) -> str:
    """The layer key in an action's key, which is the stem of its file's name."""
    return action_key.partition(".")[0]


def stored_of(data: bytes, action_key: str, where: str = "an action") -> StoredObject | None:
    """The object that the record of an action names; None for a damaged one, or another's."""
    # It loads pydantic, which commands that only list refs start without.
    from mergepipe_pipeline.storage.forms import read_form

    with suppress(CorruptionError):
        action, _ = read_form(_Action, data, where, "An action", "merge again")
        if action.action_key == action_key:
            non_finite = tuple(action.non_finite.items())
            stored = action.object, action.nbytes, action.tensors
            return StoredObject(*stored, non_finite, action.sq_rounding)
    return None


def stored_by(action: Path) -> StoredObject | None:
    """The object that an action's file names; None where it is damaged or not there."""
    with suppress(OSError):
        return stored_of(action.read_bytes(), action.stem, str(action))
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
        if (stored := stored_by(path)) is None:
            return None
        try:
            stat = self.path_of(stored.sha256).stat()
            # Touched, so that a collection running meanwhile sees both as in use. The object is
            # not: a merge knows by their times that its result's files are as it has read them.
            os.utime(path)
        except FileNotFoundError:
            return None
        return stored if stat.st_size == stored.nbytes else None

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
            other = stored_by(path)
            if other is not None and other.sha256 != stored.sha256:
                _LOG.warning(
                    "Two executions of one layer differ. Where: %s. Expected object %s, found %s. "
                    "Next: `mergepipe verify --all --scope lineage` names the snapshots that have "
                    "either.",
                    path,
                    stored.sha256[:16],
                    other.sha256[:16],
                )
        value = {
            "action_key": action_key,
            "object": stored.sha256,
            "nbytes": stored.nbytes,
            "tensors": [list(t) for t in stored.tensors],
            "non_finite": dict(stored.non_finite),
            **({"sq_rounding": stored.sq_rounding} if stored.sq_rounding else {}),
        }
        write_atomic(self._action(action_key), seal(value))

    def actions_of(self, shard: ShardEntry) -> list[Path]:
        """The files of the actions that gave a shard's object."""
        key = shard.layer_key
        paths = sorted(self._actions.glob(f"{key[:2]}/{key}*.json"))
        return [p for p in paths if (o := stored_by(p)) is not None and o.sha256 == shard.sha256]

    def all_actions(self) -> list[Path]:
        """Every action file."""
        return sorted(p for p in self._actions.glob("*/*.json"))

    def all_objects(self) -> list[Path]:
        """Every object file."""
        return sorted(p for p in self._objects.glob("*/*") if not p.name.startswith("."))

    def _action(self, action_key: str) -> Path:
        return self._actions / action_key[:2] / f"{action_key}.json"


class RefStore:
    """The folder `refs` of a warehouse."""

    def __init__(self, refs: Path) -> None:
        self._refs = refs

    def names(self) -> list[str]:
        """All refs that have a version, readable or not."""
        return chain_names(self._refs)

    def __contains__(self, name: str) -> bool:
        """Whether a name is one of `names`; no other name is looked at."""
        return bool(NAME.fullmatch(name)) and is_chain(self._refs / name)

    def current(self, name: str) -> Ref:
        """The current version of a ref. Raises NotFoundError, CorruptionError."""
        current = self._chain(name).current()
        if current is None:
            raise NotFoundError(
                "No such ref",
                where=str(self._refs),
                found=repr(name),
                expected=", ".join(self.names()) or "a ref that exists: nothing is published yet",
                next_step="publish a snapshot with `mergepipe publish ID --ref NAME`",
            )
        return self._ref(name, *current)

    def history(self, name: str) -> list[Ref]:
        """Every version, oldest first. Raises NotFoundError."""
        self.current(name)
        chain = self._chain(name)
        return [self._ref(name, n, chain.get(n)) for n in chain.versions()]

    def snapshot_ids(self, name: str, known: Mapping[int, str]) -> dict[int, str]:
        """The snapshot of every version; those that are `known` are not read: none ever changes.

        Raises CorruptionError.
        """
        chain = self._chain(name)
        return {
            n: known.get(n) or self._ref(name, n, chain.get(n)).snapshot_id
            for n in chain.versions()
        }

    def publish(self, name: str, snapshot_id: str, reason: str, expected: int | None = None) -> Ref:
        """Make `name` stand for a snapshot; what it stands for already adds no version.

        Raises CommitConflictError if the current version is not `expected` (0: none yet).
        """
        chain = self._chain(name)
        current = chain.current()
        if current and current[1]["snapshot_id"] == snapshot_id and expected in (None, current[0]):
            return self._ref(name, *current)
        value = {"snapshot_id": snapshot_id, "reason": reason}
        return self._ref(name, chain.append(value, expected), value)

    def refuse_other(self, name: str, expected: int | None) -> None:
        """Raise CommitConflictError if the current version is not `expected`, unless that is None.

        0: there is none yet.
        """
        if expected is not None:
            self._chain(name).refuse_other(expected)

    def target(self, name: str, to: int | None) -> Ref:
        """The version that a rollback goes back to: `to`, or the last that differs from now.

        Raises NotFoundError if there is nothing to go back to.
        """
        history = self.history(name)
        now = history[-1]
        if to is None:
            older = [r for r in history if r.snapshot_id != now.snapshot_id]
            if not older:
                raise NotFoundError(
                    "There is nothing to roll back to",
                    where=name,
                    found=f"every version names {now.snapshot_id}",
                    next_step="publish another snapshot",
                )
            return older[-1]
        return self._ref(name, to, self._chain(name).get(to))

    def rollback(self, name: str, to: int | None, reason: str) -> Ref:
        """Publish again what `target` gives. Raises NotFoundError as it does."""
        now, target = self.current(name), self.target(name, to)
        return self.publish(
            name, target.snapshot_id, f"{reason} to version {target.number}", now.number
        )

    def _chain(self, name: str) -> VersionChain:
        if not NAME.fullmatch(name):
            raise MergePipeError(
                "Not a name for a ref",
                where="ref",
                found=repr(name),
                expected="letters, digits, '.', '_' and '-', starting with a letter or digit",
                next_step="choose another name",
            )
        return VersionChain(self._refs / name)

    def _ref(self, name: str, number: int, value: dict[str, str]) -> Ref:
        try:
            return Ref(name, number, value["snapshot_id"], value["reason"])
        except KeyError as error:
            raise CorruptionError(
                "A version of a ref has another form than this version writes",
                where=str(self._refs / name),
                expected=f"{error} in version {number}",
                found=", ".join(value) or "nothing",
                next_step="read it with the version that wrote it",
            ) from error


_STAGE, _RESULT = ({"made_as": made_as} for made_as in ("stage", "result"))
_REFUSED, _COLLECTED = "refused", "collected"


class Marks:
    """The folder `stages` of a warehouse."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def mark(self, snapshot_id: str, *, is_stage: bool, is_new: bool) -> None:
        """Remember what a snapshot was made as; `is_new`: it was not there before.

        A stage that is there already counts as used now.
        """
        path = self.path_of(snapshot_id)
        if not is_stage:
            self.accept(snapshot_id)
        elif is_new and self.is_collected(snapshot_id):
            write_atomic(path, seal(_STAGE))
        elif is_new and not path.exists():
            with suppress(FileExistsError):
                create_exclusive(path, seal(_STAGE))
        else:
            with suppress(FileNotFoundError):
                os.utime(path)

    def accept(self, snapshot_id: str) -> None:
        """Remember that a snapshot is a result that somebody asked for, and has used now."""
        path = self.path_of(snapshot_id)
        if self._read(path) != _RESULT:
            write_atomic(path, seal(_RESULT))
        else:
            with suppress(FileNotFoundError):
                os.utime(path)

    def refuse(self, snapshot_id: str, recipe: str, reason: str) -> None:
        """Remember that the gate of a recipe refuses a snapshot, and why."""
        mark = {"made_as": _REFUSED, "recipe": recipe, "reason": reason}
        write_atomic(self.path_of(snapshot_id), seal(mark))

    def collect(self, snapshot_id: str) -> None:
        """Remember that a result was removed, although versions of refs name it."""
        write_atomic(self.path_of(snapshot_id), seal({"made_as": _COLLECTED}))
        remove_tree(self._state_path(snapshot_id))

    def is_collected(self, snapshot_id: str) -> bool:
        """Whether a result that is not there was removed on purpose."""
        mark = self._read(self.path_of(snapshot_id)) or {}
        return mark.get("made_as") == _COLLECTED

    def unwanted(self) -> set[str]:
        """The ids of snapshots that are nobody's result: stages, and what a gate refused."""
        return {i for i, mark in self._all() if mark.get("made_as") in ("stage", _REFUSED)}

    def refusals(self) -> dict[str, str]:
        """Why snapshots were refused, in a sentence that names the recipe, by snapshot id."""
        refused = ((i, mark) for i, mark in self._all() if mark.get("made_as") == _REFUSED)
        return {i: f"by {mark['recipe']}: {mark['reason']}" for i, mark in refused}

    def _all(self) -> Iterator[tuple[str, dict[str, str]]]:
        for path in self._folder.glob("*.json"):
            yield path.stem, self._read(path) or {}

    def keep_state(self, snapshot_id: str, state: str | None) -> None:
        """Remember the state of files of which every byte was right, if there is one."""
        if state is not None:
            write_atomic(self._state_path(snapshot_id), seal({"read_in_state": state}))

    def state(self, snapshot_id: str) -> str | None:
        """The state of a snapshot's files when they were right last; None if nobody knows."""
        return (self._read(self._state_path(snapshot_id)) or {}).get("read_in_state")

    def forget(self, snapshot_id: str) -> None:
        """Remove the mark of a snapshot that is gone, and its files' state."""
        remove_tree(self.path_of(snapshot_id))
        remove_tree(self._state_path(snapshot_id))

    def _state_path(self, snapshot_id: str) -> Path:
        return self._folder / f"{snapshot_id}.read"

    def path_of(self, snapshot_id: str) -> Path:
        """Where the mark of a snapshot lies, or would."""
        return self._folder / f"{snapshot_id}.json"

    @staticmethod
    def _read(path: Path) -> dict[str, str] | None:
        """The mark, or None where there is none that can be read."""
        try:
            return unseal(path.read_bytes(), str(path))
        except (OSError, CorruptionError):
            return None
