"""How fast the engine works on one machine, as `calibrate` found by running it.

Figures to predict with, not a log. CPU seconds are of one core while all cores are busy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: Raised when the figures come to mean something else; others are not read.
PACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Flow:
    """Ranged reads of 1 MiB by the engine's number of threads: bytes per second, CPU per byte."""

    bytes_per_s: float
    cpu_s_per_byte: float


@dataclass(frozen=True, slots=True)
class MethodPace:
    """Seconds that one merge method takes, inputs in the page cache.

    Planning: `plan_s`, and `plan_input_s` per (tensor, expert); under a budget
    `budget_input_s` more. CPU: `facts_elem_s` per element of an expert to find facts that nobody
    knows yet; merging takes `elem_s` per element of output and `expert_elem_s` per element of an
    expert, with reading, hashing and writing.
    """

    plan_s: float
    plan_input_s: float
    budget_input_s: float
    facts_elem_s: float
    elem_s: float
    expert_elem_s: float


@dataclass(frozen=True)
class EnginePace:
    """One machine's figures.

    `threads` read and merge; `cold`, `past_cache` and `cached` are reads of cold files by way of
    the page cache and past it, and of what is in it. `start_s` is a process's start with all
    imports, `commit_s` a snapshot's commit; `analysis_elem_s` is CPU per element of an expert.
    """

    cores: int
    threads: int
    cold: Flow
    past_cache: Flow
    cached: Flow
    hash_bytes_per_s: float
    start_s: float
    commit_s: float
    analysis_elem_s: float
    methods: dict[str, MethodPace]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON material; `from_json` gives an equal pace back."""
        return {"version": PACE_VERSION, **asdict(self)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> EnginePace | None:
        """The pace stored by `to_json`; None if its figures mean something else."""
        given = dict(value)
        if given.pop("version", None) != PACE_VERSION:
            return None
        for name in ("cold", "past_cache", "cached"):
            given[name] = Flow(**given[name])
        given["methods"] = {name: MethodPace(**row) for name, row in given["methods"].items()}
        return EnginePace(**given)
