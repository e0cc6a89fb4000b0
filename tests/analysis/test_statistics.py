"""Statistics of deltas against whole tensors in float64 NumPy."""

from __future__ import annotations

import math
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis import stream
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.stats import ExpertStats, TensorStats
from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.operators.kernels.kept_l1 import CHUNK_ELEMS
from tests.analysis.conftest import SEGMENT_ELEMS
from tests.analysis.pairs import (
    analyze_all,
    analyze_one,
    delta_of,
    figures,
    on_disk,
    pairs_of,
    windows_of,
)
from tests.support.kinds import KINDS, make_kinds
from tests.support.stored import Stored, content_of, encode, low_rank_of, model_of

DTYPES = ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"]
GRID = BlockGrid(4096)


def analyzed(
    expert: Stored, base: Stored, grid: BlockGrid = GRID, window_elems: int = 8192
) -> TensorStats:
    with on_disk({"w": expert}, {"w": base}, window_elems) as (e, b):
        return analyze_one(e, b, pairs_of(e, b), grid).tensors[0]


def sparse_pair(n: int, seed: int = 0, dtype: str = "BF16") -> tuple[Stored, Stored]:
    """An expert equal to its base in many places, whole windows among them; ties elsewhere."""
    rng = np.random.default_rng(seed)
    base = rng.integers(-8, 9, n) / 4
    change = rng.integers(-2, 3, n) / 2 * (np.arange(n) // 8192 % 2)
    return encode(base + change, dtype), encode(base, dtype)


def tensor_figures(stats: TensorStats) -> dict[str, object]:
    """Those that are not of blocks."""
    return {name: v for name, v in figures(stats).items() if not name.startswith("block_")}


@given(
    n=st.sampled_from([1, 255, 256, 4095, 4096, 4097, 8192, 8193, 20000]),
    expert_dtype=st.sampled_from(DTYPES),
    base_dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 2.0**-9, 0.5]),
    block_elems=st.sampled_from([4096, 8192, 16384]),
    seed=st.integers(0, 1000),
)
def test_statistics_are_those_of_the_whole_tensor_in_float64(
    n: int, expert_dtype: str, base_dtype: str, scale: float, block_elems: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-16, 17, n) / 8
    base = encode(values, base_dtype)
    expert = encode(values + scale * rng.integers(-3, 4, n), expert_dtype)
    delta = delta_of(expert, base)
    wide = np.abs(delta.astype(np.float64))
    bins, counts = np.unique(np.abs(delta).view(np.uint32) >> 16, return_counts=True)

    stats = analyzed(expert, base, BlockGrid(block_elems), window_elems=16384)

    assert stats.digest == content_of(expert, SEGMENT_ELEMS)
    assert stats.base_digest == content_of(base, SEGMENT_ELEMS)
    assert (stats.dtype, stats.base_dtype) == (expert_dtype, base_dtype)
    assert stats.numel == n
    assert stats.l1 == pytest.approx(math.fsum(wide), rel=1e-13)
    assert stats.l2sq == pytest.approx(math.fsum(wide**2), rel=1e-13)
    assert stats.max_abs == wide.max()
    assert stats.nonzero == np.count_nonzero(delta)
    np.testing.assert_array_equal(stats.hist_bins, bins)
    np.testing.assert_array_equal(stats.hist_counts, counts)
    blocks = [wide[i : i + block_elems] for i in range(0, n, block_elems)]
    np.testing.assert_allclose(stats.block_l2sq, [(b**2).sum() for b in blocks], rtol=1e-13)
    np.testing.assert_array_equal(stats.block_max_abs, [b.max() for b in blocks])
    np.testing.assert_array_equal(stats.block_nonzero, [np.count_nonzero(b) for b in blocks])


def test_tensors_of_different_names_are_sampled_at_different_elements() -> None:
    expert, base = sparse_pair(20000)
    with on_disk({"a": expert, "b": expert}, {"a": base, "b": base}) as (e, b):
        first, second = analyze_one(e, b, pairs_of(e, b), GRID).tensors
    assert not np.array_equal(first.block_sample, second.block_sample)


