"""Measures of whole tensors against NumPy, in windows of any length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis import stream
from mergepipe_pipeline.analysis.measure import MeasuredTensor, measure
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask
from mergepipe_pipeline.domain.view import moved
from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.operators import Window
from mergepipe_pipeline.operators.steps.tensor_measures import Largest, Quantiles, Sums
from tests.support.kinds import KINDS, Kinds, make_kinds
from tests.support.oracles import largest

Matrix = npt.NDArray[np.float64]

GRAM = Sums("gram", lambda w: (w.experts.double() @ w.experts.double().T).reshape(-1))


def _spread(window: Window) -> torch.Tensor:
    return window.experts.amax(0).sub_(window.experts.amin(0))


QUARTILES = Quantiles("quartiles", _spread, lambda n: (0, n // 4, n // 2, n - 1))
HALF = Largest("half", _spread, lambda numel, nonzero, facts, params: nonzero // 2)


@dataclass(frozen=True)
class Case:
    """A tensor of some kinds of experts, its checkpoints, and its rows float64 [K, N] in NumPy."""

    checkpoints: tuple[Checkpoint, ...]
    tensor: MeasuredTensor
    rows: Matrix

    def __repr__(self) -> str:
        return "case"

    @property
    def spread(self) -> Matrix:
        return np.asarray(self.rows.max(0) - self.rows.min(0))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(tmp_path_factory.mktemp("kinds"), rows=60, cols=35)


def case_of(kinds: Kinds, names: tuple[str, ...], *, as_delta: bool, base: bool = True) -> Case:
    checkpoints = list(kinds.base.checkpoints)
    views, rows = [], []
    for name in names:
        kind = kinds.experts[name]
        views.append(moved(kind.view, len(checkpoints)))
        checkpoints += kind.model.checkpoints
        rows.append(kind.delta if as_delta else kinds.values + kind.delta)
    below = kinds.base.views["w"]
    span = ((0, below.numel),)
    inputs = tuple(ExpertInput(i, v, "", (), span, span) for i, v in enumerate(views))
    task = TensorTask("w", below.shape, "BF16", "", (("share", 0.25),), 0, None, inputs)
    tensor = MeasuredTensor(task, below if base else None, tuple(views), as_delta, 1)
    return Case(tuple(checkpoints), tensor, np.stack(rows).astype(np.float64))


@contextmanager
def windows(elems: int) -> Iterator[None]:
    """Windows of so many elements per expert, however short."""
    with (
        mock.patch.object(stream, "WINDOW_ELEMS", 3 * elems),
        mock.patch.object(stream, "CHUNK_ELEMS", elems),
    ):
        yield


THREE = ("full", "low rank", "gathered")


@pytest.mark.parametrize("as_delta", [True, False], ids=["delta", "value"])
@given(window_elems=st.integers(1, 3000), names=st.permutations(KINDS).map(lambda k: tuple(k[:3])))
def test_measures_are_numpy_s_on_whole_tensors_whatever_the_windows(
    kinds: Kinds, as_delta: bool, window_elems: int, names: tuple[str, ...]
) -> None:
    case = case_of(kinds, names, as_delta=as_delta)
    with windows(max(50, window_elems)):
        ((gram,), (quartiles,), (half,)) = (
            measure(case.checkpoints, [case.tensor], step) for step in (GRAM, QUARTILES, HALF)
        )
    # All numbers are on a coarse grid: sums are exact in any order.
    np.testing.assert_array_equal(np.reshape(gram, (3, 3)), case.rows @ case.rows.T)
    n = case.tensor.numel
    np.testing.assert_array_equal(quartiles, np.sort(case.spread)[[0, n // 4, n // 2, n - 1]])
    np.testing.assert_array_equal(
        kept_by(half, case.spread), largest(case.spread, int(np.count_nonzero(case.spread)) // 2)
    )


def kept_by(numbers: tuple[float, ...], score: Matrix) -> npt.NDArray[np.bool_]:
    """What the numbers of `Largest` keep."""
    threshold, stop = numbers
    ties = (score == threshold) & (np.arange(len(score)) < stop)
    return np.asarray((score > threshold) | ties)


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (-1, 0), (1, 1), (10**9, None)])
def test_largest_may_keep_nothing_or_all_that_is_above_zero(
    kinds: Kinds, count: int, kept: int | None
) -> None:
    case = case_of(kinds, THREE, as_delta=True)
    step = replace(HALF, count=lambda *_: count)
    (found,) = measure(case.checkpoints, [case.tensor], step)
    above_zero = case.spread > 0
    wanted = int(above_zero.sum()) if kept is None else kept
    assert (kept_by(found, case.spread) & above_zero).sum() == wanted
    assert found == {0: (np.inf, 0.0), None: (0.0, 0.0)}.get(kept, found)


def with_facts(tensor: MeasuredTensor, numbers: tuple[float, ...]) -> MeasuredTensor:
    """The tensor with a step's numbers added to what its task knows."""
    return replace(tensor, task=replace(tensor.task, facts=(*tensor.task.facts, *numbers)))


