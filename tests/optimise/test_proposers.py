"""What every method keeps to when it says where to evaluate next."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.optimise.grid import STEPS, fresh, rounded
from mergepipe_pipeline.optimise.pareto import hypervolume
from mergepipe_pipeline.optimise.proposers import Method, Proposer, proposer
from mergepipe_pipeline.optimise.trials import REFERENCE, Trials

_HAS_BOTORCH = find_spec("botorch") is not None
_NEEDS = pytest.mark.skipif(not _HAS_BOTORCH, reason="needs the extra `search`")
METHODS = [
    pytest.param("async", marks=_NEEDS),
    pytest.param("sync", marks=_NEEDS),
    "nsga2",
    "sobol",
]
DIMS = 4
NONE = np.empty((0, DIMS))


def values_of(points: F64Array) -> F64Array:
    """ZDT1, maximised."""
    g = 1 + 9 * points[:, 1:].mean(axis=1)
    return 1 - np.stack([points[:, 0], g * (1 - np.sqrt(points[:, 0] / g)) / 5.5], axis=1)


def tried(count: int, seed: int = 0, dims: int = DIMS) -> Trials:
    points = rounded(np.random.default_rng(seed).random((count, dims)))
    return Trials(points, values_of(points))


def of(method: Method, *, dims: int = DIMS, initial: int = 4, **more: object) -> Proposer:
    return proposer(method, dims=dims, objectives=2, seed=5, initial=initial, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_points_lie_on_the_grid_and_are_neither_known_nor_pending_nor_equal(
    method: Method,
) -> None:
    trials = tried(9)
    pending = NONE if method == "sync" else tried(2, seed=1).points
    found = of(method).propose(trials, pending, 3)
    assert found.shape == (3, DIMS)
    assert (found * STEPS == np.round(found * STEPS)).all()
    assert ((found >= 0) & (found <= 1)).all()
    assert len(fresh(found, trials.points, pending)) == 3


@pytest.mark.parametrize("method", [METHODS[0], *METHODS[2:]])
def test_three_points_at_once_are_those_that_come_one_after_the_other(method: Method) -> None:
    trials, pending = tried(9), NONE
    for _ in range(3):
        pending = np.concatenate([pending, of(method).propose(trials, pending, 1)])
    assert of(method).propose(trials, NONE, 3).tolist() == pending.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_every_search_starts_with_the_same_design(method: Method) -> None:
    found = of(method).propose(Trials(NONE, np.empty((0, 2))), NONE, 4)
    assert found.tolist() == of("sobol").propose(tried(0), NONE, 4).tolist()


@_NEEDS
def test_a_process_with_other_threads_proposes_the_same() -> None:
    code = (
        "import torch; torch.set_num_threads(3); torch.rand(7);"
        "from tests.optimise.test_proposers import of, tried;"
        "print(of('async').propose(tried(9), tried(2, seed=1).points, 1).tolist())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout
    assert told.strip() == str(of("async").propose(tried(9), tried(2, seed=1).points, 1).tolist())


@_NEEDS
def test_a_round_is_proposed_when_nothing_is_pending() -> None:
    assert len(of("sync").propose(tried(9), tried(1, seed=1).points, 3)) == 0


@_NEEDS
@pytest.mark.parametrize("prior", ["none", "start", "map"])
def test_failures_and_values_that_are_all_equal_do_not_end_a_search(prior: str) -> None:
    trials = tried(6)
    values = trials.values.copy()
    values[:3] = REFERENCE
    lengths = np.array([0.5, 1.0, 2.0, 5.0])
    ask = of("async", length_scales=lengths, prior=prior)
    for some in (values, np.full_like(values, REFERENCE), np.ones_like(values)):
        assert len(ask.propose(Trials(trials.points, some), NONE, 1)) == 1


@_NEEDS
def test_a_prior_that_holds_and_tells_no_dimension_apart_is_none() -> None:
    equal = of("async", length_scales=np.full(DIMS, 2.0), prior="map")
    assert (
        equal.propose(tried(9), NONE, 1).tolist() == of("async").propose(tried(9), NONE, 1).tolist()
    )


@_NEEDS
def test_a_model_covers_more_than_the_design_with_the_same_evaluations() -> None:
    def reached(method: Method) -> float:
        trials = tried(0)
        while len(trials) < 14:
            points = of(method).propose(trials, NONE, 2)
            points = np.concatenate([trials.points, points])
            trials = Trials(points, values_of(points))
        return hypervolume(trials.values)

    assert reached("async") > reached("sobol") + 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_grid_that_is_used_up_gives_no_point(method: Method) -> None:
    points = np.arange(STEPS + 1)[:, None] / STEPS
    values = np.concatenate([points, points], axis=1)
    free = [3, 60]
    trials = Trials(np.delete(points, free, axis=0), np.delete(values, free, axis=0))
    found = of(method, dims=1).propose(trials, points[:0], 5)
    assert sorted(found[:, 0] * STEPS) == free


def test_a_method_whose_package_is_missing_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "botorch", None)
    with pytest.raises(MergePipeError, match=r"pip install 'mergepipe-pipeline\[search\]'"):
        of("async")
    of("sobol")


def test_neither_torch_nor_botorch_is_loaded_before_a_point_is_asked_for() -> None:
    code = (
        "import sys, mergepipe_pipeline.optimise.proposers as _;"
        "import mergepipe_pipeline.optimise.acquisition;"
        "sys.exit(bool({'torch', 'botorch', 'scipy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
