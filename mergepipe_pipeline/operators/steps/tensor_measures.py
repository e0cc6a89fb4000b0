"""Measures of whole tensors that an operator needs before it streams: sums, order statistics.

Declarations with pure functions of one window; `analysis` runs them over a tensor in one pass each
and the catalog remembers the numbers. Steps are taken in order, and each sees the numbers of the
steps before it in `window.task.facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from mergepipe_pipeline.operators.steps.registry import Window


Params = Mapping[str, float | bool | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A measure: `depends` names the parameters that matter besides the tensors.

    `needed(params)` may say that a tensor's method parameters make the step idle; its numbers are
    `skipped` then.
    """

    depends: tuple[str, ...] = ()
    needed: Callable[[Params], bool] | None = None
    skipped: tuple[float, ...] = ()

    def is_needed(self, params: Params) -> bool:
        """Whether the step must run for a tensor with these method parameters."""
        return self.needed is None or self.needed(params)

    @property
    def is_sum(self) -> bool:
        """Whether one pass is enough."""
        return isinstance(self, Sums)


@dataclass(frozen=True, slots=True)
class Sums(_Step):
    """A vector of sums over all elements.

    `of(window)` gives a float64 tensor [m], which adds up over windows; m must not depend on
    the window.
    """

    name: str
    of: Callable[[Window], Tensor]


@dataclass(frozen=True, slots=True)
class Quantiles(_Step):
    """Exact order statistics of a score of each element, without a sort.

    `score(window)` gives [n] float32, none negative and no NaN (it may be changed afterwards).
    `ranks(numel)` are 0-based ranks in ascending order; the step's numbers are the scores there.
    """

    name: str
    score: Callable[[Window], Tensor]
    ranks: Callable[[int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Largest(_Step):
    """The rule that keeps the `count` largest scores, among equals those of lowest index.

    `score` as in `Quantiles`. `count(numel, nonzero, facts, params)` says how many to keep, with
    the number of scores above zero and the method's parameters. The step's numbers are the
    threshold and the element index before which scores equal to the threshold are kept; all of
    infinity and 0 if none is kept, both 0 if every score above zero is.
    """

    name: str
    score: Callable[[Window], Tensor]
    count: Callable[[int, int, tuple[float, ...], dict[str, float | bool | int | str]], int]


Measure = Sums | Quantiles | Largest
