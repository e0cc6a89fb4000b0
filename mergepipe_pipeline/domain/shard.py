"""A part of a plan that one worker merges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers by name, in plan order: number `number` of `count`, from 1.

    `cost` is what they are predicted to take, in `unit`: seconds, or bytes where nobody has
    measured the machine.
    """

    number: int
    count: int
    layers: tuple[str, ...]
    cost: float
    unit: str
