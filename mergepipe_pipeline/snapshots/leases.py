"""The leases of living processes, by which a collection leaves alone what they need.

A lease is a file that its process keeps locked. The system drops the lock of a process that ends,
however it ends, so a lease that nobody holds is one that nobody needs. A lease is made while no
collection runs, and before what it names is looked up: what is found then stays.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.storage.atomic import locked_file
from mergepipe_pipeline.storage.locks import is_held, locked, locked_there


@dataclass(frozen=True, slots=True)
class Need:
    """The things that must stay: layers by key, the snapshots of plans by the plan's id, and by ids
    snapshots and packs.
    """

    layer_keys: frozenset[str] = frozenset()
    plan_ids: frozenset[str] = frozenset()
    snapshot_ids: frozenset[str] = frozenset()
    pack_ids: frozenset[str] = frozenset()

    def __or__(self, other: Need) -> Need:
        return Need(
            self.layer_keys | other.layer_keys,
            self.plan_ids | other.plan_ids,
            self.snapshot_ids | other.snapshot_ids,
            self.pack_ids | other.pack_ids,
        )

    def sealed(self) -> bytes:
        """The bytes of a lease's file."""
        return seal({f.name: sorted(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class Living:
    """The leases of living processes, and the files of dead ones.

    `names` are the leases' own. What appeared since `since_ns` may be on its way into one of them.
    `unreadable` are leases that are held and say nothing; `judged_by_age` is True where the file
    system has no locks.
    """

    need: Need
    names: frozenset[str]
    since_ns: int | None
    unreadable: tuple[Path, ...]
    dead: tuple[Path, ...]
    judged_by_age: bool


class Leases:
    """The folder `leases` of a warehouse."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, need: Need, label: str = "merge") -> Iterator[str]:
        """Keep what is needed until the context ends; yields the name of the lease.

        Waits for a collection that runs. Raises StorageFullError.
        """
        name = f"{label}-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        with ExitStack() as stack:
            with self._gate(shared=True):
                stack.enter_context(locked_file(self._folder / f"{name}.json", need.sealed()))
            yield name

    def alone(self) -> AbstractContextManager[None]:
        """While the context lasts, nobody gets a lease, and no other collection runs."""
        return self._gate(shared=False)

    def watched(self) -> AbstractContextManager[None]:
        """Do as `alone` for readers, who may write nothing; others go on if there is no lock."""
        return locked_there(self._gate_path)

    def living(self, older_than_s: float) -> Living:
        """Who lives now. Where there are no locks, whoever is younger than `older_than_s`."""
        need, names, since_ns = Need(), set(), None
        unreadable, dead, judged_by_age = [], [], False
        for path in sorted(self._folder.glob("*.json")):
            try:
                stat, held = path.stat(), is_held(path)
                data = path.read_bytes()
            except FileNotFoundError:  # its process has just ended
                continue
            judged_by_age |= held is None
            young = time.time() - stat.st_mtime < older_than_s
            if not (young if held is None else held):
                dead.append(path)
                continue
            names.add(path.stem)
            since_ns = min(stat.st_ctime_ns, since_ns or stat.st_ctime_ns)
            try:
                need |= _need(data, path)
            except (CorruptionError, KeyError, TypeError):
                unreadable.append(path)
        return Living(
            need, frozenset(names), since_ns, tuple(unreadable), tuple(dead), judged_by_age
        )

    def _gate(self, *, shared: bool) -> AbstractContextManager[None]:
        return locked(self._gate_path, shared=shared)

    @property
    def _gate_path(self) -> Path:
        return self._folder / ".gate"


def _need(data: bytes, path: Path) -> Need:
    value = unseal(data, str(path))
    return Need(*(frozenset(value[f.name]) for f in fields(Need)))
