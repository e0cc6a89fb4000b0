"""Builds windows and tasks for operators from an oracle's case, and draws cases.

Drawn numbers lie on a binary grid, so that products and sums over experts are exact in float32: a
sign vote then has one answer, and only divisions and the last additions round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import assume
from hypothesis import strategies as st

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.operator import OperatorSchema, Parameter
from mergepipe_pipeline.domain.plan import BaseInput, ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators import Operator, Window
from mergepipe_pipeline.operators.steps.random import uniforms
from mergepipe_pipeline.operators.steps.tensor_measures import Measure, Quantiles, Sums
from tests.support import oracles
from tests.support.oracles import Bools, Case, Floats, Value

NAME = "model.layers.0.mlp.up_proj.weight"
SEED = 11
GRID = 64


@dataclass(frozen=True)
class Job:
    """A case with the task that the planner would have made of it."""

    case: Case
    task: TensorTask
    base: torch.Tensor | None
    experts: torch.Tensor  # as the operator's space asks

    @property
    def numel(self) -> int:
        return self.experts.shape[1]

    def window(self, start: int = 0, stop: int | None = None) -> Window:
        """Copies of elements [start, stop)."""
        base = None if self.base is None else self.base[start:stop].clone()
        return Window(base, self.experts[:, start:stop].clone(), self.task, start)


def merge(
    op: Operator, job: Job, cuts: Sequence[int] = (), order: Sequence[int] = ()
) -> torch.Tensor:
    """The merged tensor, window by window between `cuts`, in `order` of the windows.

    Cuts move down to the next row where the operator works on rows.
    """
    windows = windows_of(op, job, cuts)
    out = torch.full((job.numel,), torch.nan)
    for start, stop in [windows[i] for i in order] if order else windows:
        out[start:stop] = op.apply(job.window(start, stop))
    return out


def windows_of(op: Operator, job: Job, cuts: Sequence[int]) -> list[tuple[int, int]]:
    step = job.case.row if op.schema.scope == "row" else 1
    edges = {cut // step * step for cut in cuts}
    return list(pairwise([0, *sorted(edges - {0, job.numel}), job.numel]))


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype == torch.float32
    torch.testing.assert_close(a.view(torch.int32), b.view(torch.int32), rtol=0, atol=0)


def rule_of(size: Floats, keep: Bools) -> TrimRule:
    """The rule that keeps what `keep` does: the largest of `size`, equal ones by lowest index."""
    if not keep.any():
        return TrimRule(int(np.float32(np.inf).view(np.uint32)), 0)
    threshold = size[keep].min()
    ties = np.flatnonzero(keep & (size == threshold))
    return TrimRule(int(np.float32(threshold).view(np.uint32)), int(ties[-1]) + 1)


def make_job(op: Operator, case: Case) -> Job:
    """The job of `case`: positions 1, 3, 5, …, drops by `uniforms`, scales from the case or L1."""
    schema = op.schema
    n_experts, numel = case.experts.shape
    shape = case.shape or (numel,)
    positions = [2 * i + 1 for i in range(n_experts)]
    numbers = [uniforms(SEED, p, NAME, 0, numel) / 2**32 for p in positions]
    case = replace(case, shape=shape, uniforms=np.array(numbers))
    kept = _kept(schema, case)
    view = view_of(TensorEntry(NAME, "F32", shape, "model.safetensors", 0))
    inputs = []
    for i in range(n_experts):
        delta, keep = case.deltas[i], kept[i]
        trim, outliers = _rules(schema, case, i)
        scale = oracles.l1_scale(delta, keep) if case.scales is None else float(case.scales[i])
        inputs.append(
            ExpertInput(
                position=positions[i],
                view=view,
                digest=f"{i:064x}",
                params=tuple(case.model_params[i].items()),
                covered=((0, numel),),
                read=((0, numel),),
                trim=trim,
                outliers=outliers,
                scale=scale,
            )
        )
    base = None if case.base is None else BaseInput(view, "b" * 64)
    params = tuple(case.params.items())
    task = TensorTask(NAME, shape, "F32", schema.name, params, SEED, base, tuple(inputs))
    as_delta = schema.space == "delta" or (schema.space == "delta_if_base" and base is not None)
    source = case.deltas if as_delta else case.experts
    job = Job(case, task, None if case.base is None else _tensor(case.base), _tensor(source))
    return measured(op, job)


def _kept(schema: OperatorSchema, case: Case) -> Bools:
    if schema.fact == "trim":
        return oracles.trimmed(case)
    if schema.fact == "band":
        return oracles.banded(case)
    if schema.fact == "none":
        return np.ones(case.experts.shape, dtype=bool)
    by_rank = schema.fact == "ranked"
    probability = oracles.della_probability(case) if by_rank else oracles.dare_probability(case)
    return oracles.dropped(case, probability)


def _rules(schema: OperatorSchema, case: Case, i: int) -> tuple[TrimRule | None, TrimRule | None]:
    density = float(case.column("density", 1.0)[i, 0]) if schema.fact in ("trim", "band") else 1.0
    if density >= 1 or density <= 0:
        return None, None
    size = np.abs(case.deltas[i])
    if schema.fact == "trim":
        return rule_of(size, oracles.trimmed(case)[i]), None
    kept = int(density * size.size)
    above = min(int(float(case.column("gamma", 0.01)[i, 0]) * size.size), size.size - kept)
    outliers = rule_of(size, oracles.largest(size, above)) if above else None
    return rule_of(size, oracles.largest(size, kept + above)), outliers


def measured(op: Operator, job: Job) -> Job:
    """The job with the facts of its operator's measures, each of one window and by sorting."""
    numbers: tuple[float, ...] = ()
    for step in op.measures:
        known = replace(job, task=replace(job.task, facts=numbers))
        needed = step.is_needed(dict(job.task.params))
        numbers += _measure(step, known) if needed else step.skipped
    models = [e.params for e in job.task.experts]
    facts = op.settle(job.task.params, models, numbers)
    return replace(job, task=replace(job.task, facts=facts))


