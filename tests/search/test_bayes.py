"""What a search keeps to when it says where to evaluate next."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.search.bayes import Proposer, refuse_without_botorch
from mergepipe_pipeline.search.pareto import REFERENCE, STEPS, Trials, fresh, hypervolume, rounded

_HAS_BOTORCH = find_spec("botorch") is not None
_NEEDS = pytest.mark.skipif(not _HAS_BOTORCH, reason="needs the extra `search`")
#: After as many points as a test has tried, or never: the design alone.
MODELLED, DESIGN = pytest.param(4, marks=_NEEDS), 999
DIMS = 4
NONE = np.empty((0, DIMS))


def values_of(points: F64Array) -> F64Array:
    """ZDT1, maximised."""
    g = 1 + 9 * points[:, 1:].mean(axis=1)
    return 1 - np.stack([points[:, 0], g * (1 - np.sqrt(points[:, 0] / g)) / 5.5], axis=1)


def tried(count: int, seed: int = 0, dims: int = DIMS) -> Trials:
    points = rounded(np.random.default_rng(seed).random((count, dims)))
    return Trials(points, values_of(points))


def of(initial: int, *, dims: int = DIMS, lengths: F64Array | None = None) -> Proposer:
    lengths = np.ones(dims) if lengths is None else lengths
    return Proposer(dims, 5, initial, lengths, np.empty((0, dims)))


@pytest.mark.parametrize("initial", [MODELLED, DESIGN])
def test_points_lie_on_the_grid_and_are_neither_known_nor_pending_nor_equal(initial: int) -> None:
    trials, pending = tried(9), tried(2, seed=1).points
    found = of(initial).propose(trials, pending, 3)
    assert found.shape == (3, DIMS)
    assert (found * STEPS == np.round(found * STEPS)).all()
    assert ((found >= 0) & (found <= 1)).all()
    assert len(fresh(found, trials.points, pending)) == 3


@pytest.mark.parametrize("initial", [MODELLED, DESIGN])
def test_three_points_at_once_are_those_that_come_one_after_the_other(initial: int) -> None:
    trials, pending = tried(9), NONE
    for _ in range(3):
        pending = np.concatenate([pending, of(initial).propose(trials, pending, 1)])
    assert of(initial).propose(trials, NONE, 3).tolist() == pending.tolist()


def test_a_search_starts_with_the_design() -> None:
    found = of(4).propose(Trials(NONE, np.empty((0, 2))), NONE, 4)
    assert found.tolist() == of(DESIGN).propose(tried(0), NONE, 4).tolist()


@_NEEDS
def test_a_process_with_other_threads_proposes_the_same() -> None:
    code = (
        "import torch; torch.set_num_threads(3); torch.rand(7);"
        "from tests.search.test_bayes import of, tried;"
        "print(of(4).propose(tried(9), tried(2, seed=1).points, 1).tolist())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout
    assert told.strip() == str(of(4).propose(tried(9), tried(2, seed=1).points, 1).tolist())


@_NEEDS
def test_failures_and_values_that_are_all_equal_do_not_end_a_search() -> None:
    trials = tried(6)
    values = trials.values.copy()
    values[:3] = REFERENCE
    lengths = np.array([0.5, 1.0, 2.0, 5.0])
    ask = of(4, lengths=lengths)
    for some in (values, np.full_like(values, REFERENCE), np.ones_like(values)):
        assert len(ask.propose(Trials(trials.points, some), NONE, 1)) == 1


@_NEEDS
def test_a_prior_that_tells_no_dimension_apart_is_none() -> None:
    equal = of(4, lengths=np.full(DIMS, 2.0))
    assert equal.propose(tried(9), NONE, 1).tolist() == of(4).propose(tried(9), NONE, 1).tolist()


@_NEEDS
def test_a_model_covers_more_than_the_design_with_the_same_evaluations() -> None:
    def reached(initial: int) -> float:
        trials = tried(0)
        while len(trials) < 14:
            points = of(initial).propose(trials, NONE, 2)
            points = np.concatenate([trials.points, points])
            trials = Trials(points, values_of(points))
        return hypervolume(trials.values)

    assert reached(4) > reached(DESIGN) + 0.1


@pytest.mark.parametrize("initial", [MODELLED, DESIGN])
def test_a_grid_that_is_used_up_gives_no_point(initial: int) -> None:
    points = np.arange(STEPS + 1)[:, None] / STEPS
    values = np.concatenate([points, points], axis=1)
    free = [3, 60]
    trials = Trials(np.delete(points, free, axis=0), np.delete(values, free, axis=0))
    found = of(initial, dims=1).propose(trials, points[:0], 5)
    assert sorted(found[:, 0] * STEPS) == free


def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "botorch", None)
    with pytest.raises(MergePipeError, match=r"pip install 'mergepipe-pipeline\[search\]'"):
        refuse_without_botorch()


def test_neither_torch_nor_botorch_is_loaded_before_a_point_is_asked_for() -> None:
    code = (
        "import sys, mergepipe_pipeline.search.bayes as _;"
        "sys.exit(bool({'torch', 'botorch', 'scipy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
