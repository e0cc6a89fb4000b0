"""Published names: each ref is a chain of versions, the highest is what readers load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mergepipe_pipeline.domain.snapshot import Ref
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.storage.chain import NAME, VersionChain, chain_names, is_chain


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
        """What `name` stands for. Raises NotFoundError, CorruptionError."""
        current = self._chain(name).current()
        if current is None:
            raise NotFoundError(
                "No such ref",
                where=str(self._refs),
                found=repr(name),
                expected=", ".join(self.names()) or "none exists yet",
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
