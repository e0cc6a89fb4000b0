"""Selectors: entries of a recipe that name experts by what is known of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selector:
    """Which registered experts an entry of `models:` stands for; all that is given must hold.

    `match` is a shell pattern of names, `tag` one that the expert has, `base` the name or path of
    the base that it was registered against, `min_version` the least version of its name. Names that
    fit a pattern of `exclude` are left out. `run` is the training run whose checkpoints are meant,
    of them those at steps that `every` divides, and of these the `last`. One of `match`, `tag` and
    `run` is given.
    """

    match: str | None = None
    tag: str | None = None
    base: str | None = None
    min_version: int | None = None
    exclude: tuple[str, ...] = ()
    run: str | None = None
    last: int | None = None
    every: int | None = None

    def __str__(self) -> str:
        """Say it as a person would: `match chat-*, base b`."""
        keys = ("run", "last", "every", "match", "tag", "base", "min_version")
        criteria = ((key, getattr(self, key)) for key in keys)
        parts = [f"{key} {value}" for key, value in criteria if value is not None]
        parts += [f"exclude {', '.join(self.exclude)}"] if self.exclude else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Selected:
    """A selector's choice: `taken` are experts in order, `left` (expert, why not).

    The order is that of names, or of the steps of a run. `place` is the selector's in the recipe,
    with its stage's name where the stage has one. An expert of another name or tag is in neither.
    """

    place: str
    selector: Selector
    taken: tuple[str, ...]
    left: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The selector and where it stands: `models[0]: match chat-*`."""
        return f"{self.place}: {self.selector}"

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """Every expert of the selector's names and tags: "taken", or why it is left out."""
        return (*((name, "taken") for name in self.taken), *self.left)


def by_expert(selected: Iterable[Selected]) -> dict[str, str]:
    """Name of each expert that was taken to the selector that took it first."""
    selectors: dict[str, str] = {}
    for selection in selected:
        for name in selection.taken:
            selectors.setdefault(name, selection.label)
    return selectors
