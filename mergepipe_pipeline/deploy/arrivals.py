"""What became of each expert that is watched: a sealed record beside the data, compared with it.

The folders of the inbox are watched, and checkpoints elsewhere that recipes name.

The record is the only memory: which content was indexed last, how often a run was asked for this
one, and why it failed. A run that is killed, cancelled or never starts is asked for again, and so
is one that its surroundings failed, later each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.deploy.faults import SILENT, Fault, fault_of_exception
from mergepipe_pipeline.deploy.retry import MOST_ATTEMPTS, left_s, pause_s
from mergepipe_pipeline.deploy.stamps import Stamp, stamps_of, token_of
from mergepipe_pipeline.digest import seal, unseal
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.resolution.locate import expected_place
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.storage.locks import locked
from mergepipe_pipeline.warehouse import Warehouse

#: Failures of one content after which it is asked for no more. Those of the surroundings, and runs
#: that were killed, are none: they say nothing about the expert.
MAX_FAILURES = MOST_ATTEMPTS
#: The token of no content.
_CHANGED = "changed meanwhile"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of one expert that is watched; times in seconds since 1970.

    `indexed` is the token of the content that was indexed last, `stamps` its files. `tries`,
    `failures` and `error` are of the content `token`; `asked` counts the runs of all contents, so
    that no two have one key. `landed` is the token of what `land` put there whole.

    `packed` is the token of the content that was packed last, into `packs`, against the bases
    `packed_against` (see `deploy.packing`). Since then packing was begun `pack_tries` times, and
    failed `unpacked` times by its own fault, at last for the reason `pack_error`.
    """

    token: str = ""
    indexed: str = ""
    stamps: tuple[Stamp, ...] = ()
    asked: int = 0
    asked_s: float = 0.0
    tries: int = 0
    failures: int = 0
    error: str = ""
    landed: str = ""
    packed: str = ""
    packs: tuple[str, ...] = ()
    packed_against: tuple[str, ...] = ()
    unpacked: int = 0
    pack_error: str = ""
    pack_tries: int = 0

    def of(self, token: str) -> Arrival:
        """The same, with the counts of another content begun anew."""
        if token == self.token:
            return self
        fresh = replace(self, token=token, tries=0, failures=0, error="")
        return replace(fresh, unpacked=0, pack_tries=0, pack_error="")

    @property
    def is_quarantined(self) -> bool:
        """Whether its content failed so often that nobody asks for it again."""
        return self.failures >= MAX_FAILURES

    @property
    def is_under_way(self) -> bool:
        """Whether a run was asked for its content and has not told how it ended.

        Nobody waits for one of which the third was killed.
        """
        is_asked = 0 < self.tries <= MAX_FAILURES and not self.is_quarantined
        return is_asked and self.error in ("", SILENT)

    @property
    def was_killed(self) -> bool:
        """Whether the last index or packing of its content was killed while it worked on it."""
        return SILENT in (self.error, self.pack_error)

    def left_s(self, retry_s: float) -> float:
        """Seconds until a run may be asked for again; `retry_s` is the first wait."""
        if not self.tries:
            return 0.0
        return left_s(pause_s(retry_s, self.tries), time.time() - self.asked_s)


def arrival(warehouse: Warehouse, name: str) -> Arrival:
    """The record of an expert; a fresh one where there is none or it is damaged."""
    path = warehouse.arrival_path(name)
    try:
        stat = path.stat()
    except FileNotFoundError:
        return Arrival()
    return _read(path, stat.st_ino, stat.st_mtime_ns)


@lru_cache(maxsize=1 << 14)
def _read(path: Path, inode: int, mtime_ns: int) -> Arrival:
    """The record in a file; inode and time tell it from those before, each a file of its own."""
    try:
        value = unseal(path.read_bytes(), str(path))
        stamps = tuple(Stamp(*stamp) for stamp in value.pop("stamps"))
        # A version before packs has none.
        packs, bases = (tuple(value.pop(key, ())) for key in ("packs", "packed_against"))
        return Arrival(**value, stamps=stamps, packs=packs, packed_against=bases)
    except (OSError, CorruptionError, KeyError, TypeError):
        return Arrival()


def place_of(warehouse: Warehouse, catalog: Catalog, name: str) -> Path | None:
    """Where an expert's files lie: in the inbox, else where it is registered; None if nowhere here.

    Addresses are not watched: who reads one compares.
    """
    # A mount that does not answer is no reason to look at no other.
    folder = warehouse.inbox / name
    if os.path.exists(folder):
        return folder
    root = catalog.root(name) if name in catalog else ""
    if not root or "://" in root:
        return None
    place = expected_place(warehouse, name, root)
    return place if os.path.exists(place) else None


