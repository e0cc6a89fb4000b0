"""Low-rank updates against the whole product in NumPy, in any runs of elements."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints import low_rank
from mergepipe_pipeline.checkpoints.low_rank import LowRankUpdate
from mergepipe_pipeline.domain.view import LowRank
from tests.checkpoints.readers import CountingReader, opened
from tests.support.kinds import random_cuts
from tests.support.stored import Stored, encode, low_rank_of, update_of, write

Factors = dict[str, Stored]


@contextmanager
def low_ranks(
    factors: Factors, scale: float, *, transposed: bool
) -> Iterator[tuple[LowRank, list[CountingReader]]]:
    with TemporaryDirectory() as folder:
        checkpoint = write(Path(folder), "adapter", factors)
        with opened([checkpoint]) as readers:
            yield low_rank_of(checkpoint, "w", scale, transposed=transposed), readers


def random_factors(rng: np.random.Generator, n_out: int, n_in: int, r: int, dtype: str) -> Factors:
    return {
        "w.a": encode(rng.standard_normal((r, n_in)), dtype),
        "w.b": encode(rng.standard_normal((n_out, r)), dtype),
    }


@given(
    n_out=st.integers(1, 60),
    n_in=st.integers(1, 60),
    r=st.integers(1, 9),
    dtype=st.sampled_from(["F32", "BF16", "F16"]),
    transposed=st.booleans(),
    tile_elems=st.sampled_from([1, 64, 100, 1 << 16]),
    seed=st.integers(0, 1000),
)
def test_any_runs_of_an_update_have_the_bits_of_the_whole_and_are_scale_times_b_a(
    n_out: int, n_in: int, r: int, dtype: str, transposed: bool, tile_elems: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    factors = random_factors(rng, n_out, n_in, r, dtype)
    with (
        mock.patch.object(low_rank, "_TILE_ELEMS", tile_elems),
        low_ranks(factors, 0.3, transposed=transposed) as (spec, readers),
    ):
        update = LowRankUpdate(readers.__getitem__, spec)
        whole = torch.zeros(n_out * n_in)
        update.add_to(whole, 0)
        row = torch.zeros(n_out * n_in)
        edges = random_cuts(len(row), rng) if len(row) > 1 else [0, 1]
        for start, stop in pairwise(map(int, edges)):
            update.add_to(row[start:stop], start)
        assert row.numpy().tobytes() == whole.numpy().tobytes()
        np.testing.assert_allclose(whole.numpy(), update_of(spec, [factors]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_update_of_several_tiles_does_not_depend_on_windows(transposed: bool) -> None:
    rng = np.random.default_rng(1)
    n_out, n_in = 700, 300
    assert n_out * n_in > 3 * low_rank._TILE_ELEMS
    factors = random_factors(rng, n_out, n_in, 16, "BF16")
    with low_ranks(factors, 1.7, transposed=transposed) as (spec, readers):
        rows = []
        for length in (n_out * n_in, 65536, 4096, 12345):
            update = LowRankUpdate(readers.__getitem__, spec)
            row = torch.zeros(n_out * n_in)
            for start in range(0, len(row), length):
                update.add_to(row[start : start + length], start)
            rows.append(row.numpy().tobytes())
        assert len(set(rows)) == 1


def test_an_update_is_added_to_what_is_there() -> None:
    factors = {"w.a": encode([[1.0, 2.0]], "F32"), "w.b": encode([[3.0], [4.0]], "F32")}
    with low_ranks(factors, 0.5, transposed=False) as (spec, readers):
        row = torch.full((3,), 10.0)
        LowRankUpdate(readers.__getitem__, spec).add_to(row, 1)
    assert row.tolist() == [13.0, 12.0, 14.0]


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1)])
def test_single_rows_and_columns_are_updates_too(shape: tuple[int, int]) -> None:
    factors = {
        "w.a": encode(np.ones((2, shape[1])), "F32"),
        "w.b": encode(np.ones((shape[0], 2)), "F32"),
    }
    with low_ranks(factors, 1.0, transposed=False) as (spec, readers):
        row = torch.zeros(shape[0] * shape[1])
        LowRankUpdate(readers.__getitem__, spec).add_to(row, 0)
    assert set(row.tolist()) == {2.0}


@pytest.mark.parametrize("is_orthogonal", [False, True])
def test_what_a_start_subtracts_does_not_depend_on_the_threads_that_torch_is_given(
    tmp_path: Path, is_orthogonal: bool
) -> None:
    rng = np.random.default_rng(3)
    factors = random_factors(rng, 100, 64, 4, "F32")
    factors["w.c"] = encode(rng.standard_normal((100, 64)), "F32")
    checkpoint = write(tmp_path, "adapter", factors)
    spec = low_rank_of(checkpoint, "w", 1.0, transposed=False)
    weights = replace(spec.a, entry=checkpoint.by_name["w.c"])
    started = replace(spec, weights=weights, is_residual=True, is_orthogonal=is_orthogonal)
    with opened([checkpoint]) as readers:

        def update(n_threads: int) -> bytes:
            torch.set_num_threads(n_threads)
            row = torch.zeros(100 * 64)
            LowRankUpdate(readers.__getitem__, started).add_to(row, 0)
            assert torch.get_num_threads() == n_threads
            return row.numpy().tobytes()

        with ThreadPoolExecutor(1) as other:  # the number is each thread's own
            assert len(set(other.map(update, [1, 2, 3]))) == 1


def test_factors_are_read_once_in_one_request_each() -> None:
    rng = np.random.default_rng(2)
    factors = random_factors(rng, 20, 30, 4, "F16")
    with low_ranks(factors, 1.0, transposed=False) as (spec, readers):
        update = LowRankUpdate(readers.__getitem__, spec)
        assert readers[0].asked == []
        for start in range(0, 600, 100):
            update.load()
            update.add_to(torch.zeros(100), start)
        assert sorted(readers[0].asked) == ["w.a", "w.b"]
        assert readers[0].bytes_read == 2 * 4 * (20 + 30)
