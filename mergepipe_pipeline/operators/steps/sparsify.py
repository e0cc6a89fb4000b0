"""Sparsifiers: set elements of one expert's delta to zero, in place, in any window of the tensor.

What to keep is decided from tensor-scope facts in the plan (a threshold) or from numbered random
numbers, never from more of the window than one row. A density of 1 or more keeps all, of 0 or less
nothing. The methods of the task arithmetic family call these before weighting, and `analysis` the
ones that take a bare tensor.

Masks are float32 ones and zeros to multiply with: filling by boolean mask branches on every element
and takes ten times as long. A NaN stays a NaN; a dropped infinity becomes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergepipe_pipeline.arrays import F64Array, U32Array
from mergepipe_pipeline.domain.operator import Fact
from mergepipe_pipeline.domain.plan import TensorTask, TrimRule
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators.kernels.splitmix import GAMMA
from mergepipe_pipeline.operators.steps.random import keep_below, keep_mask, stream_key, uniforms
from mergepipe_pipeline.operators.steps.registry import PerModel, Window

if TYPE_CHECKING:
    from torch import Tensor

_LOW_32_BITS = 2**32 - 1


def thin(
    window: Window,
    expert: int,
    how: Fact,
    density: float,
    epsilon: float = 0.0,
    *,
    inverse: bool = False,
) -> None:
    """Thin row `expert` as facts of kind `how` say; "none" keeps all.

    `epsilon` is for "ranked"; with `inverse`, random drops divide by the probability to keep.
    """
    if how == "trim":
        trim(window, expert, density)
    elif how == "band":
        band(window, expert, density)
    elif how == "drop":
        drop(window, expert, density, inverse=inverse)
    elif how == "ranked":
        drop_by_rank(window, expert, density, epsilon, inverse=inverse)


def trim(window: Window, expert: int, density: float) -> None:
    """Keep the elements of row `expert` that its TrimRule keeps: the tensor's largest magnitudes.

    Raises OperatorError if the density asks for a rule and the plan brings none.
    Source: TIES-Merging (https://arxiv.org/abs/2306.01708), per tensor as in mergekit.
    """
    if 0 < density < 1:
        rule = trim_rule(window.task, expert, density)
        trim_(window.experts[expert], rule, window.start_elem)
    elif density <= 0:
        window.experts[expert].zero_()


def band(window: Window, expert: int, density: float) -> None:
    """Keep what `trim` keeps of row `expert` without what its `outliers` rule keeps.

    Raises OperatorError if the density asks for a rule and the plan brings none.
    Source: Model Breadcrumbs (https://arxiv.org/abs/2312.06795).
    """
    trim(window, expert, density)
    outliers = window.task.experts[expert].outliers
    if 0 < density < 1 and outliers is not None:
        drop_outliers_(window.experts[expert], outliers, window.start_elem)


def drop(window: Window, expert: int, density: float, *, inverse: bool = False) -> None:
    """Keep each element of row `expert` with probability `density`, by numbered random numbers.

    With `inverse`, what is kept is divided by its probability.
    Source: DARE (https://arxiv.org/abs/2311.03099); the rescale to a norm is the caller's.
    """
    task, delta = window.task, window.experts[expert]
    if 0 < density < 1:
        position, start, n = task.experts[expert].position, window.start_elem, delta.shape[0]
        if _is_on_host(delta):
            keep = keep_mask(task.seed, position, task.name, start, n, density)
            delta.mul_(delta.new_tensor(keep.view("u1")))
        else:
            key = stream_key(task.seed, position, task.name)
            drop_numbered_(delta, uniforms_on_device(key, start, delta), keep_below(density))
        if inverse:
            delta.div_(delta.new_full((), density))
    elif density <= 0:
        delta.zero_()


def drop_by_rank(
    window: Window, expert: int, density: float, epsilon: float, *, inverse: bool
) -> None:
    """Keep elements of row `expert` more probably the larger they are among their tensor row.

    With `inverse`, what is kept is divided by its probability.
    Source: DELLA (https://arxiv.org/abs/2406.11617); the rescale to a norm is the caller's.
    """
    task, delta = window.task, window.experts[expert]
    if 0 < density < 1:
        position, start, n = task.experts[expert].position, window.start_elem, delta.shape[0]
        rows = delta.view(-1, window.row_elems)
        if _is_on_host(delta):
            numbers = uniforms(task.seed, position, task.name, start, n)
            drop_by_rank_(rows, numbers, density, epsilon, inverse=inverse)
        else:
            drawn = uniforms_on_device(stream_key(task.seed, position, task.name), start, delta)
            table = rank_probability(window.row_elems, density, epsilon)
            drop_by_rank_on_device_(rows, drawn, table, inverse=inverse)
    elif density <= 0:
        delta.zero_()


def trim_(delta: Tensor, rule: TrimRule, start_elem: int) -> None:
    """Zero what `rule` does not keep in `delta`, float32 [n], whose first element is `start_elem`.

    Compares magnitudes as floats: the same order as their bit patterns, without an integer copy.
    """
    head, tail, threshold = _split(delta, rule, start_elem)
    head.mul_(head.abs().ge_(threshold))
    tail.mul_(tail.abs().gt_(threshold))


def drop_outliers_(delta: Tensor, rule: TrimRule, start_elem: int) -> None:
    """Zero what `rule` keeps in `delta`, float32 [n], whose first element is `start_elem`."""
    head, tail, threshold = _split(delta, rule, start_elem)
    head.mul_(head.abs().lt_(threshold))
    tail.mul_(tail.abs().le_(threshold))


def drop_by_rank_(
    rows: Tensor,
    numbers: U32Array,
    density: float,
    epsilon: float,
    *,
    inverse: bool = False,
) -> None:
    """Zero elements of `rows`, float32 [r, n], at random: kept iff number < round(p · 2**32).

    p is `rank_probability` at the rank of |δ| in its row; equal magnitudes rank by index.
    `numbers` are uint32 [r·n].
    """
    from mergepipe_pipeline.operators.kernels.rank_drop import drop_rows

    probability = rank_probability(rows.shape[1], density, epsilon)
    limits = np.rint(probability * 2**32).astype(np.uint64)
    factors = 1 / probability if inverse else np.ones(len(probability))
    drop_rows(rows.numpy(), numbers, limits, factors.astype(np.float32))


def rank_probability(n: int, density: float, epsilon: float) -> F64Array:
    """p by rank in a row of `n`: from density − ε to density + ε in equal steps, float64 [n].

    A row of one element has p = density.
    """
    spread = np.arange(n) / (n - 1) if n > 1 else np.full(n, 0.5)
    return (density - epsilon) + 2 * epsilon * spread


def trim_rule(task: TensorTask, expert: int, density: float) -> TrimRule:
    """The rule that the plan brings for a trim. Raises OperatorError if it brings none."""
    rule = task.experts[expert].trim
    if rule is None:
        raise OperatorError(
            "A trim has no threshold",
            where=f"tensor {task.name}, expert {expert}",
            expected=f"a rule for density {density}",
            found="none in the plan",
            next_step="analyze the experts and plan again",
        )
    return rule


def trim_count(numel: int, density: float) -> int:
    """How many of `numel` elements a trim to `density` in (0, 1) keeps: int(d·N), at least one."""
    return min(numel, max(1, int(density * numel)))


def band_counts(numel: int, density: float, gamma: float) -> tuple[int, int]:
    """How many of the largest of `numel` elements the trim of a band keeps, and how many of these
    are outliers, for a density in (0, 1).

    int(γN) outliers go, fewer where that would leave less than int(d·N).
    """
    kept = int(density * numel)
    outliers = min(int(gamma * numel), numel - kept)
    return kept + outliers, outliers


def check_drop(tensor: str, density: PerModel) -> None:
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


def check_ranked(tensor: str, density: PerModel, epsilon: PerModel) -> None:
    """Raise OperatorError where density ± ε leaves (0, 1), for densities that drop at random."""
    for i, (d, e) in enumerate(zip(density, epsilon, strict=True)):
        if 0 < d < 1 and not (0 < d - e < 1 and 0 < d + e < 1):
            raise OperatorError(
                "Densities by rank leave the range of probabilities",
                where=f"tensor {tensor}, model {i + 1} of {len(density)}",
                expected="density - epsilon above 0 and density + epsilon below 1",
                found=f"density {d}, epsilon {e}",
                next_step="lower epsilon",
            )


def _split(delta: Tensor, rule: TrimRule, start_elem: int) -> tuple[Tensor, Tensor, float]:
    """The elements where ties at the threshold are kept, those where not, and the threshold."""
    cut = min(max(rule.tie_stop_elem - start_elem, 0), delta.shape[0])
    return delta[:cut], delta[cut:], rule.threshold


def _is_on_host(delta: Tensor) -> bool:
    """Whether NumPy can work on its memory."""
    return bool(delta.is_cpu)


def uniforms_on_device(key: np.uint64, start_elem: int, like: Tensor) -> Tensor:
    """Numbers [start, start + n) of stream `key`, for `like` [n] on its device: int64, below 2**32.

    They are those of `random.uniforms`: integers wrap alike everywhere. On a CPU, NumPy is faster.
    """
    import torch

    n = like.shape[0]
    first, skip = divmod(start_elem, 2)
    words = (skip + n + 1) // 2
    states = torch.arange(first + 1, first + 1 + words, device=like.device)
    states.mul_(_signed(int(GAMMA))).add_(_signed(int(key)))
    # The low half comes first: all of safetensors and CUDA is little-endian.
    return _mixed(states).view(torch.int32)[skip : skip + n].long().bitwise_and_(_LOW_32_BITS)


def drop_numbered_(delta: Tensor, numbers: Tensor, keep_below: int) -> None:
    """Zero elements of `delta`, float32 [n], whose number is not below `keep_below`."""
    delta.mul_(numbers.lt(keep_below))


def drop_by_rank_on_device_(
    rows: Tensor, numbers: Tensor, probability: F64Array, *, inverse: bool
) -> None:
    """Drop by rank on any device: `rows` [r, n], p by rank [n], int64 numbers [r·n]."""
    import torch

    limits = torch.from_numpy(np.rint(probability * 2**32).astype(np.int64)).to(rows.device)
    factors = rows.new_tensor(1 / probability if inverse else np.ones_like(probability))
    # Magnitudes rank as their bit patterns do, NaN above infinity.
    ascending = rows.abs().view(torch.int32).sort(dim=1, stable=True).indices  # [r, n] by rank
    kept = numbers.view(rows.shape).gather(1, ascending).lt(limits)
    rows.mul_(torch.empty_like(rows).scatter_(1, ascending, kept * factors))


def _mixed(states: Tensor) -> Tensor:
    """`splitmix.mixed` of int64 [n], in place."""
    _xor_shifted_(states, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    _xor_shifted_(states, 27).mul_(_signed(0x94D049BB133111EB))
    return _xor_shifted_(states, 31)


def _xor_shifted_(states: Tensor, places: int) -> Tensor:
    """Each word xor itself shifted right, zeros moving in, where torch moves the sign in."""
    shifted = states.bitwise_right_shift(places).bitwise_and_(2 ** (64 - places) - 1)
    return states.bitwise_xor_(shifted)


def _signed(word: int) -> int:
    """The int64 with the bits of a uint64."""
    return word - 2**64 if word >= 2**63 else word
