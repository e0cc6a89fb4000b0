"""What processes say between the trials they were fitted to."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.search.bayes import fitted
from mergepipe_pipeline.search.pareto import Trials

pytest.importorskip("botorch", reason="needs the extra `search`")
pytestmark = pytest.mark.filterwarnings("ignore")

DIMS = 20
LENGTHS = np.repeat([0.5, 1.0, 2.0, 5.0], DIMS // 4)


def worth(points: F64Array) -> F64Array:
    """DTLZ2, maximised: all dimensions but the first are best at one half."""
    far = 1 + ((points[:, 1:] - 0.5) ** 2).sum(axis=1)
    angle = points[:, 0] * np.pi / 2
    return 1 - np.stack([far * np.cos(angle), far * np.sin(angle)], axis=1) / 2.6


def some(count: int) -> Trials:
    points = np.random.default_rng(0).random((count, DIMS))
    return Trials(points, worth(points))


def test_forty_trials_tell_most_of_twenty_dimensions_where_the_middle_is_best() -> None:
    import torch

    points = np.random.default_rng(1).random((200, DIMS))
    model = fitted(some(40), np.ones(DIMS))
    with torch.no_grad():
        missed = model.posterior(torch.from_numpy(points)).mean.numpy() - worth(points)
    assert (missed.var(axis=0) < 0.08 * worth(points).var(axis=0)).all()


def test_a_fit_that_fails_can_be_tried_again_from_where_it_was() -> None:
    model = fitted(some(8), LENGTHS)
    model.load_state_dict(deepcopy(model.state_dict()))
