"""Rows of every kind of expert: what is read, what is not, and what both mean."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.low_rank import AdapterUpdate, open_update
from mergepipe_pipeline.domain.blocks import Range, coalesce
from mergepipe_pipeline.domain.plan import ExpertInput
from mergepipe_pipeline.domain.view import TensorView, view_of
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.packs.rows import BaseRow, ExpertRow
from tests.checkpoints.readers import CountingReader, opened
from tests.support.kinds import KINDS, Kind, Kinds, make_kinds, random_cuts
from tests.support.stored import Floats, decode, encode, low_rank_of, write

Ranges = tuple[Range, ...]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(tmp_path_factory.mktemp("kinds"), rows=40, cols=25)


def update_for(view: TensorView, readers: list[CountingReader]) -> AdapterUpdate | None:
    return open_update(readers.__getitem__, view.low_rank)


def rows_of(
    kind: Kind,
    base: Floats,
    read: Ranges,
    edges: list[int],
    *,
    as_delta: bool,
    needs_base: bool = True,
) -> tuple[Floats, list[CountingReader]]:
    """The expert's row float32 [N] put together from windows between `edges`, and its readers."""
    view = kind.view
    whole = torch.full((len(base),), torch.nan)
    with opened(kind.model.checkpoints) as readers:
        update = update_for(view, readers)
        for start, stop in pairwise(edges):
            # Whatever lay in the buffers before must not show.
            buffer = np.full((stop - start) * itemsize(view.dtype), 0xA5, dtype=np.uint8)
            row = ExpertRow(readers.__getitem__, view, read, buffer, update)
            row.fetch(start, stop)
            below = torch.from_numpy(base[start:stop].copy()) if needs_base else None
            (row.delta if as_delta else row.value)(whole[start:stop], below)
    return whole.numpy(), readers