@given(seed=st.integers(0, 1000), block_elems=st.sampled_from([8192, 1 << 14]))
def test_tensor_figures_do_not_depend_on_the_block_grid(seed: int, block_elems: int) -> None:
    expert, base = sparse_pair(30000, seed)
    fine, coarse = (
        analyzed(expert, base, GRID),
        analyzed(expert, base, BlockGrid(block_elems), 1 << 14),
    )
    assert tensor_figures(fine) == tensor_figures(coarse)


def test_figures_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal(50000)
    pair = encode(base + rng.standard_normal(50000) / 100, "F32"), encode(base, "F32")
    found = []
    for cores in (1, 2, 3, 64):
        with mock.patch.object(os, "sched_getaffinity", return_value=set(range(cores))):
            found.append(figures(analyzed(*pair)))
    assert all(f == found[0] for f in found)


def test_windows_in_flight_never_share_memory() -> None:
    rng = np.random.default_rng(0)
    expert = {name: encode(rng.standard_normal(100_000), "F32") for name in "abcd"}
    base = {name: encode(rng.standard_normal(100_000), "F32") for name in "abcd"}
    with (
        on_disk(expert, base, 4096) as (e, b),
        mock.patch.object(os, "sched_getaffinity", return_value=set(range(4))),
    ):
        found = analyze_one(e, b, pairs_of(e, b), GRID).tensors
    for stats in found:
        delta = delta_of(expert[stats.tensor], base[stats.tensor]).astype(np.float64)
        assert stats.digest == content_of(expert[stats.tensor], SEGMENT_ELEMS)
        assert stats.base_digest == content_of(base[stats.tensor], SEGMENT_ELEMS)
        assert stats.l1 == pytest.approx(np.abs(delta).sum(), rel=1e-13)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_figures_do_not_depend_on_windows(dtype: str) -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal(50000)
    base[[100, 5000, 9000]] = np.inf, -np.inf, np.nan
    change = rng.standard_normal(50000) / 100 * (np.arange(50000) > 20000)
    pair = encode(base + change, dtype), encode(base, dtype)
    first, *others = (figures(analyzed(*pair, window_elems=n)) for n in (4096, 12288, 1 << 20))
    assert all(f == first for f in others)


def test_an_expert_equal_to_its_base_has_zeros_everywhere() -> None:
    stored = encode(np.arange(20000) % 7, "BF16")
    stats = analyzed(stored, stored)
    assert stats.digest == stats.base_digest
    assert (stats.l1, stats.l2sq, stats.max_abs, stats.nonzero) == (0, 0, 0, 0)
    assert (stats.hist_bins.tolist(), stats.hist_counts.tolist()) == ([0], [20000])
    assert not stats.block_sample.any()
    assert not stats.block_nonzero.any()
    assert len(stats.block_l2sq) == 5


def test_equal_values_of_another_dtype_or_sign_of_zero_are_no_difference() -> None:
    values = np.zeros(5000, dtype=np.float32)
    stats = analyzed(encode(-values, "F32"), encode(values, "BF16"))
    assert (stats.nonzero, stats.hist_bins.tolist()) == (0, [0])


def test_equal_bytes_of_different_dtypes_are_a_difference() -> None:
    _, shape, data = encode(np.full(5000, 1.5), "BF16")
    assert analyzed(("F16", shape, data), ("BF16", shape, data)).nonzero == 5000


def test_a_nan_counts_as_nonzero_and_spoils_only_its_block() -> None:
    values = np.zeros(9000, dtype=np.float32)
    values[5000] = np.nan
    stats = analyzed(encode(values, "F32"), encode(np.zeros(9000), "F32"))
    assert stats.nonzero == 1
    assert stats.block_nonzero.tolist() == [0, 1, 0]
    assert np.isnan(stats.block_l2sq).tolist() == [False, True, False]
    assert math.isnan(stats.l1)


