"""Sparsifiers: set elements of one expert's delta to zero, in place, in any window of the tensor.

What to keep is decided from tensor-scope facts in the plan (a threshold) or from numbered random
numbers, never from the window itself. `task_arithmetic` calls these before weighting.

Masks are float32 ones and zeros to multiply with: filling by boolean mask branches on every element
and takes ten times as long. A NaN stays a NaN; a dropped infinity becomes one.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.random import keep_mask
from mergepipe_pipeline.operators.registry import PerModel, Window
from mergepipe_pipeline.spec.plan import TrimRule

if TYPE_CHECKING:
    from torch import Tensor


def trim(window: Window, expert: int, density: float) -> None:
    """Keep the elements of row `expert` that its TrimRule keeps: the tensor's largest magnitudes.

    Raises OperatorError if density < 1 and the plan brings no rule.
    Source: TIES-Merging (https://arxiv.org/abs/2306.01708), per tensor as in mergekit.
    """
    rule = window.task.experts[expert].trim
    if density >= 1:
        return
    if rule is None:
        raise OperatorError(
            "A trim has no threshold",
            where=f"tensor {window.task.name}, expert {expert}",
            expected=f"a rule for density {density}",
            found="none in the plan",
            next_step="analyze the experts and plan again",
        )
    trim_(window.experts[expert], rule, window.start_elem)


def trim_(delta: Tensor, rule: TrimRule, start_elem: int) -> None:
    """Zero what `rule` does not keep in `delta`, float32 [n], whose first element is `start_elem`.

    Compares magnitudes as floats: the same order as their bit patterns, without an integer copy.
    """
    (threshold,) = struct.unpack("<f", struct.pack("<I", rule.threshold_bits))
    cut = min(max(rule.tie_stop_elem - start_elem, 0), delta.shape[0])
    head, tail = delta[:cut], delta[cut:]
    head.mul_(head.abs().ge_(threshold))
    tail.mul_(tail.abs().gt_(threshold))


def drop(window: Window, expert: int, density: float) -> None:
    """Keep each element of row `expert` with probability `density`, by numbered random numbers.

    Source: DARE (https://arxiv.org/abs/2311.03099); the rescale is the caller's.
    """
    if density >= 1:
        return
    task, delta = window.task, window.experts[expert]
    position = task.experts[expert].position
    keep = keep_mask(task.seed, position, task.name, window.start_elem, delta.shape[0], density)
    delta.mul_(delta.new_tensor(keep.view("u1")))


def check_trim(tensor: str, numel: int, density: PerModel) -> None:
    """Raise OperatorError unless every density below 1 keeps at least one of `numel` elements."""
    for i, d in enumerate(density):
        if d < 1 and numel and int(d * numel) < 1:
            raise OperatorError(
                "A trim would keep no element",
                where=f"tensor {tensor}, model {i + 1} of {len(density)}",
                expected=f"a density of at least {1 / numel:.3g} for {numel} elements",
                found=f"density {d}",
                next_step="raise the density, or leave the model out with weight 0",
            )


def check_drop(tensor: str, numel: int, density: PerModel) -> None:
    """Raise OperatorError if a density is negative; 0 drops everything."""
    for i, d in enumerate(density):
        if d < 0:
            raise OperatorError(
                "A density is negative",
                where=f"tensor {tensor}, model {i + 1} of {len(density)}",
                expected="a share between 0 and 1",
                found=f"density {d}",
                next_step="correct the density",
            )