def _measure(step: Measure, job: Job) -> tuple[float, ...]:
    if isinstance(step, Sums):
        sums = step.of(job.window())
        assert sums.dtype == torch.float64
        return tuple(sums.tolist())
    score = step.score(job.window()).numpy()
    assert score.dtype == np.float32
    assert not np.signbit(score).any()
    assert not np.isnan(score).any()
    if isinstance(step, Quantiles):
        return tuple(np.sort(score)[list(step.ranks(score.size))].tolist())
    nonzero = int(np.count_nonzero(score))
    count = step.count(score.size, nonzero, job.task.facts, dict(job.task.params))
    if count >= nonzero and nonzero:
        return 0.0, 0.0
    keep = oracles.largest(score.astype(np.float64), count)
    if not keep.any():
        return float("inf"), 0.0
    least = score[keep].min()
    return float(least), float(np.flatnonzero(keep & (score == least))[-1] + 1)


def _tensor(values: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def job_for(op: Operator, deltas: Sequence[Sequence[float]], **params: Any) -> Job:
    """A job from plain numbers on a base of ones; parameters given as sequences are per model.

    More rows than the operator takes are left out; weights are 1 and a required t is 100.
    """
    rows = np.array(deltas, dtype=np.float64)[: op.schema.experts[1]]
    base = np.ones(rows.shape[1])
    names = {p.name: p.scope for p in op.schema.parameters}
    defaults: dict[str, Any] = {"weight": [1.0] * len(rows), "t": 100.0}
    given = {k: v for k, v in defaults.items() if k in names}
    given |= {k.rstrip("_"): v for k, v in params.items()}
    method = {k: v for k, v in given.items() if names[k] == "method"}
    models = [{k: v[i] for k, v in given.items() if names[k] == "model"} for i in range(len(rows))]
    return make_job(op, Case(base, base + rows, method, models))


#: Values worth trying, by parameter name; others lie on a grid from -2 to 2.
VALUES: dict[str, Sequence[float]] = {
    "density": (0.0, 0.25, 0.5, 0.75, 1.0, 1.5),
    "gamma": (0.0, 0.01, 0.1, 0.5, 2.0),
    "select_topk": (0.0, 0.3, 0.5, 1.0, 2.0),
    "t": (0.0, 1e-7, 1 / 64, 0.5, 100.0),
    "eps": (0.0, 1e-8),
    "tol": (1e-5,),
    "max_iter": (0, 10),
}
#: The same for names that mean different things per model and per method.
EPSILONS = {"model": (0.0, 0.125, 0.25), "method": (1e-5, 1 / 64, 0.5)}


def _value(parameter: Parameter) -> st.SearchStrategy[Value]:
    if parameter.kind == "bool":
        return st.booleans()
    if parameter.kind == "choice":
        return st.sampled_from(parameter.choices)
    if parameter.name == "epsilon":
        return st.sampled_from(EPSILONS[parameter.scope])
    if parameter.name in VALUES:
        return st.sampled_from(VALUES[parameter.name])
    return st.integers(-16, 16).map(lambda i: i / 8)


@st.composite
def parameters(draw: st.DrawFn, schema: OperatorSchema, scope: str) -> dict[str, Value]:
    """Values for the parameters of one scope; optional ones are sometimes left out."""
    out = {}
    for p in schema.parameters:
        if p.scope == scope and (p.default is None or draw(st.booleans())):
            out[p.name] = draw(_value(p))
    return out


@st.composite
def shapes(draw: st.DrawFn, max_numel: int) -> tuple[int, ...]:
    """A vector, a matrix, or a matrix of rows of one element."""
    if draw(st.booleans()):
        return (draw(st.integers(1, max_numel)),)
    width = draw(st.sampled_from([1, 2, 3, 8, 13, 17]))
    return (draw(st.integers(1, max(1, max_numel // width))), width)


@st.composite
def jobs(draw: st.DrawFn, op: Operator, max_numel: int = 80) -> Job:
    """Jobs with many zeros and equal magnitudes, among them negative weights and zero sums."""
    fewest, most = op.schema.experts
    n_experts, shape = draw(st.integers(fewest, most or 4)), draw(shapes(max_numel))
    numel = int(np.prod(shape))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    reach = draw(st.sampled_from([1, 3, 100]))
    base = numbers.integers(-500, 501, numel) / GRID
    deltas = numbers.integers(-reach, reach + 1, (n_experts, numel)) / GRID
    params = draw(parameters(op.schema, "method"))
    models = [draw(parameters(op.schema, "model")) for _ in range(n_experts)]
    if params.get("variant") == "paper":
        models = [_exact_in_paper(op, m, models[0]) for m in models]
    scales = np.array([draw(st.sampled_from([0.5, 1.0, 1.25, 3.0])) for _ in range(n_experts)])
    try:
        op.validate(NAME, shape, tuple(params.items()), [tuple(m.items()) for m in models])
        return make_job(op, Case(base, base + deltas, params, models, scales=scales, shape=shape))
    except OperatorError:
        assume(False)
        raise


def _exact_in_paper(
    op: Operator, model: dict[str, Value], first: dict[str, Value]
) -> dict[str, Value]:
    """The parameters with one weight for all, and probabilities whose inverse is exact."""
    exact = model | {"weight": first["weight"]}
    if "density" in model and model["density"] == 0.75:
        exact["density"] = 0.5
    return exact | ({"epsilon": 0.0} if op.schema.fact == "ranked" else {})


def big_job(op: Operator, shape: tuple[int, ...]) -> Job:
    """Three experts of normal numbers and weights that float32 rounds: every sum rounds too."""
    numel = int(np.prod(shape))
    n_experts = min(3, op.schema.experts[1] or 3)
    numbers = np.random.default_rng(5)
    base = numbers.standard_normal(numel, dtype=np.float32).astype(np.float64)
    deltas = numbers.standard_normal((3, numel), dtype=np.float32).astype(np.float64)
    deltas[:, ::7] = 0.0
    given: dict[str, Sequence[Value]] = {
        "weight": [0.3, 0.9, -0.1],
        "density": [0.3, 0.6, 1.0],
        "scale": [0.3],
    }
    once: dict[str, Value] = {"normalize": True, "t": 0.3, "select_topk": 0.4, "epsilon": 0.5}
    scopes = {p.name: p.scope for p in op.schema.parameters}
    models = [
        {name: v[i] for name, v in given.items() if scopes.get(name) == "model"}
        for i in range(n_experts)
    ]
    params = {name: v for name, v in once.items() if scopes.get(name) == "method"}
    # base + deltas is formed in float64, so that the deltas cast to float32 are the numbers drawn.
    return make_job(op, Case(base, base + deltas[:n_experts], params, models, shape=shape))
