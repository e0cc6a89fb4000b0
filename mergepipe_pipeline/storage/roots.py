"""Named roots: records say `models:chat-1`, and each machine says where its `models` is mounted.

Two roots are there without being named: `warehouse`, the warehouse's own folder, and `inbox`. What
lies below no root is recorded by its absolute path. An address (`scheme://…`) stays as it is, but
that of a checkpoint in cold storage, which is a folder of the warehouse.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from mergepipe_pipeline.domain.checkpoint import PACKED
from mergepipe_pipeline.errors import CheckpointError, MergePipeError
from mergepipe_pipeline.storage.json_text import parse_json

ENVIRONMENT = "MERGEPIPE_ROOTS"
FILE = "roots.json"
#: The root that is always the warehouse itself.
WAREHOUSE = "warehouse"
#: The scheme of the address that stands for a place below a root that is not mounted here.
UNMOUNTED = "unmounted"
_NAME = r"[a-z][a-z0-9_-]{0,31}"
_RECORD = re.compile(rf"({_NAME}):(?!//)(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this machine has a root, and who says so: a variable, a file, or nobody ("")."""

    path: Path
    said_by: str = ""

    def has(self, path: Path) -> bool:
        """Whether `path` below it exists, or the root is mounted; an unmounted one is empty."""
        # An existing path needs no look at the root, which may list thousands.
        if not self.said_by or os.path.exists(path):
            return True
        try:
            with os.scandir(self.path) as entries:
                return next(entries, None) is not None
        except OSError:
            return False


@dataclass(frozen=True)
class Roots:
    """The roots of one warehouse on this machine, by name."""

    places: Mapping[str, Place]

    def recorded(self, root: str) -> str:
        """The name of a checkpoint's folder in a record, by the root that lies nearest above it."""
        address = urlsplit(root) if root.startswith(f"{UNMOUNTED}://") else None
        if address is not None:
            return f"{address.netloc}:{unquote(address.path).removeprefix('/')}"
        if root.startswith(PACKED):
            return PACKED + self.recorded(root.removeprefix(PACKED))
        if "://" in root:
            return root
        above = [n for n, p in self.places.items() if Path(root).is_relative_to(p.path)]
        if not above:
            return root
        name = max(above, key=lambda n: len(self.places[n].path.parts))
        return f"{name}:{Path(root).relative_to(self.places[name].path)}"

    def here(self, recorded: str) -> str:
        """The folder on this machine of what a record names.

        Below a root that is not mounted it is an address that cannot be opened: `open_source` says
        why.
        """
        if recorded.startswith(PACKED):
            return PACKED + self.here(recorded.removeprefix(PACKED))
        match = _RECORD.fullmatch(recorded)
        if match is None:
            return recorded
        name, relative = match.groups()
        place = self.places.get(name)
        if place is not None and place.has(place.path / relative):
            return str(place.path / relative)
        query = {} if place is None else {"place": str(place.path), "by": place.said_by}
        return f"{UNMOUNTED}://{name}/{quote(relative)}?{urlencode(query)}"

    def means(self, text: str) -> bool:
        """Whether a text of a user names a place below one of the roots."""
        match = _RECORD.fullmatch(text)
        return match is not None and match[1] in self.places


def roots_of(warehouse: Path) -> Roots:
    """The roots that the variable names, then the warehouse's file, then the two of itself.

    Raises MergePipeError for a wrong value of either.
    """
    places = {WAREHOUSE: Place(warehouse), "inbox": Place((warehouse / "inbox").resolve())}
    for said_by, named in ((FILE, _in_file(warehouse / FILE)), (ENVIRONMENT, _in_environment())):
        for name, text in named:
            path = Path(text).expanduser()
            if not re.fullmatch(_NAME, name) or name == WAREHOUSE or not path.is_absolute():
                raise _refused(said_by, f"{name}={text}")
            places[name] = Place(path.resolve(), said_by)
    return Roots(places)


def with_default_places(warehouse: Path, roots: Roots) -> bytes | None:
    """The bytes of FILE by which other machines learn of roots that only the variable names.

    None if it names all of them. Places in it stay: they are the defaults.
    """
    in_file = dict(_in_file(warehouse / FILE))
    named = {n: str(p.path) for n, p in roots.places.items() if p.said_by == ENVIRONMENT}
    if named.keys() <= in_file.keys():
        return None
    return (json.dumps(named | in_file, indent=1, sort_keys=True) + "\n").encode()


def why_unmounted(root: str) -> str | None:
    """In a few words, why a checkpoint's folder cannot be read here; None if it may be."""
    if not root.startswith(f"{UNMOUNTED}://"):
        return None
    query = parse_qs(urlsplit(root).query)
    if "place" not in query:
        return f"neither {ENVIRONMENT} nor {FILE} says where it is"
    return f"nothing at {query['place'][0]}, where {query['by'][0]} has it"


def refuse_unmounted(root: str) -> NoReturn:
    """Raise CheckpointError for an address that `Roots.here` gave."""
    address = urlsplit(root if "://" in root else f"{UNMOUNTED}://{root}")
    name = address.netloc
    raise CheckpointError(
        f"The root {name!r} is not mounted on this machine",
        where=f"{name}:{unquote(address.path).removeprefix('/')}",
        expected="the folder that another machine registered this checkpoint in",
        found=why_unmounted(address.geturl()),
        next_step=f"mount it, and say where: {ENVIRONMENT}={name}=/path/on/this/machine",
    )


def _in_environment() -> list[tuple[str, str]]:
    parts = [part.strip() for part in os.environ.get(ENVIRONMENT, "").split(",")]
    pairs = [part.partition("=") for part in parts if part]
    return [(name.strip(), path.strip()) for name, _, path in pairs]


def _in_file(path: Path) -> list[tuple[str, str]]:
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise _refused(str(path), str(error)[:200]) from error
    if not isinstance(value, dict):
        raise _refused(str(path), type(value).__name__)
    return [(name, str(place)) for name, place in value.items()]


def _refused(where: str, found: str) -> MergePipeError:
    return MergePipeError(
        "The places of named roots cannot be read",
        where=where,
        expected="names of small letters, digits, _ and -, each with an absolute folder: "
        f"{ENVIRONMENT}=models=/mnt/models,inbox=/mnt/inbox, or the same as an object in {FILE}; "
        f"{WAREHOUSE!r} is always the warehouse",
        found=found,
        next_step="correct it, or leave it out",
    )
