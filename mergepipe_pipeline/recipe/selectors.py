"""How an entry of `models:` selects experts, as text: what it says, and whether a name fits.

A `Choose` knows which experts are registered and may be merged; nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from mergepipe_pipeline.domain.selector import Selected, Selector
from mergepipe_pipeline.domain.training_run import run_of, step_of

#: The keys of an entry that make it a selector, and those that narrow it.
SELECTING = ("match", "tag", "run")
NARROWING = ("base", "min_version", "exclude", "last", "every")


class NothingSelectedError(ValueError):
    """A selector that takes no expert; the message says why, for the caller to place."""


class Choose(Protocol):
    """Says what a selector takes of the experts that there are."""

    def __call__(self, place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
        """Return what the selector at a place takes, without those that are `reserved`.

        `reserved` are models as the recipe writes them, each with why no selector takes it. Raises
        NothingSelectedError if there is nothing left.
        """


def nobody(place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
    """The choice where no expert is known. Raises NothingSelectedError."""
    raise NothingSelectedError("no expert is registered that it could take")


class Recorded:
    """The choices of a merge that was made before, so that its recipe means the same again."""

    def __init__(self, selections: Sequence[Selected]) -> None:
        self._by_place = {s.place: s for s in selections}

    def __call__(self, place: str, selector: Selector, reserved: Mapping[str, str]) -> Selected:
        """Return what the selector at this place took then."""
        selected = self._by_place.get(place)
        if selected is None:
            raise NothingSelectedError("the plan does not say what it took")
        return selected


def read_selector(entry: Mapping[str, object]) -> Selector | None:
    """The selector of an entry, None for a model; values of a wrong kind count as absent.

    `schema` refuses those.
    """
    texts = {k: v for k in (*SELECTING, "base") if isinstance(v := entry.get(k), str) and v.strip()}
    if not texts.keys() & set(SELECTING) or entry.get("model") is not None:
        return None
    least, last, every, exclude = map(entry.get, ("min_version", "last", "every", "exclude"))
    patterns = exclude if isinstance(exclude, list) else []
    return Selector(
        **texts,
        min_version=least if isinstance(least, int) else None,
        last=last if isinstance(last, int) and last > 0 else None,
        every=every if isinstance(every, int) and every > 0 else None,
        exclude=tuple(p for p in patterns if isinstance(p, str)),
    )


def fits(selector: Selector, name: str, tags_of: Callable[[str], frozenset[str]]) -> bool:
    """Whether an expert's name and tags are those that a selector speaks of.

    `tags_of` is asked only where it matters.
    """
    is_called_so = selector.match is None or fnmatchcase(name, selector.match)
    if selector.run is not None and run_of(name) != selector.run:
        return False
    return is_called_so and (selector.tag is None or selector.tag in tags_of(name))


def would_take(selector: Selector, name: str, tags_of: Callable[[str], frozenset[str]]) -> bool:
    """Whether a selector takes an expert of this name as soon as it is registered."""
    return (
        fits(selector, name, tags_of)
        and not excluded(selector, name)
        and not off_step(selector, name)
        and selector.base is None
        and (selector.min_version or 1) == 1
    )


def excluded(selector: Selector, name: str) -> str | None:
    """The pattern of `exclude:` that a name fits, or None."""
    return next((p for p in selector.exclude if fnmatchcase(name, p)), None)


def off_step(selector: Selector, name: str) -> str | None:
    """Why a selector does not take a run's checkpoint at this step; None if it may.

    One that names no run takes none: steps between are no experts of their own.
    """
    run = run_of(name)
    if run is None:
        return None
    if selector.run is None:
        return f"it is a step of a run, which `run: {run}` takes"
    if step_of(name) % (selector.every or 1):
        return f"{selector.every} does not divide its step"
    return None
