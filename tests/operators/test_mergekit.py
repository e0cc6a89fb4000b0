"""The same numbers as mergekit's own methods on float32 tensors, its random draws replaced by ours.

What is arbitrary in mergekit (which of equal magnitudes a trim keeps) does not occur: the numbers
are normal.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mergepipe_pipeline.operators import OPERATORS
from tests.operators.cases import Job, make_job, merge
from tests.support.oracles import Case, Floats, Value

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(
        importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed (.[peer])"
    ),
]

SHAPE = (96, 257)


def _case(method: str, scale: float, params: dict[str, Any]) -> Case:
    """Three models, their deltas of size `scale`, on a grid on which float32 subtracts exactly."""
    numbers = np.random.default_rng(17)
    numel, grid = SHAPE[0] * SHAPE[1], scale * 2.0**-18
    base = np.round(0.02 * numbers.standard_normal(numel) / grid) * grid
    experts = base + np.round(scale * numbers.standard_normal((3, numel)) / grid) * grid
    experts[:, ::9] = base[::9]
    experts = experts[: OPERATORS[method].schema.experts[1]]
    scopes = {p.name: p.scope for p in OPERATORS[method].schema.parameters}
    given = ({"weight": [0.3, 0.9, 0.4]} if "weight" in scopes else {}) | params
    once: dict[str, Value] = {k: v for k, v in given.items() if scopes[k] == "method"}
    models = [
        {k: v[i] for k, v in given.items() if scopes[k] == "model"} for i in range(len(experts))
    ]
    return Case(
        base if OPERATORS[method].schema.needs_base else None, experts, once, models, shape=SHAPE
    )


def _theirs(method: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import TensorGroup

    case, spec = job.case, registry.get(method).spec
    drawn: Iterator[Floats] = iter(case.uniforms if case.uniforms is not None else [])
    monkeypatch.setattr(
        torch,
        "bernoulli",
        lambda p: torch.from_numpy(next(drawn)).reshape(p.shape).lt(p.double()).to(p.dtype),
    )
    rows = [*([] if case.base is None else [case.base]), *case.experts]
    group = TensorGroup.from_tensors(
        [
            torch.from_numpy(r.astype(np.float32)).reshape(SHAPE).to(DTYPES.get(method))
            for r in rows
        ],
        base_index=None if case.base is None else 0,
    )
    known = {p.name: p.scope for p in OPERATORS[method].schema.parameters}
    params: dict[str, Any] = dict(case.params)
    for p in spec.parameters:
        if known.get(p.name) == "model" and p.name in case.model_params[0]:
            ids = [entry.id for entry in group.non_base]
            params[p.name] = dict(zip(ids, (m[p.name] for m in case.model_params), strict=True))
    (out,) = registry.get(method)([group], parameters=params)
    flat: torch.Tensor = out.float().flatten()
    return flat


#: Of the small numbers that arcee_fusion selects by, most is rounding where mergekit uses float32.
DTYPES = {"arcee_fusion": torch.float64}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "linear-sum": ("linear", {"normalize": False}),
    "passthrough": ("passthrough", {}),
    "passthrough-scale": ("passthrough", {"scale": [0.7]}),
    "task_arithmetic": ("task_arithmetic", {"normalize": True, "lambda": 0.7}),
    "ties": ("ties", {"density": [0.2, 0.5, 1.0]}),
    "ties-rescale": ("ties", {"density": [0.2, 0.00001, 0.0], "rescale": True}),
    "breadcrumbs": ("breadcrumbs", {"density": [0.2, 0.995, 1.0]}),
    "breadcrumbs-gamma": ("breadcrumbs", {"density": [0.2, 0.5, 0.0], "gamma": [0.0, 0.9, 0.1]}),
    "breadcrumbs_ties": ("breadcrumbs_ties", {"density": [0.2, 0.5, 0.9], "gamma": [0.1] * 3}),
    "dare_linear": ("dare_linear", {"density": [0.2, 0.5, 1.0]}),
    "dare_ties": ("dare_ties", {"density": [0.2, 0.5, 0.9], "normalize": True}),
    "della": ("della", {"density": [0.2, 0.5, 0.8]}),
    "della_linear": ("della_linear", {"density": [0.2, 0.5, 0.8], "epsilon": [0.1, 0.3, 0.0]}),
    "sce": ("sce", {}),
    "sce-topk": ("sce", {"select_topk": 0.3}),
    "arcee_fusion": ("arcee_fusion", {}),
    "nearswap": ("nearswap", {"t": 0.003}),
    "ram": ("ram", {"epsilon": 0.002}),
    "ramplus_tl": ("ramplus_tl", {"epsilon": 0.002, "r": 0.5, "alpha": 0.9}),
}


#: Same bits but for the order of mergekit's sums over whole tensors, or over experts.
SUMS_ROUND = {
    "ties-rescale",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "sce",
    "sce-topk",
}
#: The same sum written in another way.
SUMS_ROUND |= {"nearswap"}


@pytest.mark.parametrize("scale", [2.0**-9, 0.5])
@pytest.mark.parametrize("name", RECIPES)
def test_a_merge_equals_the_one_of_mergekit(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, params = RECIPES[name]
    op = OPERATORS[method]
    job = make_job(op, _case(method, scale, params))
    ours, theirs = merge(op, job), _theirs(method, job, monkeypatch)
    if name not in SUMS_ROUND:
        assert torch.equal(ours, theirs)
    size = np.abs(job.case.experts).max(0) + np.abs(ours.double().numpy())
    error = np.abs(ours.double().numpy() - theirs.double().numpy())
    assert (error <= 1e-6 * size).all()
