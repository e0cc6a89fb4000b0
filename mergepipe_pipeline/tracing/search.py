"""The smallest part of what changed whose undoing repairs: delta debugging.

A. Zeller, R. Hildebrandt: Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28 (2002),
algorithm ddmin. One guilty item of n is found in about 2 log₂ n questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Narrowed(Generic[T]):
    """A part that repairs; `is_smallest`: without any one of its items it does not."""

    part: tuple[T, ...]
    is_smallest: bool


def most_questions(n: int) -> int:
    """How often `narrow` asks about n items at most."""
    return 0 if n < 2 else n * n + 3 * n


def narrow(items: Sequence[T], repairs: Callable[[tuple[T, ...]], bool], most: int) -> Narrowed[T]:
    """A small part of `items` for which `repairs` is true, as it is of all of them.

    Asks at most `most` different questions; then the smallest part found is the result.
    """
    answered: dict[tuple[T, ...], bool] = {}

    def ask(part: tuple[T, ...]) -> bool | None:
        if part not in answered:
            if len(answered) >= most:
                return None
            answered[part] = repairs(part)
        return answered[part]

    smallest, n_parts = tuple(items), 2
    while len(smallest) > 1:
        parts = _parts(smallest, n_parts)
        complements = (
            [tuple(i for i in smallest if i not in part) for part in parts] if n_parts > 2 else []
        )
        answers = ((part, ask(part)) for part in (*parts, *complements))
        part, answer = next(((p, a) for p, a in answers if a is not False), (smallest, False))
        if answer is None:
            return Narrowed(smallest, is_smallest=False)
        if answer:
            n_parts = 2 if part in parts else max(n_parts - 1, 2)
            smallest = part
        elif n_parts == len(smallest):
            break
        else:
            n_parts = min(2 * n_parts, len(smallest))
    return Narrowed(smallest, is_smallest=True)


def _parts(items: tuple[T, ...], n_parts: int) -> list[tuple[T, ...]]:
    cuts = [len(items) * i // n_parts for i in range(n_parts + 1)]
    return [items[a:b] for a, b in pairwise(cuts)]
