"""Watched experts and what became of them: a sealed record of each, compared with the data.

The folders of the inbox are watched, and checkpoints elsewhere that recipes name. What `stat` tells
of a folder's files gives a token that changes with them; no file is opened here.

The record is the only memory: which content was indexed last, how often a run was asked for this
one, and why it failed. A run that is killed, cancelled or never starts is asked for again, and so
is one that its surroundings failed, later each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mergepipe_pipeline.checkpoints.open_checkpoint import is_shard
from mergepipe_pipeline.deploy.retry import (
    MOST_ATTEMPTS,
    SILENT,
    Fault,
    fault_of_exception,
    left_s,
    pause_s,
)
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.facts.offline import offline_at
from mergepipe_pipeline.resolution.locate import expected_place
from mergepipe_pipeline.storage.forms import keep_record, kept_record
from mergepipe_pipeline.storage.locks import locked
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.warehouse import Warehouse

_WEIGHTS = (".safetensors", ".distcp")
#: Failures of one content after which it is asked for no more. Those of the surroundings, and runs
#: that were killed, are none: they say nothing about the expert.
MAX_FAILURES = MOST_ATTEMPTS
#: The token of no content.
_CHANGED = "changed meanwhile"


class Stamp(NamedTuple):
    """One file of a folder: its name, size in bytes, and time of last change in nanoseconds."""

    name: str
    nbytes: int
    mtime_ns: int


def stamps_of(folder: Path) -> tuple[tuple[Stamp, ...], int]:
    """All in a folder but folders, in name order, and when any of it changed last (ns since 1970).

    Of links, what they lead to; of a single file, its own. The time is the system's own (ctime),
    since copies that keep times set the other one back. Raises OSError.
    """
    if folder.is_file():
        stat = folder.stat()
        return (Stamp(text_of(folder.name), stat.st_size, stat.st_mtime_ns),), stat.st_ctime_ns
    stamps, changed_ns = [], 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    continue
                stat = entry.stat()
            except OSError:  # it is gone already, or a link to nothing
                continue
            stamps.append(Stamp(text_of(entry.name), stat.st_size, stat.st_mtime_ns))
            changed_ns = max(changed_ns, stat.st_ctime_ns)
    return tuple(sorted(stamps)), changed_ns


def token_of(stamps: Sequence[Stamp], outside: str | None = None) -> str:
    """A short text that changes with any file's name, size or time.

    `outside` is the place of files that do not lie in the inbox, as it is recorded; the text
    changes with it, too.
    """
    return digest_json(stamps if outside is None else [outside, stamps])[:16]


def weights(stamps: Sequence[Stamp]) -> list[str]:
    """The names of the weight files."""
    return [s.name for s in stamps if s.name.endswith(_WEIGHTS)]


def half_replaced(before: Sequence[Stamp], after: Sequence[Stamp]) -> str | None:
    """In a few words, whether some shards of a set are new and others as they were; else None."""
    shards = {s for s in after if is_shard(s.name)}
    old = shards & set(before)
    if not old or old == shards:
        return None
    new = len(shards - old)
    return f"{new} of {len(shards)} shards are new, the others are of the last version"


class State(StrEnum):
    """How far the work on a content is."""

    #: Nobody has begun.
    NEW = "new"
    #: Somebody has begun, and not said how it ended: it goes on, or was killed.
    BEGUN = "begun"
    #: It ended for a reason that `Work.error` says.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Work:
    """The index, or the packing, of one content.

    `tries` were made of it, of which `failures` failed by the content's own fault; `error` says why
    the last one failed.
    """

    tries: int = 0
    failures: int = 0
    state: State = State.NEW
    error: str = ""

    @property
    def last_error(self) -> str:
        """Why the last try gave nothing; "" if there is none that has ended."""
        return SILENT if self.state is State.BEGUN else self.error

    @property
    def is_given_up(self) -> bool:
        """Whether it failed so often that nobody asks for it again."""
        return self.failures >= MAX_FAILURES

    def begun(self) -> Work:
        """The same while somebody works on it, and for ever if that is killed."""
        return replace(self, state=State.BEGUN)

    def failed(self, error: str, *, is_own: bool) -> Work:
        """The same after a failure, by its own fault or that of the surroundings."""
        return replace(self, failures=self.failures + is_own, state=State.FAILED, error=error)


@dataclass(frozen=True, slots=True)
class Packed:
    """The content that was packed last: its token, its packs, and the bases they are against."""

    token: str = ""
    packs: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrival:
    """The record of one expert that is watched; times in seconds since 1970.

    `indexed` is the token of the content that was indexed last, `stamps` its files. `index` and
    `packing` are of the content `token`; `asked` counts the runs of all contents, so that no two
    have one key. `landed` is the token of what `land` put there whole, `event` the one of which a
    landing followed last.
    """

    token: str = ""
    indexed: str = ""
    stamps: tuple[Stamp, ...] = ()
    asked: int = 0
    asked_s: float = 0.0
    landed: str = ""
    event: str = ""
    index: Work = Work()
    packing: Work = Work()
    packed: Packed = Packed()

    def of(self, token: str) -> Arrival:
        """The same, with the work on another content begun anew."""
        is_same = token == self.token
        return self if is_same else replace(self, token=token, index=Work(), packing=Work())

    @property
    def is_under_way(self) -> bool:
        """Whether a run was asked for its index and has not told how it ended.

        Nobody waits for one of which the third was killed.
        """
        is_asked = 0 < self.index.tries <= MAX_FAILURES and not self.index.is_given_up
        return is_asked and self.index.state is not State.FAILED

    @property
    def was_killed(self) -> bool:
        """Whether the last index or packing of its content was killed while it worked on it."""
        return State.BEGUN in (self.index.state, self.packing.state)

    def left_s(self, retry_s: float) -> float:
        """Seconds until a run may be asked for again; `retry_s` is the first wait."""
        tries = max(self.index.tries, self.packing.tries)
        return left_s(pause_s(retry_s, tries), time.time() - self.asked_s) if tries else 0.0


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
    with suppress(OSError):
        return kept_record(path, Arrival) or Arrival()
    return Arrival()


def place_of(warehouse: Warehouse, name: str) -> Path | None:
    """Where an expert's files lie: in the inbox, else where it is registered; None if nowhere here.

    Addresses and packs are not watched: who reads one compares.
    """
    # A mount that does not answer is no reason to look at no other.
    catalog, folder, root, offline = warehouse.catalog, warehouse.inbox / name, "", None
    try:
        root = catalog.root(name) if name in catalog else ""
    except CorruptionError:
        if not os.path.exists(folder):  # what landed becomes a new version, past the damaged one
            raise
    with suppress(CorruptionError):  # then its folder is one without weights
        offline = offline_at(warehouse, root)
    if os.path.exists(folder) and not (offline and folder.samefile(root)):
        return folder
    if offline or not root or "://" in root:
        return None
    place = expected_place(warehouse, name, root)
    return place if os.path.exists(place) else None


@dataclass(frozen=True, slots=True)
class Found:
    """An expert as it lies there now: its files, when one changed last, and what is known.

    `token` changes with any of its files, and outside of the inbox with their place; `known` is the
    record, whose work is that on this content.
    """

    place: Path
    stamps: tuple[Stamp, ...]
    changed_ns: int
    token: str
    known: Arrival

    @property
    def is_indexed(self) -> bool:
        """Whether it was indexed as it is."""
        return self.known.indexed == self.token


def found_at(warehouse: Warehouse, name: str, place: Path) -> Found:
    """Look at a place under a name. Raises OSError."""
    stamps, changed_ns = stamps_of(place)
    is_landed = place.parent == warehouse.inbox
    token = token_of(stamps, None if is_landed else warehouse.roots.recorded(str(place)))
    return Found(place, stamps, changed_ns, token, arrival(warehouse, name).of(token))


def found(warehouse: Warehouse, name: str) -> Found | None:
    """Look at an expert; None where nothing lies under the name here. Raises OSError."""
    place = place_of(warehouse, name)
    return found_at(warehouse, name, place) if place else None


def ask(warehouse: Warehouse, name: str, token: str) -> str:
    """Remember that a run is asked for; the key of the run, which no other one has."""

    def once_more(now: Arrival) -> Arrival:
        known = now.of(token)
        index = replace(known.index, tries=known.index.tries + 1)
        return replace(known, asked=known.asked + 1, asked_s=time.time(), index=index)

    return f"{name}:{token}:{_update(warehouse, name, once_more).asked}"


def mark_landed(warehouse: Warehouse, name: str, token: str) -> None:
    """Remember that a folder of this content is whole, before it gets its name."""
    _update(warehouse, name, lambda now: replace(now, landed=token))


@contextmanager
def landing_of(warehouse: Warehouse, name: str, event: str) -> Iterator[bool]:
    """Whether what an event made has yet to land; what lands it is remembered to have landed.

    One process at a time lands for events, so that nothing lands twice.
    """
    with locked(warehouse.arrivals / ".landing"):
        is_due = arrival(warehouse, name).event != event
        yield is_due
        if is_due:
            _update(warehouse, name, lambda now: replace(now, event=event))


@contextmanager
def packing(warehouse: Warehouse, name: str) -> Iterator[None]:
    """Count a packing of the indexed content before it begins, and how it fails."""

    def begin(now: Arrival) -> Arrival:
        return replace(now, packing=replace(now.packing.begun(), tries=now.packing.tries + 1))

    begun = _update(warehouse, name, begin).packing
    try:
        yield
    except (MergePipeError, OSError) as error:
        is_own = fault_of_exception(error) is not Fault.SURROUNDINGS
        failed = begun.failed(str(error), is_own=is_own)
        _update(warehouse, name, lambda now: replace(now, packing=failed))
        raise


def mark_packed(
    warehouse: Warehouse, name: str, packs: Sequence[str], bases: Sequence[str]
) -> None:
    """Remember into which packs the indexed content went, against which bases."""

    def change(now: Arrival) -> Arrival:
        done = Packed(now.indexed, tuple(packs), tuple(bases))
        return replace(now, packed=done, index=Work(), packing=Work())

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
    there = found(warehouse, name)
    if there is None:  # an address, or nothing
        yield
        return
    begun = there.known.index.begun()

    def say(index: Work, **more: Any) -> None:
        def change(now: Arrival) -> Arrival:
            # Runs may be asked for meanwhile.
            known = now.of(there.token)
            tries = known.index.tries if index.state is not State.NEW else 0
            return replace(known, index=replace(index, tries=tries), **more)

        _update(warehouse, name, change)

    say(begun)
    try:
        yield
    except Exception as error:
        is_said = isinstance(error, MergePipeError)
        said = str(error) if is_said else f"{type(error).__name__}: {error}"
        is_own = fault_of_exception(error) is not Fault.SURROUNDINGS and _holds(there)
        say(begun.failed(said, is_own=is_own))
        raise
    except BaseException:  # somebody cancelled the run
        say(begun.failed("its run was cancelled", is_own=False))
        raise
    # What changed meanwhile may be recorded half new, whatever comes after.
    say(Work(), indexed=there.token if _holds(there) else _CHANGED, stamps=there.stamps)


def _holds(found: Found) -> bool:
    """Whether the files are still those that were found; not where they cannot be read."""
    try:
        return found.place.exists() and stamps_of(found.place)[0] == found.stamps
    except OSError:
        return False


def _update(warehouse: Warehouse, name: str, change: Callable[[Arrival], Arrival]) -> Arrival:
    """Change the record of a folder, which sensors, runs and people may do at the same time."""
    with locked(warehouse.arrivals / ".lock"):
        changed = change(arrival(warehouse, name))
        keep_record(warehouse.arrival_path(name), changed)
    return changed