def test_infinities_of_both_signs_are_counted_without_a_warning() -> None:
    values = np.zeros(9000, dtype=np.float32)
    values[[10, 266, 522, 8500]] = [np.inf, -np.inf, np.inf, -np.inf]
    stats = analyzed(encode(values, "F32"), encode(np.zeros(9000), "F32"))
    assert (stats.nonzero, stats.max_abs, stats.l1) == (4, math.inf, math.inf)


@pytest.mark.parametrize(("shape", "blocks"), [((), 1), ((0,), 0), ((3, 0), 0), ((1,), 1)])
def test_scalars_and_empty_tensors_have_statistics(shape: tuple[int, ...], blocks: int) -> None:
    n = math.prod(shape)
    stats = analyzed(encode(np.full(n, 3.0), "F32", shape), encode(np.full(n, 1.0), "F32", shape))
    assert (stats.numel, stats.l1, len(stats.block_l2sq)) == (n, 2.0 * n, blocks)
    assert stats.digest == content_of(encode(np.full(n, 3.0), "F32"), SEGMENT_ELEMS)


def test_the_pairs_asked_for_are_compared_and_named_by_both_tensors() -> None:
    one, two, three = (encode(np.full(6, x), "F32") for x in (1.0, 2.0, 4.0))
    with on_disk({"a": one, "b": two}, {"c": three, "d": one}) as (e, b):
        stats = analyze_one(e, b, [("b", "c"), ("b", "d"), ("a", "d")], GRID)
        assert isinstance(stats, ExpertStats)
        assert (stats.base_id, stats.checkpoint_id) == (b.model_id, e.model_id)
    found = {pair: t.l1 for pair, t in stats.by_pair.items()}
    assert found == {("b", "c"): 12.0, ("b", "d"): 6.0, ("a", "d"): 0.0}


def test_samples_are_at_elements_of_the_base_s_tensor() -> None:
    expert, base = sparse_pair(20000)
    with on_disk({"a": expert, "b": expert}, {"w": base}) as (e, b):
        first, second = analyze_one(e, b, [("a", "w"), ("b", "w")], GRID).tensors
    np.testing.assert_array_equal(first.block_sample, second.block_sample)


@pytest.mark.parametrize("name", KINDS)
def test_an_expert_of_any_kind_is_described_by_its_delta(tmp_path: Path, name: str) -> None:
    kinds = make_kinds(tmp_path)
    kind, grid = kinds.experts[name], BlockGrid(8192)
    delta = kind.delta[: kind.view.numel]
    wide = np.abs(delta.astype(np.float64))
    with windows_of(8192):
        (stats,) = analyze_one(kind.model, kinds.base, [("w", "w")], grid).tensors
    assert (stats.numel, stats.l1, stats.l2sq) == (len(delta), wide.sum(), (wide**2).sum())
    assert stats.max_abs == wide.max()
    assert stats.nonzero == np.count_nonzero(delta)
    blocks = [wide[i : i + 8192] for i in range(0, len(delta), 8192)]
    assert stats.block_l2sq.tolist() == [(b**2).sum() for b in blocks]
    assert stats.block_nonzero.tolist() == [np.count_nonzero(b) for b in blocks]
    bins, counts = np.unique(np.abs(delta).view(np.uint32) >> 16, return_counts=True)
    np.testing.assert_array_equal(stats.hist_bins, bins)
    np.testing.assert_array_equal(stats.hist_counts, counts)


@pytest.mark.parametrize("name", KINDS)
def test_digests_are_given_of_tensors_read_whole_and_of_no_others(
    tmp_path: Path, name: str
) -> None:
    kinds = make_kinds(tmp_path, rows=40)
    kind = kinds.experts[name]
    (stats,) = analyze_one(kind.model, kinds.base, [("w", "w")], GRID).tensors
    data = kind.stored[0]["w"][2] if name in ("full", "short") else b""
    stored = kind.model.views["w"].dtype, (), data
    assert stats.digest == (content_of(stored, SEGMENT_ELEMS) if data else "")
    below = Path(kinds.base.checkpoint.root).read_bytes()[-kinds.base.nbytes :]
    whole = name in ("full", "low rank on a full one", "cropped", "gathered")
    stored = kinds.base.views["w"].dtype, (), below
    assert stats.base_digest == (content_of(stored, SEGMENT_ELEMS) if whole else "")


