"""The compiled kernel against the operators in torch: the same bits, whatever the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.codes import round_to_bfloat16
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.domain.stats import narrowed
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.operators import OPERATORS, Window
from mergepipe_pipeline.operators.kernels.merge_tiles import ABSENT, STORED, TILE_ELEMS
from mergepipe_pipeline.operators.steps.fused_kernel import FusedKernel, tiles_of
from tests.support.laws import examples

FUSED = sorted(name for name, o in OPERATORS.items() if o.fused)
#: Numbers whose handling differs between careless kernels.
ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -3.4e38, 0.5, -0.5], np.float32)
Floats = npt.NDArray[np.float32]


def drawn(seed: int, count: int, n: int, *, odd: bool) -> Floats:
    """[count, n] values of bfloat16 near each other, so that ties and cancellation are common."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-40, 40, (count, n)).astype(np.float32) / 64
    if odd:
        places = rng.random((count, n)) < 0.05
        values[places] = rng.choice(ODD, int(places.sum()))
    return torch.from_numpy(values).bfloat16().float().numpy()


def task_of(name: str, seed: int, n: int, count: int) -> TensorTask:
    rng = np.random.default_rng(seed)
    known = {p.name: p for p in OPERATORS[name].schema.parameters}
    method: dict[str, Any] = {
        "normalize": bool(rng.integers(2)),
        "rescale": bool(rng.integers(2)),
        "lambda": float(rng.choice([1.0, 0.3, -2.0])),
        "variant": str(rng.choice(["mergekit", "paper"])),
    }
    weights = (1.0, 0.7, -0.3, 0.0, 1.0)
    if method["variant"] == "paper":
        weights = (0.9,) * 5
    experts = []
    for k in range(count):
        own = {"weight": weights[k], "density": float(rng.choice([0.0, 0.2, 0.5, 1.0]))}
        size = np.float32(rng.integers(0, 30) / 64)
        trim = TrimRule(int(size.view(np.uint32)), int(rng.integers(0, n + 1)))
        outliers = TrimRule(int((size + np.float32(0.25)).view(np.uint32)), int(rng.integers(n)))
        view = TensorView("w", "BF16", (n,))
        params = tuple((key, v) for key, v in own.items() if key in known)
        everywhere = ((0, n),)
        experts.append(
            ExpertInput(
                position=k,
                view=view,
                digest="",
                params=params,
                covered=everywhere,
                read=everywhere,
                trim=trim,
                outliers=outliers,
                scale=float(rng.random()),
            )
        )
    params = tuple((key, v) for key, v in method.items() if key in known)
    return TensorTask(
        name="w",
        shape=(n,),
        out_dtype="BF16",
        operator=name,
        params=params,
        seed=seed,
        base=None,
        experts=tuple(experts),
    )


def in_torch(task: TensorTask, base: Floats, values: Floats, start_elem: int) -> Floats:
    """The window by the operator itself: the meaning."""
    operator = OPERATORS[task.operator]
    rows = torch.from_numpy(values.copy())
    below = torch.from_numpy(base.copy())
    if operator.schema.space == "delta":
        rows = rows - below
    return operator.apply(Window(below, rows, task, start_elem)).numpy()


def bits(values: Floats) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def kernel_of(task: TensorTask, *, is_delta: bool) -> FusedKernel:
    describe = OPERATORS[task.operator].fused
    assert describe is not None
    return FusedKernel(describe(task), (is_delta,) * len(task.experts))


@pytest.mark.parametrize("name", FUSED)
@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 5), odd=st.booleans())
def test_the_kernel_gives_the_bits_of_the_operator(
    name: str, seed: int, count: int, odd: bool
) -> None:
    n, start_elem = 2048 + 77, 31
    base, values = drawn(seed, 1, n, odd=odd)[0], drawn(seed + 1, count, n, odd=odd)
    task = task_of(name, seed, start_elem + n, count)
    with np.errstate(all="ignore"):
        wanted = in_torch(task, base, values, start_elem)
    everyone, out = np.arange(count), np.empty(n, np.float32)
    kernel_of(task, is_delta=False).run(bits(base), bits(values), everyone, start_elem, out)
    assert_same_bits(out, wanted)
    is_update = OPERATORS[name].schema.space == "delta"
    with np.errstate(invalid="ignore", over="ignore"):
        rows = values - base if is_update else values
    kernel_of(task, is_delta=True).run(base, rows, everyone, start_elem, out)
    assert_same_bits(out, wanted)


