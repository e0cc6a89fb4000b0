"""Small merges by hand: what the merge methods mean where names alone do not say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.operators.steps.sparsify import band_counts, trim_count
from mergepipe_pipeline.operators.steps.tensor_measures import Quantiles
from tests.operators.cases import assert_same_bits, job_for, make_job, merge
from tests.support.oracles import Case

TIES = OPERATORS["ties"]


def _update(name: str, deltas: list[list[float]], **params: Any) -> list[float]:
    op = OPERATORS[name]
    base = 1.0 if op.schema.needs_base else 0.0
    return [v - base for v in merge(op, job_for(op, deltas, **params)).tolist()]


def test_weights_enter_the_sign_vote() -> None:
    assert _update("ties", [[2.0], [-1.0]], weight=[1.0, 4.0]) == [-1.0]


def test_a_zero_sign_sum_counts_as_plus() -> None:
    assert _update("ties", [[1.0], [-1.0]]) == [1.0]


def test_zeros_never_agree_so_the_divisor_counts_agreeing_weights_only() -> None:
    assert _update("ties", [[3.0], [0.0], [1.0]], weight=[1.0, 8.0, 1.0]) == [2.0]


def test_ties_without_normalize_sums_what_agrees() -> None:
    assert _update("ties", [[3.0], [-1.0], [1.0]], normalize=False) == [4.0]


def test_agreeing_weights_that_cancel_divide_by_one() -> None:
    # 2·1 and −2·−1 agree on plus; their weights sum to zero.
    assert _update("ties", [[1.0], [-1.0]], weight=[2.0, -2.0]) == [4.0]


def test_lambda_scales_after_normalisation() -> None:
    assert _update("ties", [[3.0], [1.0]], lambda_=0.5) == [1.0]


def test_trim_breaks_ties_by_the_lowest_index_over_the_whole_tensor() -> None:
    deltas = [[1.0, -2.0, 2.0, 2.0, -2.0, 0.5]]
    assert _update("ties", deltas, density=[0.5]) == [0.0, -2.0, 2.0, 2.0, 0.0, 0.0]


def test_a_nan_is_never_trimmed_away() -> None:
    job = job_for(TIES, [[1.0, 3.0, 0.5, 0.25] * 9], density=[0.25])
    job.experts[0, 2] = torch.nan
    job.experts[0, 35] = torch.nan
    assert merge(TIES, job).isnan().nonzero().flatten().tolist() == [2, 35]


def test_density_one_or_more_leaves_the_delta_alone_even_if_rescale_is_set() -> None:
    for density in (1.0, 2.0):
        assert _update("ties", [[1.0, 3.0]], density=[density], rescale=True) == [1.0, 3.0]


def test_ties_with_rescale_matches_the_l1_norm() -> None:
    assert _update("ties", [[1.0, 3.0]], density=[0.5], rescale=True) == [0.0, 4.0]


def test_ties_does_not_rescale_by_default() -> None:
    assert _update("ties", [[1.0, 3.0]], density=[0.5]) == [0.0, 3.0]


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_matches_the_l1_norm_by_default(name: str) -> None:
    update = _update(name, [[1.0] * 64], density=[0.5])
    assert sum(update) == pytest.approx(64, rel=1e-6)
    assert 0 < update.count(0.0) < 64


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_with_density_zero_gives_the_base(name: str) -> None:
    assert _update(name, [[1.0, 2.0]], density=[0.0]) == [0.0, 0.0]


def test_task_arithmetic_does_not_normalize_by_default() -> None:
    assert _update("task_arithmetic", [[1.0], [3.0]], weight=[0.5, 0.5]) == [2.0]
    assert _update("task_arithmetic", [[1.0], [3.0]], normalize=True) == [2.0]


def test_task_arithmetic_weights_that_cancel_are_not_divided_by() -> None:
    assert _update("task_arithmetic", [[1.0], [3.0]], weight=[1.0, -1.0], normalize=True) == [-2.0]


def test_linear_normalizes_by_default() -> None:
    assert _update("linear", [[1.0], [3.0]], weight=[2.0, 2.0]) == [3.0]
    assert _update("linear", [[1.0], [3.0]], weight=[2.0, 2.0], normalize=False) == [12.0]


def test_a_trim_keeps_at_least_one_element_and_none_at_density_zero() -> None:
    assert _update("ties", [[1.0, -3.0, 2.0]], density=[0.01]) == [0.0, -3.0, 0.0]
    assert _update("ties", [[1.0, -3.0, 2.0]], density=[0.0]) == [0.0, 0.0, 0.0]
    assert _update("ties", [[1.0, -3.0, 2.0]], density=[-1.0]) == [0.0, 0.0, 0.0]


def test_ties_of_the_paper_ignores_a_common_weight() -> None:
    rows = [[3.0, -1.0], [1.0, -3.0], [-2.0, 3.0]]
    paper = _update("ties", rows, weight=[-0.5] * 3, variant="paper")
    assert paper == _update("ties", rows) == [2.0, -2.0]
    assert _update("ties", rows, variant="paper", normalize=False, lambda_=0.5) == [2.0, -2.0]


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_the_papers_divide_what_is_kept_by_its_probability(name: str) -> None:
    epsilon = {"epsilon": [0.0]} if name.startswith("della") else {}
    kept = set(_update(name, [[1.0] * 64], density=[0.25], variant="paper", **epsilon))
    assert kept == {0.0, 4.0}
    assert set(
        _update(name, [[1.0] * 64], density=[0.25], variant="paper", rescale=False, **epsilon)
    ) == {0.0, 1.0}


def test_della_divides_each_element_by_its_own_probability_in_the_paper() -> None:
    delta = [float(i) for i in range(1, 1001)]
    update = _update("della_linear", [delta], density=[0.5], epsilon=[0.25], variant="paper")
    probability = [0.25 + 0.5 * i / 999 for i in range(1000)]
    for got, value, p in zip(update, delta, probability, strict=True):
        assert got == pytest.approx(value / p, rel=1e-5) or got == 0.0
    share = [sum(u != 0 for u in update[a : a + 500]) / 500 for a in (0, 500)]
    assert share == [pytest.approx(0.375, abs=0.06), pytest.approx(0.625, abs=0.06)]
    assert sum(update) == pytest.approx(sum(delta), rel=0.1)


def test_della_in_rows_of_one_element_drops_with_the_density_and_gives_no_nan() -> None:
    op = OPERATORS["della_linear"]
    params = {"weight": 1.0, "density": 0.5, "epsilon": 0.2}
    case = Case(np.zeros(4000), np.ones((1, 4000)), {"rescale": False}, [params], shape=(4000, 1))
    merged = merge(op, make_job(op, case))
    assert set(merged.tolist()) == {0.0, 1.0}
    assert merged.mean().item() == pytest.approx(0.5, abs=0.05)


def test_breadcrumbs_drops_outliers_and_small_magnitudes() -> None:
    delta = [1.0, -10.0, 3.0, 0.5, -4.0, 2.0]
    kept = [0.0, 0.0, 3.0, 0.0, -4.0, 0.0]
    assert _update("breadcrumbs", [delta], density=[0.4], gamma=[0.2]) == kept


def test_breadcrumbs_without_outliers_is_a_trim() -> None:
    delta = [1.0, -10.0, 3.0, 0.5, -4.0, 2.0]
    kept = [0.0, -10.0, 0.0, 0.0, -4.0, 0.0]
    for gamma in (0.0, 0.1):
        assert _update("breadcrumbs", [delta], density=[0.4], gamma=[gamma]) == kept


def test_breadcrumbs_drops_fewer_outliers_where_the_density_asks_for_more() -> None:
    delta = [1.0, -10.0, 3.0, 0.5]
    assert _update("breadcrumbs", [delta], density=[0.75], gamma=[0.9]) == [1.0, 0.0, 3.0, 0.5]
    assert _update("breadcrumbs", [delta], density=[1.0], gamma=[0.9]) == delta


@pytest.mark.parametrize("name", ["breadcrumbs", "breadcrumbs_ties"])
def test_breadcrumbs_rescales_only_if_asked(name: str) -> None:
    delta = [1.0, -10.0, 3.0, 0.5]
    kept = _update(name, [delta], density=[0.25], gamma=[0.25], rescale=True)
    assert kept == [0.0, 0.0, 14.5, 0.0]


@pytest.mark.parametrize(
    ("numel", "density", "gamma", "counts"),
    [
        (100, 0.5, 0.01, (51, 1)),
        (99, 0.5, 0.01, (49, 0)),
        (4, 0.75, 0.9, (4, 1)),
        (3, 0.1, 0, (0, 0)),
    ],
)
def test_a_band_is_the_difference_of_two_trims(
    numel: int, density: float, gamma: float, counts: tuple[int, int]
) -> None:
    assert band_counts(numel, density, gamma) == counts


def test_a_trim_count_is_at_least_one_where_there_are_elements() -> None:
    assert [trim_count(n, 0.3) for n in (0, 1, 3, 4, 10)] == [0, 1, 1, 1, 3]


def test_passthrough_gives_the_bits_of_its_model_and_scales_if_asked() -> None:
    op = OPERATORS["passthrough"]
    job = job_for(op, [[0.5, -1.0, -2.0]])
    job.experts[0, 1] = -0.0
    assert merge(op, job).signbit().tolist() == [False, True, True]
    assert _update("passthrough", [[0.5, -1.0]], scale=[3.0]) == [4.5, 0.0]


def test_nearswap_takes_near_elements_whole_and_moves_others_by_t() -> None:
    assert _update("nearswap", [[0.25, -0.5, 4.0, 0.0]], t=0.5) == [0.25, -0.5, 0.5, 0.0]
    assert _update("nearswap", [[0.25, -0.5]], t=0.0) == [0.0, 0.0]
    assert _update("nearswap", [[0.25, -0.5]], t=-1.0) == [0.0, 0.0]


def test_ram_averages_over_those_that_change_an_element() -> None:
    rows = [[2.0, 2.0, 0.0, 0.0], [4.0, 1e-6, 0.0, 0.0], [0.0, 0.0, -3.0, 0.0]]
    assert _update("ram", rows) == [3.0, 2.0, -3.0, 0.0]


def test_ramplus_scales_lone_changes_by_what_an_expert_shares() -> None:
    # Expert 1 shares one element and has two alone, expert 2 shares one and has none.
    rows = [[2.0, 2.0, 2.0, 0.0], [4.0, 0.0, 0.0, 0.0]]
    assert _update("ramplus_tl", rows, r=0.5, alpha=1.0) == [3.0, 2.5, 2.5, 0.0]
    assert _update("ramplus_tl", rows, r=0.5, alpha=0.25) == [3.0, 2.25, 2.25, 0.0]
    op = OPERATORS["ramplus_tl"]
    assert job_for(op, rows, r=0.5, alpha=2.0).task.facts == (1.0, 1.25, 2.0)


def test_sce_weighs_by_energy_among_those_that_agree() -> None:
    # Energies 20 and 5: weights 0.8 and 0.2, the second disagrees in the second element.
    assert _update("sce", [[2.0, 4.0], [1.0, -2.0]]) == [pytest.approx(1.8), 4.0]


def test_sce_weighs_tiny_deltas_alike() -> None:
    tiny = 2.0**-12
    update = _update("sce", [[3 * tiny], [tiny]])
    assert update == [2 * tiny]


def test_sce_selects_the_largest_variances_and_counts_ties_by_the_lowest_index() -> None:
    rows = [[1.0, 8.0, 5.0, -3.0, 2.0], [3.0, 2.0, 5.0, 3.0, 0.0]]
    kept = [u != 0 for u in _update("sce", rows, select_topk=0.75)]
    assert kept == [True, True, False, True, False]


def test_sce_with_a_part_selected_of_equal_experts_gives_the_base() -> None:
    assert _update("sce", [[1.0, 2.0]] * 3, select_topk=0.5) == [0.0, 0.0]
    assert _update("sce", [[1.0, 2.0]] * 3, select_topk=1.0) == [1.0, 2.0]
    assert _update("sce", [[1.0, 2.0], [3.0, 1.0]], select_topk=0.0) == [0.0, 0.0]


def test_arcee_fusion_takes_what_stands_out() -> None:
    # Importances are as the magnitudes: quartiles 2, 3 and 4 units, so a threshold of 6.
    assert _update("arcee_fusion", [[1.0, -2.0, 3.0, 4.0, -5.0, 8.0]]) == [0.0] * 5 + [8.0]


def test_arcee_fusion_takes_all_where_all_are_alike() -> None:
    assert _update("arcee_fusion", [[1.0, -1.0, 1.0, -1.0]]) == [1.0, -1.0, 1.0, -1.0]


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 63, 1000])
def test_importance_does_not_depend_on_the_rows_of_a_window(width: int) -> None:
    op = OPERATORS["arcee_fusion"]
    (step,) = op.measures
    assert isinstance(step, Quantiles)
    numbers = np.random.default_rng(width)
    base = numbers.standard_normal(60 * width)
    expert = base + 0.1 * numbers.standard_normal((1, 60 * width))
    job = make_job(op, Case(base, expert, {}, [{}], shape=(60, width)))
    whole = step.score(job.window())
    for rows in (1, 2, 7, 59):
        for at in range(0, 60, rows):
            part = slice(at * width, min(at + rows, 60) * width)
            assert_same_bits(step.score(job.window(part.start, part.stop)), whole[part])


def test_the_importance_of_one_long_row_does_not_depend_on_threads() -> None:
    op = OPERATORS["arcee_fusion"]
    (step,) = op.measures
    assert isinstance(step, Quantiles)
    base = np.random.default_rng(1).standard_normal(200_001)
    job = make_job(op, Case(base, base[None, ::-1] * 0.5, {}, [{}]))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(step.score(job.window()))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(*found)