def inside(ranges: Ranges, n: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.zeros(n, dtype=np.bool_)
    for a, b in ranges:
        mask[a:b] = True
    return mask


@pytest.mark.parametrize("as_delta", [True, False], ids=["delta", "value"])
@pytest.mark.parametrize("name", KINDS)
@given(seed=st.integers(0, 1000))
def test_a_row_is_what_numpy_says_in_any_windows(
    kinds: Kinds, name: str, as_delta: bool, seed: int
) -> None:
    kind, base = kinds.experts[name], kinds.values
    edges = random_cuts(len(base), np.random.default_rng(seed)).tolist()
    read = ((0, kind.view.numel),)
    found, _ = rows_of(kind, base, read, edges, as_delta=as_delta)
    np.testing.assert_array_equal(found, kind.delta if as_delta else base + kind.delta)


@pytest.mark.parametrize("as_delta", [True, False], ids=["delta", "value"])
@pytest.mark.parametrize("name", ["full", "delta", "cropped", "short", "gathered"])
@given(seed=st.integers(0, 1000))
def test_outside_the_ranges_read_an_expert_equals_its_base(
    kinds: Kinds, name: str, as_delta: bool, seed: int
) -> None:
    kind, base = kinds.experts[name], kinds.values
    rng = np.random.default_rng(seed)
    bounds = rng.integers(0, kind.view.numel + 1, (4, 2))
    read = coalesce((int(min(p)), int(max(p))) for p in bounds)
    edges = random_cuts(len(base), rng).tolist()
    found, readers = rows_of(kind, base, read, edges, as_delta=as_delta)
    delta = np.where(inside(read, len(base)), kind.delta, 0)
    np.testing.assert_array_equal(found, delta if as_delta else base + delta)
    planned = ExpertInput(0, kind.view, "", (), read, read)
    assert sum(r.bytes_read for r in readers) == planned.read_nbytes


@pytest.mark.parametrize("as_delta", [True, False], ids=["delta", "value"])
@pytest.mark.parametrize("name", KINDS)
def test_with_nothing_to_read_no_expert_is_touched(kinds: Kinds, name: str, as_delta: bool) -> None:
    kind, base = kinds.experts[name], kinds.values
    found, readers = rows_of(kind, base, (), [0, 300, len(base)], as_delta=as_delta)
    np.testing.assert_array_equal(found, np.zeros(len(base)) if as_delta else base)
    assert [r.asked for r in readers] == [[] for _ in readers]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("window_elems", [25, 333, 1000])
def test_bytes_read_are_the_planned_ones_whatever_the_windows(
    kinds: Kinds, name: str, window_elems: int
) -> None:
    kind, n = kinds.experts[name], len(kinds.values)
    read = ((0, kind.view.numel),)
    edges = [*range(0, n, window_elems), n]
    _, readers = rows_of(kind, kinds.values, read, edges, as_delta=True)
    planned = ExpertInput(0, kind.view, "", (), read, read)
    assert sum(r.bytes_read for r in readers) == planned.read_nbytes == kind.view.nbytes
    asked = [name for r in readers for name in r.asked]
    assert all(asked.count(factor) == 1 for factor in ("w.a", "w.b") if factor in asked)


@pytest.mark.parametrize("name", ["full", "cropped", "gathered", "low rank on a full one"])
def test_values_that_stand_alone_need_no_base(kinds: Kinds, name: str) -> None:
    kind = kinds.experts[name]
    assert kind.view.stands_alone
    found, _ = rows_of(
        kind, kinds.values, ((0, 1000),), [0, 400, 1000], as_delta=False, needs_base=False
    )
    np.testing.assert_array_equal(found, kinds.values + kind.delta)


@pytest.mark.parametrize("name", ["low rank", "delta", "empty"])
def test_deltas_of_views_that_hold_differences_need_no_base(kinds: Kinds, name: str) -> None:
    kind = kinds.experts[name]
    assert not kind.view.stands_alone
    found, _ = rows_of(
        kind, kinds.values, ((0, 1000),), [0, 400, 1000], as_delta=True, needs_base=False
    )
    np.testing.assert_array_equal(found, kind.delta)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("is_delta", [False, True])
def test_every_dtype_is_read_as_its_definition_says(
    tmp_path: Path, dtype: str, is_delta: bool
) -> None:
    rng = np.random.default_rng(0)
    stored = encode(rng.integers(-8, 9, 77) / 4, dtype)
    checkpoint = write(tmp_path, "m", {"w": stored})
    (part,) = view_of(checkpoint.by_name["w"]).stored
    view = TensorView("w", dtype, (77,), (part,), is_delta=is_delta)
    base = torch.ones(77)
    with opened([checkpoint]) as readers:
        buffer = np.empty(77 * itemsize(dtype), dtype=np.uint8)
        row = ExpertRow(readers.__getitem__, view, ((0, 77),), buffer, None)
        row.fetch(0, 77)
        delta, value = torch.empty(77), torch.empty(77)
        row.delta(delta, base)
        row.value(value, base)
    np.testing.assert_array_equal(delta.numpy(), decode(stored) - (0 if is_delta else 1))
    np.testing.assert_array_equal(value.numpy(), decode(stored) + (1 if is_delta else 0))
    assert set(base.tolist()) == {1.0}


@pytest.mark.parametrize("into", [True, False], ids=["into memory given", "into memory of its own"])
@pytest.mark.parametrize("name", ["full", "gathered", "low rank on a full one"])
@given(seed=st.integers(0, 1000))
def test_a_base_of_any_kind_has_numpy_s_values_in_any_windows(
    kinds: Kinds, name: str, into: bool, seed: int
) -> None:
    kind = kinds.experts[name]
    wanted = kinds.values + kind.delta
    edges = random_cuts(len(wanted), np.random.default_rng(seed)).tolist()
    found = []
    with opened(kind.model.checkpoints) as readers:
        update = update_for(kind.view, readers)
        buffer = np.empty(len(wanted) * itemsize(kind.view.dtype), dtype=np.uint8)
        for start, stop in pairwise(edges):
            row = BaseRow(readers.__getitem__, kind.view, buffer, update)
            row.fetch(start, stop)
            values = row.values(torch.empty(stop - start) if into else None)
            again = row.values()  # the update must not be added twice
            np.testing.assert_array_equal(values.numpy(), again.numpy())
            found.append(values.numpy().copy())
    np.testing.assert_array_equal(np.concatenate(found), wanted)


def test_an_update_on_a_float32_base_leaves_the_fetched_bytes_alone(tmp_path: Path) -> None:
    stored = {"w": encode(np.ones((2, 3)), "F32")}
    stored |= {"w.a": encode([[1.0, 2.0, 3.0]], "F32"), "w.b": encode([[1.0], [2.0]], "F32")}
    checkpoint = write(tmp_path, "m", stored)
    low = low_rank_of(checkpoint, "w", 1.0, transposed=False)
    view = replace(view_of(checkpoint.by_name["w"]), low_rank=low)
    with opened([checkpoint]) as readers:
        buffer = np.empty(24, dtype=np.uint8)
        row = BaseRow(readers.__getitem__, view, buffer, update_for(view, readers))
        row.fetch(0, 6)
        assert row.values().tolist() == row.values().tolist() == [2.0, 3.0, 4.0, 3.0, 5.0, 7.0]
        assert row.raw.tobytes() == stored["w"][2]


def test_a_base_s_raw_bytes_are_the_stored_ones(kinds: Kinds) -> None:
    kind = kinds.experts["full"]
    data = kind.stored[0]["w"][2]
    with opened(kind.model.checkpoints) as readers:
        row = BaseRow(readers.__getitem__, kind.view, np.empty(2000, dtype=np.uint8), None)
        row.fetch(100, 400)
    assert row.raw.tobytes() == data[200:800]
