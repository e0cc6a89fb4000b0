"""Which registered experts the selectors of recipes take, and why they leave others out.

The one place that decides so, for commands, Python and Dagster alike. It reads names, tags and
records; no file of a checkpoint but the manifest that a merged model has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from mergepipe_pipeline.domain.selector import Selected, Selector
from mergepipe_pipeline.domain.snapshot import MANIFEST
from mergepipe_pipeline.domain.training_run import run_of, step_of
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.facts.quarantine import quarantine_of
from mergepipe_pipeline.recipe.problems import shown, suggest
from mergepipe_pipeline.recipe.references import UnreadableReference, parse_reference
from mergepipe_pipeline.recipe.selectors import NothingSelectedError, excluded, fits, off_step
from mergepipe_pipeline.recipe.yaml_text import MAX_NBYTES, read_documents
from mergepipe_pipeline.resolution.locate import expanded, expected_place, has_left
from mergepipe_pipeline.snapshots.find import read_manifest
from mergepipe_pipeline.storage.regular import read_small
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.warehouse import Warehouse

#: Names that a message lists.
_LISTED = 8


@dataclass(frozen=True, slots=True)
class _Expert:
    """The current version of a name."""

    name: str
    version: int
    base: str | None
    root: str


@dataclass(frozen=True, eq=False)
class Registered:
    """Answers selectors from the names of a warehouse (`recipe.selectors.Choose`).

    Everything is read once, by the first selector; `folder` is where relative paths of recipes
    start.
    """

    warehouse: Warehouse
    folder: Path | None = None

    def __call__(self, place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
        """Return what a selector takes, in the order of names, of a run in that of its steps.

        Raises NothingSelectedError.
        """
        kept_out = {self._name_of(text): why for text, why in reserved.items()}
        taken: list[str] = []
        omitted: list[tuple[str, str]] = []
        for name, expert in sorted(self._experts.items()):
            if not fits(selector, name, self.warehouse.catalog.tags):
                continue
            why = (
                self._why_omitted(selector, expert) or kept_out.get(name) or self._why_never(expert)
            )
            if why is None:
                taken.append(name)
            else:
                omitted.append((name, why))
        if selector.run is not None:
            taken.sort(key=step_of)
        if selector.last is not None:
            older, taken = taken[: -selector.last], taken[-selector.last :]
            omitted += [(name, f"it is not of the last {selector.last}") for name in older]
        if not taken:
            raise NothingSelectedError(self._why_nothing(selector, omitted))
        return Selected(place, selector, tuple(taken), tuple(omitted))

    @cached_property
    def _experts(self) -> dict[str, _Expert]:
        """All registered names, each with its newest version that can be read."""
        return {
            name: _Expert(name, version, base, root)
            for name, version, _, base, root in self.warehouse.catalog.registrations()
        }

    @cached_property
    def _by_root(self) -> dict[str, str]:
        return {expert.root: name for name, expert in self._experts.items()}

    @cached_property
    def _bases(self) -> dict[str, str]:
        """Names that are bases, each with of what."""
        standing = {self._name_of(text): f"recipe {at}" for text, at in _bases(self.warehouse)}
        registered = {e.base: e.name for e in self._experts.values() if e.base is not None}
        return standing | registered

    def _name_of(self, text: str) -> str:
        """The registered name that a model text means, or the text."""
        if text in self._experts:
            return text
        for folder in (Path.cwd(), self.folder):
            if folder is not None:
                name = self._by_root.get(os.path.realpath(folder / expanded(text)))
                if name is not None:
                    return name
        return text

    def _why_omitted(self, selector: Selector, expert: _Expert) -> str | None:
        """Why this selector does not take an expert of its names and tags."""
        pattern = excluded(selector, expert.name)
        if pattern is not None:
            return f"it fits exclude {pattern}"
        if selector.base is not None and expert.base != self._name_of(selector.base):
            return f"its base is {expert.base or 'not registered'}"
        if selector.min_version is not None and expert.version < selector.min_version:
            return f"it is at version {expert.version}"
        return off_step(selector, expert.name)

    def _why_never(self, expert: _Expert) -> str | None:
        """Why no selector takes an expert."""
        if expert.name in self._bases:
            return f"it is the base of {self._bases[expert.name]}"
        if has_left(self.warehouse, expert.name, expert.root):
            place = expected_place(self.warehouse, expert.name, expert.root)
            return f"it is gone: nothing lies at {place}"
        kept_out = quarantine_of(self.warehouse, expert.name)
        if kept_out is not None:
            return str(kept_out)
        snapshot = _merged_here(self.warehouse, Path(expert.root))
        return snapshot and f"it is a result of this warehouse, snapshot {snapshot[:16]}"

    def _why_nothing(self, selector: Selector, omitted: list[tuple[str, str]]) -> str:
        if omitted:
            reasons = [f"{name} ({why})" for name, why in omitted]
            return f"all that it fits are left out: {_listed(reasons)}"
        names, match = list(self._experts), selector.match
        runs = sorted({run for name in names if (run := run_of(name))})
        if selector.run is not None and selector.run not in runs:
            said = f"no registered name is a step of {shown(selector.run)}"
            return f"{said}{suggest(selector.run, runs)}; runs are {_listed(runs)}"
        by_name = [n for n in names if match is None or fnmatchcase(n, match)]
        if not by_name:
            near = suggest(match or "", names)
            return f"no registered name fits {shown(match)}{near}; registered are {_listed(names)}"
        tags = sorted({tag for name in by_name for tag in self.warehouse.catalog.tags(name)})
        near = suggest(selector.tag or "", tags)
        return f"none of these has the tag {shown(selector.tag)}{near}; tags are {_listed(tags)}"


def _listed(words: list[str]) -> str:
    return listed(words, _LISTED) or "none"


def _bases(warehouse: Warehouse) -> Iterator[tuple[str, str]]:
    """The models that standing recipes merge into, each with the recipe."""
    for path in sorted(warehouse.recipes.glob("[!.]*.y*ml")):
        try:
            documents = read_documents(read_small(path, MAX_NBYTES).decode())
        except (OSError, UnicodeDecodeError, MergePipeError):
            continue  # what it cannot say, `check` says
        for document in documents:
            with suppress(UnreadableReference):
                value = document.value if isinstance(document.value, dict) else {}
                yield parse_reference(value.get("base_model")).model, path.stem


def _merged_here(warehouse: Warehouse, root: Path) -> str | None:
    """The snapshot of this warehouse that a folder is, or a copy of; None if it is none."""
    if not (root / MANIFEST).is_file():
        return None
    try:
        snapshot_id = read_manifest(root).snapshot_id
    except MergePipeError:
        return None
    return snapshot_id if (warehouse.snapshots / snapshot_id).is_dir() else None
