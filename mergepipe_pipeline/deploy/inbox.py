"""The inbox: which experts have landed, whether they are whole, and which are to be indexed.

Half-uploaded folders are the normal case. A folder counts once every file that it must have is
there at full length and nothing in it changed for a quiet period; what looks half written or half
replaced waits much longer. A folder that cannot be taken says why, and stops no other. What lies
there is compared with the records of `arrivals`, by names, sizes and times: of a folder that was
indexed as it is, no file is opened. Checkpoints elsewhere that recipes name are watched in the same
way.

Packs are to be there against every base that a recipe merges an expert into: one that is gone, a
base with new contents or a new recipe make an expert due again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from mergepipe_pipeline.checkpoints.open_checkpoint import is_complete
from mergepipe_pipeline.deploy.arrivals import (
    MAX_FAILURES,
    Arrival,
    Found,
    Stamp,
    arrival,
    found,
    found_at,
    half_replaced,
    place_of,
    token_of,
    weights,
)
from mergepipe_pipeline.deploy.recipe_files import (
    RecipeFile,
    bases_read,
    names_read,
    not_registered,
)
from mergepipe_pipeline.deploy.runs import run_problem
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.bounds import NAME, NAME_FORM
from mergepipe_pipeline.domain.recipe import Budget
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.facts.quarantine import quarantine_of, quarantined_names
from mergepipe_pipeline.recipe.selectors import would_take
from mergepipe_pipeline.storage.regular import text_of, unwritten
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.warehouse import Warehouse

#: How many quiet periods a folder waits that looks half written or half replaced: ten minutes with
#: the usual one, which is short, since headers already prove that every file has its full length.
DOUBT_PERIODS = 150

#: Experts that one sentence lists: every tick stores it.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class InboxEntry:
    """One expert that is watched: `token` changes with any file's name, size or mtime.

    `is_indexed` says that the catalog knows it as it is, `is_pack_due` that it is to be packed all
    the same. `waiting` says in one sentence why it is not taken yet, or is None; `fault` why
    recipes cannot use what lies there until somebody does something, in words that do not change
    meanwhile. In `name`, bytes that are no UTF-8 are shown as escapes; such a folder always waits.
    Over one that `was_killed` the last run was: others are not to share the next.
    """

    name: str
    token: str
    waiting: str | None
    is_indexed: bool = False
    is_pack_due: bool = False
    was_killed: bool = False
    fault: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is to be indexed now."""
        return self.waiting is None and (self.is_pack_due or not self.is_indexed)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long folders wait, in seconds: for quiet, and before a run is asked for again.

    `packs`: experts are packed when they are indexed.
    """

    quiet_s: float
    retry_s: float = 30.0
    packs: bool = False

    @property
    def doubt_s(self) -> float:
        """The quiet that what looks half done must have."""
        return DOUBT_PERIODS * self.quiet_s


def scan_inbox(
    warehouse: Warehouse,
    patience: Patience | float,
    under_way: Collection[str] = (),
    most: int | None = None,
) -> tuple[InboxEntry, ...]:
    """Every expert folder of the inbox, and what recipes name outside it, in name order.

    Files and folders starting with a dot or an underscore are skipped; a link counts as the folder
    it leads to, also where that is gone. `patience` may be the quiet period alone, in seconds.
    Those `under_way` wait for their run. At most `most` become ready; the next scan takes more.
    """
    if not isinstance(patience, Patience):
        patience = Patience(patience)
    entries: list[InboxEntry] = []
    ready = 0
    wanted = PacksWanted(warehouse) if patience.packs else None
    places = {folder.name: folder for folder in _watched(warehouse)}
    catalog = warehouse.catalog
    digested, decided = catalog.digested(), set(quarantined_names(warehouse))
    for name in names_read(warehouse) - places.keys():
        place = place_of(warehouse, name) if NAME.fullmatch(name) else None
        if place is not None:
            places[name] = place
    for key, place in sorted(places.items()):
        full = most is not None and ready >= most
        landed = _landed(warehouse, key, place, patience, under_way, digested, full=full)
        if landed.is_indexed and not full and wanted and landed.name not in under_way:
            known = arrival(warehouse, landed.name)
            due, waiting = wanted.due(landed.name, known, patience.retry_s)
            landed = replace(landed, is_pack_due=due, waiting=waiting, was_killed=known.was_killed)
        if landed.is_indexed and landed.name in decided:
            landed = replace(landed, fault=_kept_out(warehouse, landed.name))
        ready += landed.is_ready
        entries.append(landed)
    return tuple(entries)


def reason_to_wait_for_joining(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """Which experts the selectors of a recipe take as soon as they are indexed, which is soon.

    They lie in the inbox whole, are not known yet, and no index of them has failed. What lands
    together joins together. None if there are none.
    """
    catalog, selectors = warehouse.catalog, [s.selector for s in file.selected]
    joining = sorted(
        folder.name
        for folder in (_watched(warehouse) if selectors else ())
        if any(would_take(s, folder.name, catalog.tags) for s in selectors)
        and NAME.fullmatch(folder.name)
        and folder.name not in catalog
        and _is_coming(warehouse, folder)
    )
    reason = f"it waits for the index of what is about to join: {listed(joining, _MOST_NAMED)}"
    return reason if joining else None


def reason_not_indexed(warehouse: Warehouse, name: str) -> str | None:
    """Why what lies under a name is not indexed until somebody does something; None if it may be.

    What changed a moment ago may be half copied, and is said to be.
    """
    try:
        there = found(warehouse, name) if NAME.fullmatch(name) else None
        if there is None:
            return None
        fault = _failed(there.known) or _unwhole(there.place, there.stamps) or _doubt(there)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    since = time.strftime("%F %R", time.localtime(there.changed_ns / 1e9))
    return fault and f"{name} cannot be used as it is since {since}: {fault}"


def arrivals_at_fault(warehouse: Warehouse) -> dict[str, str]:
    """Why folders of the inbox are not indexed until somebody does something, by name."""
    found: dict[str, str] = {}
    for folder in _watched(warehouse) if warehouse.inbox.is_dir() else ():
        with suppress(OSError):
            if found_at(warehouse, folder.name, folder).is_indexed:
                continue
        if fault := reason_not_indexed(warehouse, folder.name):
            found[folder.name] = fault
    return dict(sorted(found.items()))


def problem_now(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """Why a recipe cannot be used, as its file says; of inputs that lie in the inbox, why not yet.

    That changes while they are copied, for which definitions are not to be loaded anew.
    """
    if file.problem is None:
        return None
    missing = _missing(warehouse, file)
    reasons = filter(None, (reason_not_indexed(warehouse, m) for m in missing))
    absent = [m for m in missing if place_of(warehouse, m) is None] or missing
    return "; ".join(reasons) or (not_registered(absent) if absent else file.problem)


def reason_to_wait_for_index(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """Which inputs of a recipe are indexed soon; None unless these are all that it lacks.

    They lie in the inbox whole, as those of `reason_to_wait_for_joining`.
    """
    missing = _missing(warehouse, file)
    if not missing or not all(
        NAME.fullmatch(m) and _is_coming(warehouse, warehouse.inbox / m) for m in missing
    ):
        return None
    return f"it waits for the index of what lies in the inbox: {listed(missing, _MOST_NAMED)}"


def _missing(warehouse: Warehouse, file: RecipeFile) -> list[str]:
    return [m for m in file.members if m not in warehouse.catalog]


def _is_coming(warehouse: Warehouse, folder: Path) -> bool:
    try:
        found = found_at(warehouse, folder.name, folder)
        if found.known.index.tries:
            return found.known.is_under_way
        return is_complete(str(folder)) is None and _doubt(found) is None
    except OSError:
        return False


def _watched(warehouse: Warehouse) -> Iterator[Path]:
    """The folders of the inbox but runs, and experts whose weight files are offline."""
    offline = {os.path.realpath(root) for root in warehouse.offline.roots()}
    with os.scandir(warehouse.inbox) as entries:
        for entry in entries:
            is_offline = offline and os.path.realpath(entry.path) in offline
            if entry.name[0] in "._" or not _is_folder(entry) or is_offline:
                continue
            with suppress(OSError):
                if run_problem(warehouse, entry.name) == "":
                    continue
            yield Path(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:  # a link to where this user may not look
        return True


def _landed(
    warehouse: Warehouse,
    key: str,
    folder: Path,
    patience: Patience,
    under_way: Collection[str],
    digested: Collection[str],
    *,
    full: bool,
) -> InboxEntry:
    name = text_of(key)
    if not NAME.fullmatch(key):
        why = f"{name!r} cannot be a name, which is {NAME_FORM}: rename the folder"
        return InboxEntry(name, digest_json(name)[:16], why)
    fault = None
    try:
        found = found_at(warehouse, name, folder)
        token, known = found.token, found.known
        if problem := run_problem(warehouse, key):
            return InboxEntry(name, token, problem, fault=problem)
        # What the catalog has lost is found again as it was found first.
        if found.is_indexed and warehouse.catalog.has_content(name, digested):
            return InboxEntry(name, token, None, is_indexed=True)
        if name in under_way:
            return InboxEntry(name, token, "a run indexes it")
        waiting, fault = _asked_already(known, patience), _failed(known)
        if waiting is None and full:
            waiting = "others land before it; its turn comes"
        if waiting is None:
            waiting, fault = _unfinished(found, patience)
    except OSError as error:
        why = f"it cannot be read: {error.strerror}"
        return InboxEntry(name, digest_json(str(error))[:16], why, fault=why)
    return InboxEntry(name, token, waiting, was_killed=known.was_killed, fault=fault)


def _kept_out(warehouse: Warehouse, name: str) -> str | None:
    try:
        decision = quarantine_of(warehouse, name)
    except MergePipeError as error:
        return str(error)
    return None if decision is None else str(decision)


def _failed(known: Arrival) -> str | None:
    """How the last index of a content failed by its own fault; None if it did not."""
    error = known.index.last_error
    if known.index.is_given_up:
        return (
            f"given up after {MAX_FAILURES} failures; other content is tried anew, and so is "
            f"this when expert_index is materialized by hand. The last failure: {error}"
        )
    return f"its index failed: {error}" if known.index.failures and error else None


def _asked_already(known: Arrival, patience: Patience) -> str | None:
    """Why no run is asked for that was asked for before."""
    if known.index.is_given_up:
        return _failed(known)
    left_s = known.left_s(patience.retry_s)
    if left_s <= 0:
        return None
    error = known.index.last_error
    failed = f"; the last failure: {error}" if error else ""
    return f"run {known.index.tries} for it did not end well; the next in {left_s:.0f} s{failed}"


def _unfinished(found: Found, patience: Patience) -> tuple[str | None, str | None]:
    """Why a folder is not taken as it lies there, and what is wrong with it, if that is why."""
    if found.known.landed == token_of(found.stamps):  # `land` put it there whole
        fault = is_complete(str(found.place))
        return fault, fault
    age_s = (time.time_ns() - found.changed_ns) / 1e9
    if age_s < 0:
        return (
            f"its files changed {-age_s:.0f} s after now, as the clock of this machine says, which "
            "it waits for; if that clock is right, `touch` them, and they are taken at once"
        ), None
    if age_s < patience.quiet_s:
        return (
            f"its files changed {age_s:.0f} s ago; it is taken after {patience.quiet_s:.0f} s of "
            "quiet"
        ), None
    fault = is_complete(str(found.place))
    if fault is None and age_s < patience.doubt_s and (doubt := _doubt(found)):
        return (
            f"{doubt}; if that is meant, it is taken in {patience.doubt_s - age_s:.0f} s. "
            "`mergepipe land` lands a folder at once"
        ), doubt
    return fault, fault


@lru_cache(maxsize=1024)  # every recipe that names it asks at each tick
def _unwhole(folder: Path, stamps: tuple[Stamp, ...]) -> str | None:
    """Why a folder is no whole checkpoint while its files have these stamps."""
    return is_complete(str(folder))


def _doubt(found: Found) -> str | None:
    """What looks half done in a folder that is whole by its headers."""
    known, folder = found.known, found.place
    if known.indexed and (half := half_replaced(known.stamps, found.stamps)):
        return half
    for name in weights(found.stamps):
        if doubt := unwritten(folder if folder.is_file() else folder / name):
            return f"{name} {doubt}"
    return None


def reason_to_wait_for_packs(warehouse: Warehouse, file: RecipeFile) -> str | None:
    """Which packs a recipe with a budget waits for: without them it would buy far less.

    Not for ever: after `MAX_FAILURES` packings, whatever failed them, it waits no more, though an
    expert is packed as soon as its surroundings let it be. None for nothing.
    """
    if all(stage.budget == Budget() for stage in file.stages):
        return None
    wanted = PacksWanted(warehouse)
    known = {name: arrival(warehouse, name) for name in file.members}
    names = [
        n
        for n, seen in known.items()
        if seen.indexed and seen.packing.tries < MAX_FAILURES and wanted.is_awaited(n, seen)
    ]
    return f"it waits for the packs of {', '.join(names)}" if names else None


class PacksWanted:
    """The packs that recipes and registrations of a warehouse want now, each read once."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._warehouse = warehouse

    def bases_of(self, name: str) -> dict[str, str]:
        """The registered bases of an expert, each as `base@checkpoint id`; in name order."""
        bases = {*self._read.get(name, ())}
        if name in self._registered and self._registered[name][1]:
            bases.add(self._registered[name][1])
        return {
            base: f"{base}@{self._registered[base][0]}"
            for base in sorted(bases)
            if base in self._registered
        }

    def due(self, name: str, known: Arrival, retry_s: float) -> tuple[bool, str | None]:
        """Whether an expert that is indexed is to be packed now; why not, if it is tried again."""
        if not self.is_awaited(name, known):
            return False, None
        left_s = known.left_s(retry_s)
        if left_s <= 0 or not known.packing.tries:
            return left_s <= 0, None
        return False, (
            f"packing {known.packing.tries} for it did not end well; the next in {left_s:.0f} s; "
            f"the last failure: {known.packing.last_error}"
        )

    def is_awaited(self, name: str, known: Arrival) -> bool:
        """Whether an expert that is indexed lacks a pack that is to be made, now or later."""
        bases = set(self.bases_of(name).values())
        is_packed = not bases or (
            known.packed.token == known.indexed
            and bases <= set(known.packed.bases)
            and all(self._warehouse.packs.path(pack_id).is_dir() for pack_id in known.packed.packs)
        )
        return not is_packed and not known.packing.is_given_up

    @cached_property
    def _read(self) -> dict[str, set[str]]:
        return bases_read(self._warehouse)

    @cached_property
    def _registered(self) -> dict[str, tuple[str, str]]:
        """Name to the current version's checkpoint id and base, "" without one."""
        registered: dict[str, tuple[str, str]] = {}
        with suppress(MergePipeError):
            for name, _, checkpoint_id, base, _ in self._warehouse.catalog.registrations():
                registered[name] = checkpoint_id, base or ""
        return registered
