"""Merges by angles: the vectors' formulas from inner products alone, and the same as mergekit."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.plan import BaseInput, ExpertInput, TensorTask
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.errors import OperatorError
from mergepipe_pipeline.operators import OPERATORS, Window
from mergepipe_pipeline.operators.steps.tensor_measures import Sums
from tests.operators.cases import assert_same_bits
from tests.support.laws import examples
from tests.support.oracles import Case, Floats
from tests.support.oracles_spherical import ORACLES_SPHERICAL, model_stock, nuslerp

NAME = "model.layers.0.mlp.up_proj.weight"
law = settings(max_examples=examples(40), deadline=None)
every_method = pytest.mark.parametrize("method", ORACLES_SPHERICAL)
live = pytest.mark.skipif(
    importlib.util.find_spec("mergekit") is None, reason="mergekit is not installed (.[peer])"
)

Params = Mapping[str, Any]


def case_of(
    method: str,
    rows: Sequence[Sequence[float] | Floats] | Floats,
    base: Sequence[float] | Floats | None = None,
    **params: Any,
) -> Case:
    """A case of `rows` as values; parameters given as lists are per model, weights are 1."""
    values = np.array(rows, dtype=np.float32).astype(np.float64)
    names = {p.name: p.scope for p in OPERATORS[method].schema.parameters}
    if "weight" in names:
        params = {"weight": [1.0] * len(values)} | params
    model_params = [
        {k: v[i] for k, v in params.items() if names[k] == "model"} for i in range(len(values))
    ]
    method_params = {k: v for k, v in params.items() if names[k] == "method"}
    start = None if base is None else np.array(base, dtype=np.float32).astype(np.float64)
    return Case(start, values, method_params, model_params)


def windows_of(
    method: str, case: Case, shape: tuple[int, ...] | None = None, cuts: Sequence[int] = ()
) -> Iterator[Window]:
    """What the engine would hand over, between `cuts`, for a task without facts."""
    numel = case.experts.shape[1]
    shape = shape or (numel,)
    view = view_of(TensorEntry(NAME, "F32", shape, "model.safetensors", 0))
    span = ((0, numel),)
    experts = tuple(
        ExpertInput(i, view, f"{i:064x}", tuple(p.items()), span, span)
        for i, p in enumerate(case.model_params)
    )
    base_input = None if case.base is None else BaseInput(view, "b" * 64)
    params = tuple(case.params.items())
    task = TensorTask(NAME, shape, "F32", method, params, 1, base_input, experts)
    as_values = OPERATORS[method].schema.space == "value"
    rows = torch.from_numpy((case.experts if as_values else case.deltas).astype(np.float32))
    base = None if case.base is None else torch.from_numpy(case.base.astype(np.float32))
    for start, stop in pairwise([0, *sorted(set(cuts) - {0, numel}), numel]):
        part = None if base is None else base[start:stop].clone()
        yield Window(part, rows[:, start:stop].clone(), task, start)


def measure(method: str, case: Case, **where: Any) -> tuple[float, ...]:
    numbers: tuple[float, ...] = ()
    for step in OPERATORS[method].measures:
        assert isinstance(step, Sums)
        if step.is_needed(dict(case.params)):
            parts = [step.of(w) for w in windows_of(method, case, **where)]
            assert all(p.dtype == torch.float64 for p in parts)
            numbers += tuple(torch.stack(parts).sum(0).tolist())
    return numbers


def settle(method: str, case: Case, shape: tuple[int, ...] | None = None) -> tuple[float, ...]:
    models = [tuple(p.items()) for p in case.model_params]
    numbers = measure(method, case, shape=shape)
    return OPERATORS[method].settle(tuple(case.params.items()), models, numbers)


def merge(
    method: str, case: Case, shape: tuple[int, ...] | None = None, cuts: Sequence[int] = ()
) -> torch.Tensor:
    facts = settle(method, case, shape)
    apply, windows = OPERATORS[method].apply, windows_of(method, case, shape, cuts)
    return torch.cat([apply(replace(w, task=replace(w.task, facts=facts))) for w in windows])


def validate(method: str, case: Case, shape: tuple[int, ...]) -> None:
    models = [tuple(p.items()) for p in case.model_params]
    OPERATORS[method].validate(NAME, shape, tuple(case.params.items()), models)


def assert_close(ours: torch.Tensor, want: Floats | torch.Tensor, rel: float = 1e-5) -> None:
    expected = np.asarray(want, dtype=np.float64)
    error = np.abs(ours.double().numpy() - expected)
    assert error.max() <= rel * max(np.abs(expected).max(), 1e-30)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


METHOD_PARAMS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "slerp": st.fixed_dictionaries({"t": st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5])}),
    "nuslerp": st.fixed_dictionaries({}, optional={"nuslerp_flatten": st.booleans()}),
    "multislerp": st.fixed_dictionaries({}, optional={"normalize_weights": st.booleans()}),
    "karcher": st.fixed_dictionaries({}, optional={"max_iter": st.integers(0, 20)}),
    "model_stock": st.fixed_dictionaries({}, optional={"filter_wise": st.booleans()}),
}


@st.composite
def cases(draw: st.DrawFn, method: str) -> tuple[Case, tuple[int, ...]]:
    """Normal numbers with a common part, so that angles are from small to obtuse."""
    least, most = OPERATORS[method].schema.experts
    count = draw(st.integers(max(least, 1), most or 4))
    shape = (draw(st.integers(1, 5)), draw(st.integers(12, 40)))  # no near-opposites by chance
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    numel = shape[0] * shape[1]
    common = draw(st.sampled_from([0.0, 0.5, 3.0])) * numbers.standard_normal(numel)
    deltas = numbers.standard_normal((count, numel)) + common
    use = OPERATORS[method].schema.base
    with_base = use == "required" or (use == "optional" and draw(st.booleans()))
    base = numbers.standard_normal(numel) if with_base else None
    params = draw(METHOD_PARAMS[method])
    if any(p.name == "weight" for p in OPERATORS[method].schema.parameters):
        weights = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=count, max_size=count)
        params = params | {"weight": draw(weights)}
    values = deltas if base is None else base + deltas
    return case_of(method, values, base, **params), shape


def oracle(method: str, case: Case, shape: tuple[int, ...]) -> Floats:
    by_row = {"nuslerp": nuslerp, "model_stock": model_stock}
    if method in by_row:
        return by_row[method](case, row_elems=shape[-1])
    return ORACLES_SPHERICAL[method](case)


@every_method
@law
@given(data=st.data())
def test_a_merge_equals_the_formula_on_vectors(method: str, data: st.DataObject) -> None:
    case, shape = data.draw(cases(method))
    want = oracle(method, case, shape)
    # A mean cosine near the pole of model stock, or near-cancelling directions, magnify rounding.
    magnified = np.abs(want).max() / max(1.0, np.abs(case.experts).max())
    assert_close(merge(method, case, shape), want, rel=2e-6 * max(1.0, magnified))


@every_method
@law
@given(data=st.data())
def test_windows_of_any_cut_give_identical_bits(method: str, data: st.DataObject) -> None:
    case, shape = data.draw(cases(method))
    step = shape[1] if OPERATORS[method].schema.scope == "row" else 1
    edges = st.integers(1, max(1, case.experts.shape[1] // step - 1)).map(lambda i: i * step)
    cuts = data.draw(st.lists(edges, max_size=5))
    assert_same_bits(merge(method, case, shape, cuts), merge(method, case, shape))


def large_case(method: str, shape: tuple[int, int], **params: Any) -> Case:
    numbers = np.random.default_rng(3)
    numel = shape[0] * shape[1]
    count = OPERATORS[method].schema.experts[1] or 3
    base = numbers.standard_normal(numel)
    values = base + numbers.standard_normal((count, numel)) + numbers.standard_normal(numel)
    no_base = OPERATORS[method].schema.base == "none"
    return case_of(method, values, None if no_base else base, **params)


T = {"slerp": {"t": 0.3}}


@every_method
def test_threads_do_not_change_a_bit_of_facts_or_of_a_large_merge(method: str) -> None:
    case = large_case(method, (401, 150), **T.get(method, {}))
    with threads(1):
        facts, whole = measure(method, case), merge(method, case)
    with threads(2):
        assert measure(method, case) == facts
        assert_same_bits(merge(method, case), whole)


@pytest.mark.parametrize("shape", [(3, 40_001), (501, 130), (20_000, 3), (1, 120_001)])
@pytest.mark.parametrize(
    ("method", "params"),
    [("nuslerp", {"nuslerp_flatten": False}), ("model_stock", {"filter_wise": True})],
)
def test_rows_are_the_same_whatever_window_and_threads(
    method: str, params: Params, shape: tuple[int, int]
) -> None:
    case = large_case(method, shape, **params)
    some = [i * shape[1] for i in (1, 2, 7, 8, 100, 333) if i < shape[0]]
    with threads(1):
        whole = merge(method, case, shape)
        assert_same_bits(merge(method, case, shape, some), whole)
    with threads(2):
        assert_same_bits(merge(method, case, shape, some), whole)
        assert_same_bits(merge(method, case, shape), whole)


def mergekit(method: str, case: Case, shape: tuple[int, ...], **others: Any) -> torch.Tensor:
    """mergekit's own result in float32, flattened."""
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import TensorGroup

    rows = [*([] if case.base is None else [case.base]), *case.experts]
    tensors = [torch.from_numpy(r.astype(np.float32)).reshape(shape) for r in rows]
    group = TensorGroup.from_tensors(tensors, base_index=None if case.base is None else 0)
    params: dict[str, Any] = dict(case.params)
    if case.model_params[0]:
        params["weight"] = {
            entry.id: m["weight"]
            for entry, m in zip(group.non_base, case.model_params, strict=True)
        }
    (out,) = registry.get(method)([group], parameters=params)
    flat: torch.Tensor = out.flatten()
    return flat


