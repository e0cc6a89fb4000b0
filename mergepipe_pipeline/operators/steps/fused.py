"""A merge of task vectors as data: what a compiled kernel does to a window in one go.

Operators of the task arithmetic family describe themselves so; `apply` in torch defines the result,
and gives the same bits. No arithmetic here and no torch: `kernels.merge_tiles` computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mergepipe_pipeline.domain.plan import TrimRule

#: Σ wᵢTᵢ in fused multiply-adds; B + λ Σ d̃ᵢ; B + λ · the sum of what has the elected sign.
Mix = Literal["values", "sum", "vote"]


@dataclass(frozen=True, slots=True)
class FusedRow:
    """What is done to one expert's δ, in this order; None or 1 leave a step out.

    Keep what `trim` keeps; drop what `outliers` keeps; keep elements whose number in the random
    `stream` is below `keep_below`; multiply by `scale`; divide by `divisor`; multiply by `weight`.
    All numbers as float32.
    """

    weight: float
    trim: TrimRule | None = None
    outliers: TrimRule | None = None
    stream: int | None = None
    keep_below: int = 0
    scale: float = 1.0
    divisor: float = 1.0


@dataclass(frozen=True, slots=True)
class FusedMerge:
    """The whole merge of one tensor; `rows` None for an expert that adds nothing.

    "values" and "sum" are divided by `divisor`; a "vote", if `normalize`, by the sum of the weights
    that agree. `lambda_` scales an update, not values.
    """

    mix: Mix
    rows: tuple[FusedRow | None, ...]
    divisor: float = 1.0
    normalize: bool = False
    lambda_: float = 1.0
