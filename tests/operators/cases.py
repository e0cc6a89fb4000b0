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

from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators import Operator, Window
from mergepipe_pipeline.operators.random import keep_mask
from mergepipe_pipeline.spec.checkpoint import TensorEntry
from mergepipe_pipeline.spec.operator import OperatorSchema, Parameter
from mergepipe_pipeline.spec.plan import BaseInput, ExpertInput, TensorTask, TrimRule
from tests.oracles import Case, Floats, Value, l1_scale, trim_keep

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


def merge(
    op: Operator, job: Job, cuts: Sequence[int] = (), order: Sequence[int] = ()
) -> torch.Tensor:
    """The merged tensor, window by window between `cuts`, in `order` of the windows."""
    edges = [0, *sorted(set(cuts) - {0, job.numel}), job.numel]
    windows = list(pairwise(edges))
    out = torch.full((job.numel,), torch.nan)
    for start, stop in [windows[i] for i in order] if order else windows:
        base = None if job.base is None else job.base[start:stop].clone()
        experts = job.experts[:, start:stop].clone()
        out[start:stop] = op.apply(Window(base, experts, job.task, start))
    return out


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype == torch.float32
    torch.testing.assert_close(a.view(torch.int32), b.view(torch.int32), rtol=0, atol=0)


def trim_rule(delta: Floats, density: float) -> TrimRule | None:
    if density >= 1:
        return None
    keep, size = trim_keep(delta, density), np.abs(delta)
    threshold = size[keep].min()
    ties = np.flatnonzero(keep & (size == threshold))
    return TrimRule(int(np.float32(threshold).view(np.uint32)), int(ties[-1]) + 1)


def make_job(op: Operator, case: Case) -> Job:
    """The job of `case`: positions 1, 3, 5, …, masks by `keep_mask`, scales from the case or L1."""
    schema = op.schema
    n_experts, numel = case.experts.shape
    entry = TensorEntry(NAME, "F32", (numel,), "model.safetensors", 0)
    densities = case.column("density", 1.0)[:, 0]
    positions = [2 * i + 1 for i in range(n_experts)]
    if schema.fact == "drop":
        masks = [keep_mask(SEED, p, NAME, 0, numel, d) for p, d in zip(positions, densities)]  # noqa: B905
        case = replace(case, keep=np.array(masks))
    inputs = []
    for i in range(n_experts):
        delta, density = case.deltas[i], float(densities[i])
        trim = trim_rule(delta, density) if schema.fact == "trim" else None
        scale = 1.0
        if case.scales is not None:
            scale = float(case.scales[i])
        elif schema.fact != "none":
            kept = trim_keep(delta, density) if case.keep is None else case.keep[i]
            scale = l1_scale(delta, kept)
        params = tuple(case.model_params[i].items())
        span = ((0, numel),)
        inputs.append(
            ExpertInput(i, positions[i], entry, f"{i:064x}", params, span, span, trim, scale)
        )
    base = None if case.base is None else BaseInput(9, entry, "b" * 64)
    params = tuple(case.params.items())
    task = TensorTask(NAME, (numel,), "F32", schema.name, params, SEED, base, tuple(inputs))
    source = case.deltas if schema.space == "delta" else case.experts
    return Job(case, task, None if case.base is None else _tensor(case.base), _tensor(source))


def _tensor(values: npt.NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def job_for(op: Operator, deltas: Sequence[Sequence[float]], **params: Any) -> Job:
    """A job from plain numbers on a base of ones; parameters given as sequences are per model."""
    rows = np.array(deltas, dtype=np.float64)
    base = np.ones(rows.shape[1])
    names = {p.name: p.scope for p in op.schema.parameters}
    params = {"weight": [1.0] * len(rows)} | {k.rstrip("_"): v for k, v in params.items()}
    method = {k: v for k, v in params.items() if names[k] == "method"}
    models = [{k: v[i] for k, v in params.items() if names[k] == "model"} for i in range(len(rows))]
    return make_job(op, Case(base, base + rows, method, models))


def _value(parameter: Parameter) -> st.SearchStrategy[Value]:
    if parameter.kind == "bool":
        return st.booleans()
    if parameter.name == "density":
        return st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.5])
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
def jobs(draw: st.DrawFn, op: Operator, max_numel: int = 80) -> Job:
    """Jobs with many zeros and equal magnitudes, among them negative weights and zero sums."""
    n_experts, numel = draw(st.integers(1, 4)), draw(st.integers(1, max_numel))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    reach = draw(st.sampled_from([1, 3, 100]))
    base = numbers.integers(-500, 501, numel) / GRID
    deltas = numbers.integers(-reach, reach + 1, (n_experts, numel)) / GRID
    params = draw(parameters(op.schema, "method"))
    models = [draw(parameters(op.schema, "model")) for _ in range(n_experts)]
    scales = np.array([draw(st.sampled_from([0.5, 1.0, 1.25, 3.0])) for _ in range(n_experts)])
    try:
        op.validate(NAME, numel, tuple(params.items()), [tuple(m.items()) for m in models])
    except OperatorError:
        assume(False)
    return make_job(op, Case(base, base + deltas, params, models, scales=scales))


def big_job(op: Operator, numel: int) -> Job:
    """Three experts of normal numbers and weights that float32 rounds: every sum rounds too."""
    numbers = np.random.default_rng(5)
    base = numbers.standard_normal(numel, dtype=np.float32).astype(np.float64)
    deltas = numbers.standard_normal((3, numel), dtype=np.float32).astype(np.float64)
    deltas[:, ::7] = 0.0
    given = {"weight": [0.3, 0.9, -0.1], "density": [0.3, 0.6, 1.0]}
    names = [p.name for p in op.schema.parameters if p.scope == "model" and p.name in given]
    models = [{name: given[name][i] for name in names} for i in range(3)]
    params = {p.name: True for p in op.schema.parameters if p.name == "normalize"}
    # base + deltas is formed in float64, so that the deltas cast to float32 are the numbers drawn.
    return make_job(op, Case(base, base + deltas, params, models))
