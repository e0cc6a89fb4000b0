"""What a campaign found: counts, and each problem with the way to see it again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

COLUMNS = ("lost", "wrong", "tracebacks", "hangs")


@dataclass(frozen=True)
class Problem:
    """One of COLUMNS, where it happened, and what was seen."""

    column: str
    where: str
    what: str


@dataclass(frozen=True)
class Outcome:
    """What a try did to the product, by kind, what it found, and the states it came through."""

    counts: Counter[str]
    problems: list[Problem]
    states: frozenset[str] = frozenset()

    @staticmethod
    def of(kind: str, problems: list[Problem]) -> Outcome:
        """The outcome of a try that did one thing."""
        return Outcome(Counter([kind]), problems)


@dataclass
class Tally:
    """A row of the table; `tried` counts what was done to the product, by kind."""

    campaign: str
    tried: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one try and what it found."""
        self.tried += outcome.counts
        self.problems += outcome.problems
        self.states |= outcome.states

    def row(self) -> tuple[str, ...]:
        """Campaign, count, the four columns, seconds."""
        found = Counter(p.column for p in self.problems)
        counts = (str(found[c]) for c in COLUMNS)
        return (self.campaign, str(self.tried.total()), *counts, f"{self.seconds:.0f}")
