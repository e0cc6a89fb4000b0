"""Which snapshots somebody asked for: a property of requests, so it is kept beside the snapshots.

A snapshot without a mark is a result. `stage` is written once, for a snapshot that a stage has just
made; `result` replaces it when somebody merges the same as a result, and stays. A result keeps its
mark, whichever of the two comes last. `refused` replaces each of them when a gate refuses the
snapshot, with the recipe and the reason, until a gate lets it pass or somebody merges it again.
`collected` stays where a result was removed since only old versions of refs named it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import create_exclusive, remove_tree, write_atomic

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

    def forget(self, snapshot_id: str) -> None:
        """Remove the mark of a snapshot that is gone."""
        remove_tree(self.path_of(snapshot_id))

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
