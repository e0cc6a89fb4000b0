"""The inbox: which experts have landed, whether they are whole, and which are to be indexed.

Half-uploaded folders are the normal case. A folder counts once every file that it must have is
there at full length and nothing in it changed for a quiet period; what looks half written or half
replaced waits much longer. A folder that cannot be taken says why, and stops no other. What lies
there is compared with the records of `arrivals`, by names, sizes and times: of a folder that was
indexed as it is, no file is opened. Checkpoints elsewhere that recipes name are watched in the same
way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe_pipeline.deploy.arrivals import MAX_FAILURES, Arrival, arrival, place_of, token_at
from mergepipe_pipeline.deploy.packing import PacksWanted
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, names_read
from mergepipe_pipeline.deploy.stamps import Stamp, half_replaced, stamps_of, token_of, weights
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.recipe.selectors import would_take
from mergepipe_pipeline.storage.chain import NAME, NAME_FORM
from mergepipe_pipeline.storage.open_checkpoint import is_complete
from mergepipe_pipeline.storage.regular import text_of
from mergepipe_pipeline.storage.written import unwritten
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
    the same. `waiting` says in one sentence why it is not taken yet, or is None. In `name`, bytes
    that are no UTF-8 are shown as escapes; such a folder always waits. Over one that `was_killed`
    the last run was: others are not to share the next.
    """

    name: str
    token: str
    waiting: str | None
    is_indexed: bool = False
    is_pack_due: bool = False
    was_killed: bool = False

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
    places = {folder.name: folder for folder in _folders(warehouse.inbox)}
    catalog = warehouse.catalog
    digested = catalog.digested()
    for name in names_read(warehouse) - places.keys():
        place = place_of(warehouse, catalog, name) if NAME.fullmatch(name) else None
        if place is not None:
            places[name] = place
    for key, place in sorted(places.items()):
        full = most is not None and ready >= most
        landed = _landed(warehouse, key, place, patience, under_way, digested, full=full)
        if landed.is_indexed and not full and wanted and landed.name not in under_way:
            known = arrival(warehouse, landed.name)
            is_due = wanted.is_due(landed.name, known, patience.retry_s)
            waiting = wanted.waiting(landed.name, known, patience.retry_s)
            landed = replace(
                landed, is_pack_due=is_due, waiting=waiting, was_killed=known.was_killed
            )
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
        for folder in (_folders(warehouse.inbox) if selectors else ())
        if any(would_take(s, folder.name, catalog.tags) for s in selectors)
        and NAME.fullmatch(folder.name)
        and folder.name not in catalog
        and _is_coming(warehouse, folder)
    )
    reason = f"it waits for the index of what is about to join: {listed(joining, _MOST_NAMED)}"
    return reason if joining else None


def _is_coming(warehouse: Warehouse, folder: Path) -> bool:
    """Whether the next runs of the index take a folder."""
    try:
        stamps, _ = stamps_of(folder)
        known = arrival(warehouse, folder.name).of(token_at(warehouse, folder, stamps))
        if known.tries:
            return known.is_under_way
        return is_complete(str(folder)) is None and _doubt(folder, stamps, known) is None
    except OSError:
        return False


def _folders(inbox: Path) -> Iterator[Path]:
    with os.scandir(inbox) as entries:
        for entry in entries:
            if entry.name[0] not in "._" and _is_folder(entry):
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
    try:
        stamps, changed_ns = stamps_of(folder)
        token = token_at(warehouse, folder, stamps)
        known = arrival(warehouse, name)
        # What the catalog has lost is found again as it was found first.
        if known.indexed == token and warehouse.catalog.has_content(name, digested):
            return InboxEntry(name, token, None, is_indexed=True)
        if name in under_way:
            return InboxEntry(name, token, "a run indexes it")
        waiting = _asked_already(known.of(token), patience)
        if waiting is None and full:
            waiting = "others land before it; its turn comes"
        if waiting is None:
            waiting = _unfinished(folder, stamps, changed_ns, known, patience)
    except OSError as error:
        return InboxEntry(
            name, digest_json(str(error))[:16], f"it cannot be read: {error.strerror}"
        )
    return InboxEntry(name, token, waiting, was_killed=known.of(token).was_killed)


def _asked_already(known: Arrival, patience: Patience) -> str | None:
    """Why no run is asked for that was asked for before."""
    if known.is_quarantined:
        return (
            f"quarantined after {MAX_FAILURES} failures; other content is tried anew, and so is "
            f"this when expert_index is materialized by hand. The last failure: {known.error}"
        )
    left_s = known.left_s(patience.retry_s)
    if left_s <= 0:
        return None
    failed = f"; the last failure: {known.error}" if known.error else ""
    return f"run {known.tries} for it did not end well; the next in {left_s:.0f} s{failed}"


def _unfinished(
    folder: Path, stamps: tuple[Stamp, ...], changed_ns: int, known: Arrival, patience: Patience
) -> str | None:
    """Why a folder is not taken as it lies there."""
    if known.landed == token_of(stamps):  # `land` put it there whole
        return is_complete(str(folder))
    age_s = (time.time_ns() - changed_ns) / 1e9
    if age_s < 0:
        return (
            f"its files changed {-age_s:.0f} s after now, as the clock of this machine says, which "
            "it waits for; if that clock is right, `touch` them, and they are taken at once"
        )
    if age_s < patience.quiet_s:
        return (
            f"its files changed {age_s:.0f} s ago; it is taken after {patience.quiet_s:.0f} s of "
            "quiet"
        )
    waiting = is_complete(str(folder))
    if waiting is None and age_s < patience.doubt_s and (doubt := _doubt(folder, stamps, known)):
        waiting = (
            f"{doubt}; if that is meant, it is taken in {patience.doubt_s - age_s:.0f} s. "
            "`mergepipe land` lands a folder at once"
        )
    return waiting


def _doubt(folder: Path, stamps: tuple[Stamp, ...], known: Arrival) -> str | None:
    """What looks half done in a folder that is whole by its headers."""
    if known.indexed and (half := half_replaced(known.stamps, stamps)):
        return half
    for name in weights(stamps):
        if doubt := unwritten(folder if folder.is_file() else folder / name):
            return f"{name} {doubt}"
    return None
