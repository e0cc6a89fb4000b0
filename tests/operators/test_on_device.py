"""Deltas on an accelerator: the numbers and masks of NumPy, and nothing that waits for the device.

The functions run here on a CPU's tensors; `meta` tensors have a device but no numbers, so that any
look at a number fails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mergepipe_pipeline.engine.accelerator import stays_on_cpu
from mergepipe_pipeline.operators import OPERATORS, Window
from mergepipe_pipeline.operators.steps import random, sparsify
from tests.operators.cases import assert_same_bits, big_job
from tests.support.laws import examples

MERGING = [name for name, op in OPERATORS.items() if op.choose is None]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
SHAPE = (60, 50)


class OneDevice(TorchDispatchMode):
    """Fails where an operation mixes devices, but for copies to the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        places = {t.device.type for t in tensors if t.dim()}
        assert len(places) < 2 or "copy" in str(func), f"{func} of tensors on {places}"
        return func(*args, **(kwargs or {}))


class LikeCuda(TorchDispatchMode):
    """Rounds on a CPU where CUDA is known to: division by a number, the sign of a zero."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__.split(".")[0], kwargs or {}
        if name in ("div", "div_") and isinstance(args[1], int | float):
            return getattr(args[0], name.replace("div", "mul"))(1 / args[1])
        out = func(*args, **kwargs)
        if name in ("clamp", "clamp_", "clamp_min", "clamp_min_"):
            out.add_(0.0)
        return out


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are treated as those of an accelerator."""
    monkeypatch.setattr(sparsify, "_is_on_host", lambda delta: False)


def strange(seed: int, n: int) -> torch.Tensor:
    """Normal numbers with equal magnitudes, zeros of both signs, infinities and NaN among them."""
    numbers = np.random.default_rng(seed)
    values = np.rint(numbers.standard_normal(n) * 4) / 4
    odd = numbers.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40], n)
    values = np.where(numbers.random(n) < 0.2, odd, values)
    return torch.from_numpy(values.astype(np.float32))


def same_but_for_nan(found: torch.Tensor, wanted: torch.Tensor) -> None:
    found = found.cpu()
    assert (found.isnan() == wanted.isnan()).all()
    assert_same_bits(found.nan_to_num(nan=9.0), wanted.nan_to_num(nan=9.0))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(50), deadline=None)
@given(
    seed=st.integers(0, 2**40),
    start=st.integers(0, 70) | st.integers(2**32 - 40, 2**32 + 40) | st.integers(0, 2**48),
    n=st.integers(0, 200),
)
def test_numbers_are_those_of_the_reference(device: str, seed: int, start: int, n: int) -> None:
    key = random.stream_key(seed, 2, "w")
    found = sparsify.uniforms_on_device(key, start, torch.empty(n, device=device)).cpu()
    assert found.dtype == torch.int64
    assert found.tolist() == random.uniforms(seed, 2, "w", start, n).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("density", [1e-12, 0.3, 0.5, 1 - 2**-40])
def test_a_drop_keeps_what_the_mask_of_the_reference_keeps(device: str, density: float) -> None:
    delta = strange(1, 3001)
    found = delta.to(device, copy=True)
    numbers = sparsify.uniforms_on_device(random.stream_key(3, 1, "w"), 7, found)
    sparsify.drop_numbered_(found, numbers, random.keep_below(density))
    keep = random.keep_mask(3, 1, "w", 7, 3001, density)
    same_but_for_nan(found, delta * torch.from_numpy(keep))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 50, 333])),
    inverse=st.booleans(),
)
def test_a_drop_by_rank_is_the_one_of_numpy(
    device: str, seed: int, shape: tuple[int, int], inverse: bool
) -> None:
    wanted = strange(seed, shape[0] * shape[1]).view(shape)
    found = wanted.to(device, copy=True)
    drawn = sparsify.uniforms_on_device(np.uint64(seed), 5, found.view(-1))
    numbers = drawn.cpu().numpy().astype(np.uint32)
    table = sparsify.rank_probability(shape[1], 0.6, 0.3)
    sparsify.drop_by_rank_on_device_(found, drawn, table, inverse=inverse)
    sparsify.drop_by_rank_(wanted, numbers, 0.6, 0.3, inverse=inverse)
    same_but_for_nan(found, wanted)


@pytest.mark.parametrize("name", MERGING)
def test_on_a_device_no_operator_changes_a_bit_but_those_that_stay(
    as_on_a_device: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    op = OPERATORS[name]
    job = big_job(op, SHAPE)
    found = op.apply(job.window())
    monkeypatch.undo()
    assert_same_bits(found, op.apply(job.window()))


@pytest.mark.parametrize("name", MERGING)
def test_where_cuda_rounds_otherwise_no_bit_depends_on_it(as_on_a_device: None, name: str) -> None:
    op = OPERATORS[name]
    job = big_job(op, SHAPE)
    wanted = op.apply(job.window())
    with LikeCuda():
        found = op.apply(job.window())
    assert_same_bits(found, wanted)


def test_a_step_that_depends_on_cuda_s_rounding_would_be_noticed() -> None:
    values = torch.arange(1.0, 999.0)
    with LikeCuda():
        assert (values / 3 != values / torch.tensor(3.0)).any()
        assert not torch.tensor([-0.0]).clamp_(min=0).signbit().any()
    assert torch.tensor([-0.0]).clamp_(min=0).signbit().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MERGING)
def test_cuda_gives_the_bits_of_the_cpu(name: str) -> None:
    op = OPERATORS[name]
    job = big_job(op, (600, 500))
    window = job.window()
    base = None if window.base is None else window.base.cuda()
    there = Window(base, window.experts.cuda(), window.task, 0)
    if not stays_on_cpu(job.task):
        assert_same_bits(op.apply(there).cpu(), op.apply(job.window()))


# `mean` adds by a compiled kernel: it stays on the CPU.
@pytest.mark.parametrize("name", [name for name in MERGING if name != "mean"])
def test_no_operator_waits_for_the_device_or_mixes_it_with_the_cpu(name: str) -> None:
    op = OPERATORS[name]
    job = big_job(op, SHAPE)
    base = None if job.base is None else job.base.to("meta")
    with OneDevice():
        merged = op.apply(Window(base, job.experts.to("meta"), job.task, 0))
    assert merged.device.type == "meta"


def test_a_look_at_a_number_on_the_device_would_be_noticed() -> None:
    there = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        there.sum().item()
    with OneDevice(), pytest.raises(AssertionError, match="of tensors on"):
        there.mul_(torch.ones(3))