@live
@every_method
@law
@given(data=st.data())
def test_a_merge_equals_the_one_of_mergekit(method: str, data: st.DataObject) -> None:
    case, shape = data.draw(cases(method))
    want = mergekit(method, case, shape)
    magnified = float(want.abs().max()) / max(1.0, np.abs(case.experts).max())
    assert_close(merge(method, case, shape), want, rel=1e-5 * max(1.0, magnified))


@live
@every_method
def test_a_large_merge_equals_the_one_of_mergekit(method: str) -> None:
    shape = (300, 101)
    case = large_case(method, shape, **T.get(method, {}))
    assert_close(merge(method, case, shape), mergekit(method, case, shape))


# A's unit vector is exact in float32; for others mergekit's idea of opposite is rounded.
A, ZERO = [3.0, -3.0, 3.0, 3.0], [0.0] * 4
SCALED = [2.0 * a for a in A]
OPPOSITE = [-a for a in A]
OPPOSITE_SCALED = [-3.3 * a for a in A]


@live
@pytest.mark.parametrize("other", [A, SCALED, OPPOSITE, ZERO])
@pytest.mark.parametrize("first", [A, ZERO])
@pytest.mark.parametrize("method", ["slerp", "nuslerp", "multislerp", "karcher"])
def test_equal_opposite_and_zero_vectors_give_what_mergekit_gives(
    method: str, first: list[float], other: list[float]
) -> None:
    case = {
        "slerp": lambda: case_of("slerp", [other], first, t=0.3),
        "nuslerp": lambda: case_of("nuslerp", [first, other], weight=[0.7, 0.3]),
        "multislerp": lambda: case_of("multislerp", [first, other]),
        "karcher": lambda: case_of("karcher", [first, other]),
    }[method]()
    want = mergekit(method, case, (4,))
    assert want.isfinite().all()
    np.testing.assert_allclose(merge(method, case), want, rtol=1e-5, atol=1e-6)


