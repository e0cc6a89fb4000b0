"""A tensor that is stored already as it shall be keeps its bytes, behind the same gate."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.blocks import Range
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.outcome import LayerOutcome
from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan, TensorTask
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine import sources
from mergepipe_pipeline.engine.execute import LayerRunner
from mergepipe_pipeline.engine.jobs import Job
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import BudgetError, CheckpointChangedError, StorageFullError
from tests.engine.plans import SEED, case_of, copied, merged, plan_of, values_in
from tests.support import oracles
from tests.support.kinds import make_kinds
from tests.support.laws import examples
from tests.support.reads import tensor_reads
from tests.support.stored import encode, model_of, write

FLOATS = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")


def stored(folder: Path, dtype: str, raw: bytes) -> Model:
    """A model of one tensor `w` of these bytes."""
    return model_of(write(folder, "m", {"w": (dtype, (len(raw) // itemsize(dtype),), raw)}))


def passed(
    model: Model, dtype: str, params: Params = (), read: tuple[Range, ...] | None = None
) -> MergePlan:
    """A plan that passes `w` of a model through to `dtype`."""
    view = model.views["w"]
    read = ((0, view.numel),) if read is None else read
    expert = ExpertInput(0, view, "sha", params, read, read)
    task = TensorTask("w", view.shape, dtype, "passthrough", (), SEED, None, (expert,))
    return plan_of(model.checkpoints, [task])


def run(plan: MergePlan, file: Path, window_elems: int | None = None) -> LayerOutcome:
    options = EngineOptions(threads=2, window_elems=window_elems)
    with LayerRunner(plan, options) as runner:
        return runner.run(plan.layers[0], file)


def finite(dtype: str, raw: bytes) -> bytes:
    """The bytes with every element that is no finite number replaced by zeros."""
    first_byte = {"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F800000)}
    size, exponent = first_byte.get(dtype, (1, 0x7F if dtype == "F8_E4M3" else 0x7C))
    bits = np.frombuffer(raw, f"<u{size}").copy()
    bits[(bits & exponent) == exponent] = 0
    return bits.tobytes()


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(FLOATS),
    st.binary(min_size=8, max_size=400).map(lambda raw: raw[: len(raw) // 8 * 8]),
    st.none() | st.integers(1, 50),
)
def test_what_is_passed_through_has_the_bytes_that_the_operator_would_give(
    dtype: str, raw: bytes, window_elems: int | None
) -> None:
    raw = finite(dtype, raw)
    with tempfile.TemporaryDirectory() as tmp:
        plan = passed(stored(Path(tmp), dtype, raw), dtype)
        result = run(plan, Path(tmp, "new"), window_elems)
        with mock.patch.object(Job, "unchanged", None):
            through = run(plan, Path(tmp, "old"), window_elems)
        assert Path(tmp, "new").read_bytes().endswith(raw)
    assert result.stored.sha256 == through.stored.sha256
    assert result.cost.expert_bytes_read == through.cost.expert_bytes_read == len(raw)
    assert result.cost.base_bytes_read == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_of_bits_is_passed_through_even_those_of_nan(
    tmp_path: Path, dtype: str
) -> None:
    raw = np.arange(1 << 16, dtype="<u2").tobytes()
    run(passed(stored(tmp_path, dtype, raw), dtype), tmp_path / "out")
    assert (tmp_path / "out").read_bytes().endswith(raw)


@pytest.mark.parametrize(
    ("params", "dtype"), [((("scale", 2.0),), "F32"), ((), "BF16")], ids=["scaled", "cast"]
)
def test_what_is_scaled_or_cast_is_computed(tmp_path: Path, params: Params, dtype: str) -> None:
    values = np.arange(64, dtype="<f4")
    run(passed(stored(tmp_path, "F32", values.tobytes()), dtype, params), tmp_path / "out")
    wanted = encode(2 * values if params else values, dtype)[2]
    assert (tmp_path / "out").read_bytes().endswith(wanted)


@pytest.mark.parametrize("read", [None, ((0, 4096), (4096, 15_000)), ((5, 9001),), ()])
def test_a_view_of_several_tensors_is_passed_through_as_far_as_it_is_read(
    tmp_path: Path, read: tuple[Range, ...] | None
) -> None:
    kinds = make_kinds(tmp_path)
    names = ["gathered"]
    plan = merged(kinds, names, "passthrough", (), [()], [read], out_dtype="BF16")
    result = run(plan, tmp_path / "out", window_elems=4096)
    wanted = oracles.ORACLES["passthrough"](case_of(kinds, plan, names))
    np.testing.assert_array_equal(values_in(tmp_path / "out"), wanted)
    assert result.cost.expert_bytes_read == plan.layers[0].expert_bytes_planned


@pytest.mark.parametrize("window_elems", [None, 8, 1000])
def test_a_part_that_may_not_be_read_is_not(tmp_path: Path, window_elems: int | None) -> None:
    model = stored(tmp_path, "F32", bytes(400))
    plan = passed(model, "F32")
    with (
        mock.patch.object(sources, "access_sets", return_value={0: {"w": ((0, 99),)}}),
        pytest.raises(BudgetError, match=r"tensor w.*\[\d+, 100\)"),
    ):
        run(plan, tmp_path / "out", window_elems)
    assert not (tmp_path / "out").exists()


def test_a_source_that_shrinks_is_a_changed_one_and_leaves_no_file(tmp_path: Path) -> None:
    plan = passed(stored(tmp_path, "F32", bytes(4000)), "F32")

    def shrink(_: int) -> None:
        os.truncate(plan.sources[0].root, 300)

    with (
        LayerRunner(plan, EngineOptions(window_elems=100, threads=1)) as runner,
        pytest.raises(CheckpointChangedError, match="ended while it was read"),
    ):
        runner.run(plan.layers[0], tmp_path / "out", shrink)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_named_and_leaves_no_file(tmp_path: Path, number: int) -> None:
    plan = passed(stored(tmp_path, "F32", bytes(4000)), "F32")
    full = OSError(number, os.strerror(number))
    with (
        mock.patch.object(os, "pwrite", side_effect=full),
        pytest.raises(StorageFullError, match=r"disk is full.*out"),
    ):
        run(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("window_elems", [None, 8])
def test_base_and_expert_bytes_are_read_once_and_counted_apart(
    tmp_path: Path, window_elems: int | None
) -> None:
    raw = np.arange(100, dtype="<f4").tobytes()
    model = stored(tmp_path, "F32", raw)
    (one,) = passed(model, "F32").layers[0].tasks
    plan = plan_of(model.checkpoints, [one, copied(model.views["w"], "v")])
    with tensor_reads() as reads:
        result = run(plan, tmp_path / "out", window_elems)
    assert (result.cost.expert_bytes_read, result.cost.base_bytes_read) == (400, 400)
    assert sum(reads.values()) == 800
    assert (tmp_path / "out").read_bytes().endswith(2 * raw)