def test_a_count_sees_sizes_facts_and_parameters(kinds: Kinds) -> None:
    case = case_of(kinds, THREE, as_delta=True)
    seen: list[object] = []

    def count(
        numel: int, nonzero: int, facts: tuple[float, ...], params: dict[str, float | str]
    ) -> int:
        seen.extend((numel, nonzero, facts, params))
        return 5

    measure(case.checkpoints, [with_facts(case.tensor, (1.5,))], Largest("l", _spread, count))
    assert seen == [2100, np.count_nonzero(case.spread), (1.5,), {"share": 0.25}]


def test_a_step_sees_the_numbers_of_the_steps_before_it(kinds: Kinds) -> None:
    case = case_of(kinds, THREE, as_delta=True)

    def above(window: Window) -> torch.Tensor:
        threshold = window.task.facts[1]
        return (_spread(window) > threshold).sum().reshape(1)

    tensor = case.tensor
    for step in (QUARTILES, HALF):
        (numbers,) = measure(case.checkpoints, [tensor], step)
        tensor = with_facts(tensor, numbers)
    assert len(tensor.task.facts) == 6
    (found,) = measure(case.checkpoints, [tensor], Sums("above", above))
    assert found == ((case.spread > np.sort(case.spread)[525]).sum(),)


def test_windows_tell_where_they_are_and_hold_whole_rows(kinds: Kinds) -> None:
    case = case_of(kinds, THREE, as_delta=True)
    seen: list[tuple[int, int]] = []

    def note(window: Window) -> torch.Tensor:
        seen.append((window.start_elem, window.experts.shape[1]))
        return torch.zeros(1)

    with windows(100):
        measure(case.checkpoints, [replace(case.tensor, row_elems=35)], Sums("rows", note))
    assert sorted(seen) == [(start, 70) for start in range(0, 2100, 70)]


def test_a_site_without_a_base_measures_values_alone(kinds: Kinds) -> None:
    case = case_of(kinds, ("full", "gathered"), as_delta=False, base=False)
    seen: list[object] = []

    def gram(window: Window) -> torch.Tensor:
        seen.append(window.base)
        return GRAM.of(window)

    (found,) = measure(case.checkpoints, [case.tensor], Sums("gram", gram))
    assert set(seen) == {None}
    np.testing.assert_array_equal(np.reshape(found, (2, 2)), case.rows @ case.rows.T)


def test_several_sites_are_measured_in_their_order(kinds: Kinds) -> None:
    case = case_of(kinds, THREE, as_delta=True)
    other = replace(case.tensor, experts=case.tensor.experts[:1])
    found = measure(case.checkpoints, [case.tensor, other, case.tensor], GRAM)
    assert [len(numbers) for numbers in found] == [9, 1, 9]
    assert found[0] == found[2]


def test_a_step_is_idle_where_its_parameters_say_so() -> None:
    step = replace(
        HALF, needed=lambda params: float(params.get("share", 1)) < 1, skipped=(0.0, 0.0)
    )
    assert [step.is_needed(p) for p in ({}, {"share": 0.5}, {"share": 1.0})] == [
        False,
        True,
        False,
    ]
    assert (GRAM.is_needed({}), GRAM.skipped) == (True, ())
    assert [s.is_sum for s in (GRAM, QUARTILES, HALF)] == [True, False, False]


def test_progress_is_told_of_every_pass(kinds: Kinds) -> None:
    case = case_of(kinds, ("full", "gathered"), as_delta=True)
    done: list[int] = []
    measure(case.checkpoints, [case.tensor], GRAM, done.append)
    assert sum(done) == 2100 * (2 + 2 + 2)


def test_an_expert_replaced_meanwhile_is_noticed() -> None:

    with TemporaryDirectory() as folder:
        case = case_of(make_kinds(Path(folder)), THREE, as_delta=True)

        def touch(_: int) -> None:
            os.utime(case.checkpoints[-1].root, ns=(1, 1))

        with pytest.raises(CheckpointChangedError, match="changed while it was read"):
            measure(case.checkpoints, [case.tensor], GRAM, touch)