def token_at(warehouse: Warehouse, place: Path, stamps: Sequence[Stamp]) -> str:
    """The token of the files with these stamps at a place."""
    is_landed = place.parent == warehouse.inbox
    return token_of(stamps, None if is_landed else warehouse.roots.recorded(str(place)))


def ask(warehouse: Warehouse, name: str, token: str) -> str:
    """Remember that a run is asked for; the key of the run, which no other one has."""

    def once_more(now: Arrival) -> Arrival:
        known = now.of(token)
        return replace(known, asked=known.asked + 1, asked_s=time.time(), tries=known.tries + 1)

    return f"{name}:{token}:{_update(warehouse, name, once_more).asked}"


def mark_landed(warehouse: Warehouse, name: str, token: str) -> None:
    """Remember that a folder of this content is whole, before it gets its name."""
    _update(warehouse, name, lambda now: replace(now, landed=token))


@contextmanager
def packing(warehouse: Warehouse, name: str) -> Iterator[None]:
    """Count a packing of the indexed content before it begins, and how it fails."""

    def begin(now: Arrival) -> Arrival:
        n = now.pack_tries + 1
        return replace(now, tries=n, pack_tries=n, pack_error=SILENT)

    unpacked = _update(warehouse, name, begin).unpacked
    try:
        yield
    except (MergePipeError, OSError) as error:
        failed = unpacked + (fault_of_exception(error) is not Fault.SURROUNDINGS)
        said = str(error)
        _update(warehouse, name, lambda now: replace(now, unpacked=failed, pack_error=said))
        raise


def mark_packed(
    warehouse: Warehouse, name: str, packs: Sequence[str], bases: Sequence[str]
) -> None:
    """Remember into which packs the indexed content went, against which bases."""

    def change(now: Arrival) -> Arrival:
        done = replace(now, packed=now.indexed, packs=tuple(packs), packed_against=tuple(bases))
        return replace(done, tries=0, unpacked=0, pack_tries=0, pack_error="")

    _update(warehouse, name, change)


def mark_changed(warehouse: Warehouse, name: str) -> None:
    """Remember that a folder is not as it was indexed, though its sizes and times are."""
    _update(warehouse, name, lambda now: replace(now, indexed=_CHANGED))


@contextmanager
def attempted(warehouse: Warehouse, name: str) -> Iterator[None]:
    """Remember how work on an expert ends; before it begins, that it was killed: nobody tells that.

    A failure counts unless it is the surroundings', or the files are not those of before: they may
    be gone with their mount.
    """
    place = place_of(warehouse, warehouse.catalog, name)
    if place is None:  # an address, or nothing
        yield
        return
    stamps, _ = stamps_of(place)
    token = token_at(warehouse, place, stamps)
    failures = arrival(warehouse, name).of(token).failures

    def say(**what: Any) -> None:
        _update(warehouse, name, lambda now: replace(now.of(token), **what))

    say(error=SILENT)
    try:
        yield
    except Exception as error:
        is_said = isinstance(error, MergePipeError)
        said = str(error) if is_said else f"{type(error).__name__}: {error}"
        is_own = fault_of_exception(error) is not Fault.SURROUNDINGS and _holds(place, stamps)
        say(failures=failures + is_own, error=said)
        raise
    except BaseException:  # somebody cancelled the run
        say(failures=failures, error="its run was cancelled")
        raise
    # What changed meanwhile may be recorded half new, whatever comes after.
    indexed = token if _holds(place, stamps) else _CHANGED
    say(indexed=indexed, stamps=stamps, tries=0, failures=0, error="")


def _holds(place: Path, stamps: Sequence[Stamp]) -> bool:
    """Whether the files at a place are those of these stamps; not where it cannot be read."""
    try:
        return place.exists() and stamps_of(place)[0] == stamps
    except OSError:
        return False


def _update(warehouse: Warehouse, name: str, change: Callable[[Arrival], Arrival]) -> Arrival:
    """Change the record of a folder, which sensors, runs and people may do at the same time."""
    with locked(warehouse.arrivals / ".lock"):
        changed = change(arrival(warehouse, name))
        write_atomic(warehouse.arrival_path(name), seal(asdict(changed)))
    return changed