@live
@pytest.mark.parametrize(
    "deltas", [[A, A], [A, SCALED], [A, OPPOSITE], [A, ZERO], [ZERO, ZERO], [ZERO, A, OPPOSITE]]
)
@pytest.mark.parametrize("filter_wise", [False, True])
def test_model_stock_of_degenerate_deltas_is_what_mergekit_gives(
    deltas: list[list[float]], filter_wise: bool
) -> None:
    base = np.array([1.0, 2.0, -3.0, 4.0])
    case = case_of("model_stock", base + np.array(deltas), base, filter_wise=filter_wise)
    want = mergekit("model_stock", case, (2, 2))
    np.testing.assert_allclose(merge("model_stock", case, (2, 2)), want, rtol=1e-5)


@live
@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (6, 1, 4)])
@pytest.mark.parametrize(
    ("method", "params"),
    [("nuslerp", {"nuslerp_flatten": False}), ("model_stock", {"filter_wise": True})],
)
def test_rows_run_along_the_last_dimension_of_any_shape(
    method: str, params: Params, shape: tuple[int, ...]
) -> None:
    case = large_case(method, (1, 24), **params)
    assert_close(merge(method, case, shape), mergekit(method, case, shape))


def test_nuslerp_of_scaled_opposites_is_their_chord() -> None:
    numbers = np.random.default_rng(8).standard_normal(5000)
    case = case_of("nuslerp", [numbers, -3.3 * numbers], weight=[0.75, 0.25])
    assert_close(merge("nuslerp", case), 0.75 * case.experts[0] + 0.25 * case.experts[1])


