"""L1 rescale factors against whole tensors, for every way to sparsify."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis.scales import l1_scales
from mergepipe_pipeline.analysis.thresholds import trim_rules
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.operator import Fact
from mergepipe_pipeline.domain.plan import ExpertInput, TensorTask, TrimRule
from mergepipe_pipeline.domain.stats import ExpertStats
from mergepipe_pipeline.operators.steps.random import keep_mask, uniforms
from mergepipe_pipeline.operators.steps.sparsify import band_counts, trim_count
from tests.analysis.pairs import analyze_one, delta_of, on_disk, windows_of
from tests.support.kinds import KINDS, make_kinds
from tests.support.oracles import band_keep, l1_scale, rank_probability, trim_keep
from tests.support.stored import Stored, decode, encode

GRID = BlockGrid(4096)
W = ("w", "w")
SEED, POSITION = 7, 2
SPARSE: tuple[Fact, ...] = ("trim", "band", "drop", "ranked")
Params = Mapping[str, float]


def pair(n: int, seed: int, shape: tuple[int, ...] | None = None) -> tuple[Stored, Stored]:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(n)
    return (
        encode(base + rng.standard_normal(n) / 50, "BF16", shape),
        encode(base, "BF16", shape),
    )


def scale_of(expert: Model, base: Model, kind: Fact, params: Params, name: str = "out") -> float:
    """The factor of tensor `w` with the facts that planning would have given."""
    view, shape = expert.views["w"], base.views["w"].shape
    stats = analyze_one(expert, base, [W], GRID)
    density = params["density"]
    counts = {
        "trim": (trim_count(view.numel, density), 0),
        "band": band_counts(view.numel, density, params.get("gamma", 0)),
    }
    span = ((0, view.numel),)
    entry = ExpertInput(POSITION, view, "", tuple(params.items()), span, span)
    if 0 < density < 1 and kind in counts:
        trim, outliers = counts[kind]
        entry = replace(entry, trim=_rule(expert, base, stats, trim))
        if outliers:
            entry = replace(entry, outliers=_rule(expert, base, stats, outliers))
    task = TensorTask(name, shape, view.dtype, "", (), SEED, None, (entry,))
    return l1_scales(expert, base, {W: (stats.by_pair[W].l1, task)}, kind)[W]


def _rule(expert: Model, base: Model, stats: ExpertStats, keep: int) -> TrimRule:
    return trim_rules(expert, base, {W: (stats.by_pair[W], keep)})[W]


def scale(
    expert: Stored, base: Stored, kind: Fact, params: Params, window_elems: int = 4096
) -> float:
    with on_disk({"w": expert}, {"w": base}, window_elems) as (e, b):
        return scale_of(e, b, kind, params)


def kept_by(
    delta: npt.NDArray[np.float64], row: int, kind: Fact, params: Params, name: str = "out"
) -> npt.NDArray[np.bool_]:
    """What a sparsifier keeps of a whole tensor."""
    density = params["density"]
    if kind == "trim":
        return trim_keep(delta, density)
    if kind == "band":
        return band_keep(delta, density, params["gamma"])
    if kind == "drop":
        return keep_mask(SEED, POSITION, name, 0, delta.size, density)
    numbers = uniforms(SEED, POSITION, name, 0, delta.size) / 2**32
    return np.asarray(numbers < rank_probability(delta, row, density, params["epsilon"]))


def expected(delta: npt.NDArray[np.float64], row: int, kind: Fact, params: Params) -> float:
    return l1_scale(delta, kept_by(delta, row, kind, params))


@pytest.mark.parametrize("kind", SPARSE)
@given(
    rows=st.integers(1, 70),
    row=st.integers(1, 200),
    density=st.floats(0.05, 0.95),
    seed=st.integers(0, 1000),
)
def test_a_scale_is_the_l1_norm_over_what_the_sparsifier_keeps(
    kind: Fact, rows: int, row: int, density: float, seed: int
) -> None:
    expert, base = pair(rows * row, seed, (rows, row))
    params = {"density": density, "gamma": 0.03, "epsilon": min(density, 1 - density) / 2}
    delta = delta_of(expert, base).astype(np.float64)
    found = scale(expert, base, kind, params)
    assert found == pytest.approx(expected(delta, row, kind, params), rel=1e-12)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", SPARSE)
def test_an_expert_of_any_kind_is_scaled_by_its_delta(
    tmp_path: Path, kind: Fact, name: str
) -> None:
    kinds = make_kinds(tmp_path)
    expert = kinds.experts[name]
    delta = expert.delta[: expert.view.numel].astype(np.float64)
    params = {"density": 0.4, "gamma": 0.05, "epsilon": 0.1}
    with windows_of(4096):
        found = scale_of(expert.model, kinds.base, kind, params)
    assert found == pytest.approx(expected(delta, 100, kind, params), rel=1e-12)


@pytest.mark.parametrize("row", [3, 100, 6000, 30000])
def test_a_drop_by_rank_sees_whole_rows_however_long(row: int) -> None:
    expert, base = pair(30000, 3, (30000 // row, row))
    params = {"density": 0.5, "epsilon": 0.2}
    delta = delta_of(expert, base).astype(np.float64)
    for window_elems in (4096, 8192, 1 << 20):
        found = scale(expert, base, "ranked", params, window_elems)
        assert found == pytest.approx(expected(delta, row, "ranked", params), rel=1e-12)


@pytest.mark.parametrize("kind", ["trim", "band", "drop"])
def test_scales_do_not_depend_on_windows(kind: Fact) -> None:
    params = {"density": 0.4, "gamma": 0.05}
    expert, base = pair(30000, 1)
    found = {scale(expert, base, kind, params, w) for w in (4096, 8192, 1 << 20)}
    assert len(found) == 1


def test_a_pair_stored_in_float32_has_the_scale_of_the_same_pair_in_bfloat16() -> None:
    narrow = pair(30000, 6)
    expert, base = (encode(decode(s), "F32") for s in narrow)
    for density in (0.1, 0.5):
        params = {"density": density}
        assert scale(expert, base, "drop", params) == scale(*narrow, "drop", params)


def test_windows_without_a_difference_add_nothing_to_a_scale() -> None:
    rng = np.random.default_rng(5)
    base = rng.standard_normal(20 * 4096)
    change = rng.standard_normal(len(base)) * (np.arange(len(base)) < 10 * 4096)
    expert, stored = encode(base + change, "F32"), encode(base, "F32")
    delta = delta_of(expert, stored).astype(np.float64)
    params = {"density": 0.5}
    assert scale(expert, stored, "drop", params) == pytest.approx(
        expected(delta, 1, "drop", params), rel=1e-12
    )


@pytest.mark.parametrize("kind", SPARSE)
def test_a_zero_delta_and_a_density_of_zero_have_scale_one(kind: Fact) -> None:
    expert, base = pair(9000, 1)
    params = {"gamma": 0.1, "epsilon": 0.1}
    assert scale(base, base, kind, params | {"density": 0.5}) == 1.0
    assert scale(expert, base, kind, params | {"density": 0.0}) == 1.0


@pytest.mark.parametrize("kind", SPARSE)
def test_a_density_of_one_has_scale_exactly_one(kind: Fact) -> None:
    params = {"density": 1.0, "gamma": 0.1, "epsilon": 0.1}
    assert scale(*pair(30000, 2), kind, params) == 1.0


@pytest.mark.parametrize(("magnitude", "wanted"), [(1e-12, 1.0), (1.0, 2.0)])
def test_norms_below_1e_7_are_not_rescaled(magnitude: float, wanted: float) -> None:
    n = 20000
    expert, base = encode(np.full(n, magnitude), "F32"), encode(np.zeros(n), "F32")
    found = scale(expert, base, "drop", {"density": 0.5})
    assert found == pytest.approx(wanted, rel=0.05)
    assert (found == 1.0) == (wanted == 1.0)


def test_the_same_pair_is_dropped_anew_for_another_output_tensor() -> None:
    expert, base = pair(9000, 4)
    with on_disk({"w": expert}, {"w": base}) as (e, b):
        found = [scale_of(e, b, "drop", {"density": 0.5}, name) for name in ("one", "other")]
    assert found[0] != found[1]