def test_a_base_with_an_adapter_on_it_is_what_an_expert_is_compared_with(tmp_path: Path) -> None:
    kinds = make_kinds(tmp_path)
    base, expert = kinds.experts["low rank on a full one"], kinds.experts["gathered"]
    (stats,) = analyze_one(expert.model, base.model, [("w", "w")], GRID).tensors
    delta = expert.delta.astype(np.float64) - base.delta
    assert (stats.l1, stats.digest, stats.base_digest) == (np.abs(delta).sum(), "", "")


def test_an_adapter_on_the_base_itself_is_the_whole_difference(tmp_path: Path) -> None:
    kinds = make_kinds(tmp_path)
    adapter = kinds.experts["low rank"]
    (adapter_file,) = adapter.model.checkpoints
    low = low_rank_of(adapter_file, "w", 0.25, source=1, transposed=False)
    view = replace(kinds.base.views["w"], low_rank=low)
    tuned = model_of(*kinds.base.checkpoints, adapter_file, views=[view])
    for expert, base in ((tuned, kinds.base), (kinds.base, tuned)):
        (stats,) = analyze_one(expert, base, [("w", "w")], GRID).tensors
        assert stats.l1 == np.abs(adapter.delta).sum(dtype=np.float64)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_what_is_infinite_in_both_differs_by_what_is_not_a_number(dtype: str) -> None:
    values = np.ones(9000, dtype=np.float32)
    values[[10, 4500]] = np.inf, np.nan
    stored = encode(values, dtype)
    stats = analyzed(stored, stored)
    assert stats.block_nonzero.tolist() == [1, 1, 0]
    assert np.isnan(stats.block_l2sq).tolist() == [True, True, False]


def test_progress_adds_up_to_the_expert_bytes_compared() -> None:
    expert, base = sparse_pair(20000)
    done: list[int] = []
    with on_disk({"w": expert}, {"w": base}) as (e, b):
        analyze_all([(e, pairs_of(e, b))], b, GRID, done.append)
    assert sum(done) == len(expert[2])


def test_an_expert_replaced_during_the_pass_is_noticed() -> None:
    expert, base = sparse_pair(20000)
    with on_disk({"w": expert}, {"w": base}) as (e, b):

        def touch(_: int) -> None:
            os.utime(e.checkpoint.root, ns=(1, 1))

        with pytest.raises(CheckpointChangedError, match="changed while it was read"):
            analyze_all([(e, pairs_of(e, b))], b, GRID, touch)


def test_memory_is_a_few_windows_whatever_the_tensor_size() -> None:
    def peak_nbytes(windows: int) -> int:
        n = windows << 15
        expert, base = encode(np.ones(n), "BF16"), encode(np.arange(n) % 5, "BF16")
        with (
            on_disk({"w": expert}, {"w": base}, window_elems=1 << 15) as (e, b),
            # A pool starts its threads when they are needed: one makes the peak repeatable.
            mock.patch.object(os, "sched_getaffinity", return_value={0}),
        ):
            tracemalloc.start()
            try:
                analyze_one(e, b, pairs_of(e, b), BlockGrid(1 << 15))
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    # Between the two lie 9.5 MiB of the expert alone, and more of anything kept per window.
    assert peak_nbytes(160) < peak_nbytes(8) + (2 << 20)


def test_the_window_is_a_multiple_of_every_block_size() -> None:
    largest = BlockGrid.for_numel(1 << 50).block_elems
    assert stream.WINDOW_ELEMS % largest == 0
    assert BlockGrid.for_numel(1).block_elems % CHUNK_ELEMS == 0