def test_nuslerp_weights_that_cancel_mean_the_middle() -> None:
    case = case_of("nuslerp", [[1.0, 0.0], [0.0, 1.0]], weight=[1.0, -1.0])
    assert merge("nuslerp", case).tolist() == pytest.approx([math.sqrt(0.5)] * 2)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (4,)])
def test_nuslerp_along_the_first_dimension_takes_columns_as_mergekit_does(
    shape: tuple[int, ...],
) -> None:
    numbers = np.random.default_rng(3)
    rows = [numbers.standard_normal(4).astype(np.float32).astype(float).tolist() for _ in "ab"]
    case = case_of("nuslerp", rows, nuslerp_flatten=False, nuslerp_row_wise=True)
    whole = merge("nuslerp", case, shape)
    first, second = (torch.tensor(r).view(shape) for r in rows)
    theirs = nuslerp_of_mergekit(0.5, first, second)
    assert whole.tolist() == pytest.approx(theirs.flatten().tolist(), rel=1e-5)


def nuslerp_of_mergekit(t: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    module = pytest.importorskip("mergekit.merge_methods.nuslerp")
    result: torch.Tensor = module.nuslerp(t, a, b, dim=0, flatten=False)
    return result


def test_multislerp_of_scaled_opposites_is_linear() -> None:
    case = case_of("multislerp", [A, OPPOSITE_SCALED])
    assert merge("multislerp", case).tolist() == pytest.approx([-1.15 * a for a in A], rel=1e-5)


def test_multislerp_of_more_than_two_that_cancel_is_refused() -> None:
    turn = 2 * math.pi / 3
    rows = [[math.cos(i * turn), math.sin(i * turn)] for i in range(3)]
    case = case_of("multislerp", rows)
    with pytest.raises(OperatorError, match=r"mean points nowhere.*Next: change the weights"):
        settle("multislerp", case)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("method", ["multislerp", "model_stock"])
def test_models_equal_to_the_base_give_the_bits_of_the_base(method: str, count: int) -> None:
    base = [1.0, -0.0, 0.0, -2.5]
    assert_same_bits(merge(method, case_of(method, [base] * count, base)), torch.tensor(base))


@pytest.mark.parametrize("weight", [[0.0, 0.0], [1.0, -1.0], [0.1, 0.2, -0.3]])
def test_multislerp_weights_that_sum_to_zero_are_refused(weight: list[float]) -> None:
    case = case_of("multislerp", [A] * len(weight), weight=weight)
    with pytest.raises(OperatorError, match=r"sum to zero.*up_proj.*weights"):
        validate("multislerp", case, (4,))
    validate("multislerp", replace(case, params={"normalize_weights": False}), (4,))


def test_multislerp_refuses_a_negative_eps() -> None:
    with pytest.raises(OperatorError, match=r"'eps'.*length of 0 or more"):
        validate("multislerp", case_of("multislerp", [A, SCALED], eps=-1.0), (4,))


def test_multislerp_with_eps_zero_ignores_a_zero_delta_in_the_direction() -> None:
    case = case_of("multislerp", [A, ZERO], eps=0.0)
    assert merge("multislerp", case).tolist() == pytest.approx([a / 2 for a in A])


@pytest.mark.parametrize("method", ["multislerp", "karcher"])
def test_a_single_model_comes_out_as_it_is(method: str) -> None:
    assert merge(method, case_of(method, [A])).tolist() == A


def test_karcher_of_zeros_is_zero() -> None:
    assert merge("karcher", case_of("karcher", [ZERO, ZERO, ZERO])).tolist() == ZERO


def test_karcher_counts_a_zero_tensor_in_the_length_alone() -> None:
    assert merge("karcher", case_of("karcher", [A, ZERO])).tolist() == [a / 2 for a in A]


@pytest.mark.parametrize("tol", [0.0, -1.0, 1e-5])
def test_karcher_of_opposites_keeps_to_the_first(tol: float) -> None:
    out = merge("karcher", case_of("karcher", [A, OPPOSITE_SCALED], tol=tol, max_iter=50))
    assert out.tolist() == pytest.approx([2.15 * a for a in A], rel=1e-5)


def test_a_karcher_mean_lies_at_equal_pulls_from_all() -> None:
    rows = np.random.default_rng(2).standard_normal((4, 50)) + 0.5
    out = merge("karcher", case_of("karcher", rows, max_iter=200, tol=0.0)).double().numpy()
    mean, pull = out / np.linalg.norm(out), np.zeros(50)
    for unit in rows / np.linalg.norm(rows, axis=1, keepdims=True):
        angle = np.arccos(mean @ unit)
        pull += angle / np.sin(angle) * (unit - (mean @ unit) * mean)
    assert np.linalg.norm(pull) < 1e-6


@every_method
def test_a_model_with_nan_or_infinity_is_refused(method: str) -> None:
    for bad in (math.nan, math.inf):
        case = large_case(method, (2, 5), **T.get(method, {}))
        case.experts[-1, 3] = bad
        with pytest.raises(OperatorError, match="angle between models is not a number"):
            settle(method, case)


@pytest.mark.parametrize(
    ("method", "params"),
    [("nuslerp", {"nuslerp_flatten": False}), ("model_stock", {"filter_wise": True})],
)
def test_a_nan_spoils_its_own_row_only(method: str, params: Params) -> None:
    case = large_case(method, (3, 5), **params)
    facts = settle(method, case)
    case.experts[0, 7] = math.nan
    (window,) = windows_of(method, case, (3, 5))
    out = OPERATORS[method].apply(replace(window, task=replace(window.task, facts=facts)))
    assert out.isnan().nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


@every_method
def test_a_task_without_facts_is_refused(method: str) -> None:
    case = large_case(method, (2, 5), **T.get(method, {}))
    (window,) = windows_of(method, case)
    with pytest.raises(OperatorError, match=r"no factors to combine.*analyze the models"):
        OPERATORS[method].apply(window)


@every_method
def test_facts_are_float32_numbers_and_the_last_of_them_the_experts_factors(method: str) -> None:
    case = large_case(method, (2, 50), **T.get(method, {}))
    facts, models = settle(method, case), [tuple(p.items()) for p in case.model_params]
    assert facts == tuple(float(np.float32(f)) for f in facts)
    params = tuple(case.params.items())
    assert OPERATORS[method].coefficients(params, models, facts) == facts[1:]
    assert len(facts) == 1 + len(models)


@every_method
def test_the_base_is_never_written_to(method: str) -> None:
    case = large_case(method, (2, 5), **T.get(method, {}))
    (window,) = windows_of(method, case)
    before = None if window.base is None else window.base.clone()
    task = replace(window.task, facts=settle(method, case))
    OPERATORS[method].apply(replace(window, task=task))
    if before is not None and window.base is not None:
        assert_same_bits(window.base, before)
