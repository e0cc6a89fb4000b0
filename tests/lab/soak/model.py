"""What must be released, said plainly: no code of sensors, catalog or planner is used.

All elements of a checkpoint hold one whole number, and recipes are task arithmetic, so the right
result of a recipe is one number as well. A mixture of versions is a number that nobody asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

BASE = "base"


@dataclass(frozen=True)
class Recipe:
    """A task arithmetic over the base; `comment` and `broken` change its text alone.

    `nightly` is a cron time that is far away: until then nothing is asked of the recipe. With
    `prefix`, a selector takes every expert whose name begins so. A result above `limit` is refused
    by a gate, and the suspect is found and kept out.
    """

    experts: tuple[str, ...]
    scale: float = 1.0
    comment: str = ""
    broken: bool = False
    nightly: str = ""
    prefix: str = ""
    limit: int | None = None

    def members(self, inbox: Collection[str]) -> tuple[str, ...]:
        """The experts that it merges while these lie in the inbox."""
        return (*self.experts, *(n for n in inbox if self.prefix and n.startswith(self.prefix)))

    @property
    def text(self) -> str:
        """The file."""
        entries = [f"model: {e}" for e in self.experts]
        entries += [f"match: {self.prefix}*"] if self.prefix else []
        models = "".join(f"  - {e}\n    parameters: {{weight: 1.0}}\n" for e in entries)
        end = "models: [\n" if self.broken else ""
        if self.nightly:
            end += f"trigger: nightly\nschedule: {self.nightly!r}\n"
        if self.limit is not None:
            end += "evaluate: {command: [python, eval.py]}\n"
            end += f"gate: {{number: {{max: {self.limit}}}, on_failure: bisect}}\n"
        return (
            f"# {self.comment}\nmerge_method: task_arithmetic\nbase_model: {BASE}\n"
            f"models:\n{models}parameters: {{lambda: {self.scale}}}\n{end}"
        )


@dataclass
class Model:
    """What lies in the inbox (whole folders alone), which recipes there are, and which of their
    releases are too old.

    `fine` is the last number of each recipe with a gate that passed, `refused` counts those of this
    event that did not.
    """

    inbox: dict[str, int] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    writes: Counter[str] = field(default_factory=Counter)
    states: dict[str, list[float]] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)
    fine: dict[str, float] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    def wanted(self, name: str) -> float | None:
        """The number a recipe must have released, or None where nothing can be asked of it.

        What its gate refuses leaves what was released before.
        """
        value = self._result(name)
        return self.fine.get(name) if self._is_refused(name, value) else value

    def _is_refused(self, name: str, value: float | None) -> bool:
        recipe = self.recipes.get(name)
        limit = recipe.limit if recipe else None
        return value is not None and limit is not None and value > limit

    def _result(self, name: str) -> float | None:
        recipe = self.recipes.get(name)
        if recipe is None or recipe.broken or recipe.nightly:
            return None
        experts = recipe.members(self.inbox)
        if not experts or not {BASE, *experts} <= self.inbox.keys():
            return None
        base = self.inbox[BASE]
        return base + recipe.scale * sum(self.inbox[e] - base for e in experts)

    def all_wanted(self) -> dict[str, float]:
        """Recipe to number, for those of which something can be asked."""
        found = {name: self.wanted(name) for name in self.recipes}
        return {name: value for name, value in found.items() if value is not None}

    def worst(self) -> set[str]:
        """The experts that make a recipe fail its gate."""
        gated = [r for r in self.recipes.values() if r.limit is not None]
        limits = [(e, r.limit or 0) for r in gated for e in r.experts if e in self.inbox]
        return {e for e, limit in limits if self.inbox[e] > limit}

    def mark(self) -> None:
        """A new event begins: what came before counts no more."""
        self.writes.clear()
        self.refused.clear()

    def wrote(self, name: str, value: int) -> None:
        """A folder became whole."""
        self.inbox[name] = value
        self.writes[name] += 1
        self.note()

    def lost(self, name: str) -> None:
        """A folder is gone, or whole no more."""
        self.inbox.pop(name, None)
        self.note()

    def note(self) -> None:
        """Remember what is wanted of each recipe from this moment."""
        for name in self.recipes:
            value = self._result(name)
            if self._is_refused(name, value):
                self.refused[name] += 1
            elif value is not None:
                self.fine[name] = value
        for name, value in self.all_wanted().items():
            states = self.states.setdefault(name, [])
            if not states or states[-1] != value:
                states.append(value)