@pytest.mark.parametrize("name", [n for n in FUSED if OPERATORS[n].schema.space == "delta"])
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**31), absent=st.sets(st.integers(0, 4)))
def test_an_absent_expert_is_one_that_equals_the_base(
    name: str, seed: int, absent: set[int]
) -> None:
    n = 300
    base, values = drawn(seed, 1, n, odd=False)[0], drawn(seed + 1, 5, n, odd=False)
    values[list(absent)] = base
    task = task_of(name, seed, n, 5)
    present = np.array([k for k in range(5) if k not in absent], np.int64)
    out = np.empty(n, np.float32)
    kernel = kernel_of(task, is_delta=False)
    kernel.run(bits(base), bits(values)[present], present, 0, out)
    assert_same_bits(out, in_torch(task, base, values, 0))


@pytest.mark.parametrize("name", [n for n in FUSED if OPERATORS[n].schema.space == "delta"])
@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    start=st.integers(0, 2 * TILE_ELEMS),
    kinds=st.lists(st.sampled_from([STORED, ABSENT, np.float32(0.01)]), min_size=12, max_size=12),
)
def test_each_tile_of_a_row_holds_stored_elements_numbers_in_steps_or_nothing(
    name: str, seed: int, start: int, kinds: list[np.float32]
) -> None:
    n = 2 * TILE_ELEMS + 99
    base, values = drawn(seed, 1, n, odd=False)[0], drawn(seed + 1, 3, n, odd=False)
    rows, delta = bits(values), values - base
    steps = np.array(kinds).reshape(3, 4)[:, : tiles_of(start, n)]
    numbers = np.random.default_rng(seed).integers(-99, 99, (3, n)).astype(np.int16)
    for k, tile in np.ndindex(steps.shape):
        first = (start // TILE_ELEMS + tile) * TILE_ELEMS - start
        here, step = slice(max(0, first), first + TILE_ELEMS), steps[k, tile]
        if step == ABSENT:
            delta[k, here] = 0
        elif step != STORED:
            delta[k, here] = numbers[k, here].astype(np.float32) * step
            rows[k, here] = numbers[k, here].view(np.uint16)
    task = task_of(name, seed, start + n, 3)
    out, wanted = np.empty(n, np.float32), np.empty(n, np.float32)
    kernel_of(task, is_delta=False).run(bits(base), rows, np.arange(3), start, out, steps)
    kernel_of(task, is_delta=True).run(base, delta, np.arange(3), start, wanted)
    assert_same_bits(out, wanted)


@given(seed=st.integers(0, 2**31))
def test_narrowing_rounds_as_torch_does_compiled_or_not(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**32, 4096, np.uint32).view(np.float32)
    out = np.empty(len(values), np.uint16)
    round_to_bfloat16(values.view(np.uint32), out)
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(out[~nan], wanted[~nan])
    assert set(out[nan].tolist()) <= {0x7FC0}
    np.testing.assert_array_equal(narrowed(values), out)


def test_a_drop_that_keeps_every_number_draws_none() -> None:
    task = task_of("dare_linear", 3, 10, 1)
    params = (("weight", 1.0), ("density", 1 - 2**-40))
    task = replace(task, experts=(replace(task.experts[0], params=params),))
    describe = OPERATORS["dare_linear"].fused
    assert describe is not None
    assert not describe(task).rows["draws"].any()


def assert_same_bits(found: Floats, wanted: Floats) -> None:
    """Equal bit for bit, but for which NaN a NaN is."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])
