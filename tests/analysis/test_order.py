"""Order statistics against sorting, for any windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis import order
from mergepipe_pipeline.analysis.order import Histogram, bits_at, keep_largest
from mergepipe_pipeline.arrays import U32Array
from mergepipe_pipeline.domain.plan import TrimRule
from tests.support.oracles import largest
from tests.support.stored import Floats

T = TypeVar("T")


@dataclass(frozen=True)
class Windows:
    """Scores in memory, in windows of `length`."""

    values: Floats
    length: int

    def map(self, work: Callable[[int, U32Array], T], only: int | None = None) -> Iterator[T]:
        starts = range(0, len(self.values), self.length)
        for start in starts if only is None else starts[only : only + 1]:
            yield work(start, self.values[start : start + self.length].view(np.uint32))


@st.composite
def scores(draw: st.DrawFn) -> Windows:
    """Scores with ties, zeros, infinities and neighbours in the last bit, in any windows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 400))
    choices = [0.0, 1e-45, 1e-38, 0.5, np.nextafter(np.float32(0.5), np.float32(1)), 3.0, np.inf]
    drawn = {
        "ties": rng.choice(choices, n),
        "near": 1 + rng.integers(0, 5, n) * np.finfo(np.float32).eps,
        "wide": np.exp(np.clip(rng.normal(0, 20, n), -100, 88)),  # as far as float32 goes
        "equal": np.full(n, 2.0),
    }
    values = drawn[draw(st.sampled_from(sorted(drawn)))].astype(np.float32)
    return Windows(values, draw(st.integers(1, n + 1)))


def kept_by(rule: TrimRule, values: Floats) -> npt.NDArray[np.bool_]:
    """What a rule's definition keeps."""
    bits, index = values.view(np.uint32), np.arange(len(values))
    ties = (bits == rule.threshold_bits) & (index < rule.tie_stop_elem)
    return np.asarray((bits > rule.threshold_bits) | ties)


@pytest.fixture(autouse=True, scope="module")
def short_parts() -> Iterator[None]:
    """Windows are looked through in parts; here these are shorter than windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_PART", 7)
        yield


@given(found=scores(), data=st.data())
def test_exactly_the_largest_are_kept_and_ties_by_lowest_index(
    found: Windows, data: st.DataObject
) -> None:
    n = len(found.values)
    keep = data.draw(st.integers(-1, n + 1))
    rule = keep_largest(found, Histogram.of(found), keep)
    wanted = largest(found.values.astype(np.float64), keep)
    np.testing.assert_array_equal(kept_by(rule, found.values), wanted)


@given(found=scores())
def test_every_rank_has_the_bits_of_the_sorted_scores(found: Windows) -> None:
    n, histogram = len(found.values), Histogram.of(found)
    ordered = np.sort(found.values).view(np.uint32)
    for rank in {0, n // 4, n // 2, n - 1}:
        assert bits_at(found, histogram, rank) == ordered[rank]


@given(found=scores())
def test_a_histogram_counts_every_score_once(found: Windows) -> None:
    bins, counts = np.unique(found.values.view(np.uint32) >> 16, return_counts=True)
    histogram = Histogram.of(found)
    np.testing.assert_array_equal(histogram.bins, bins)
    np.testing.assert_array_equal(histogram.counts, counts)


@pytest.mark.parametrize("keep", [1, 7, 8, 9, 15, 16, 17, 20])
def test_the_tie_cut_may_fall_on_either_side_of_a_window_edge(keep: int) -> None:
    windows = Windows(np.full(20, 0.25, np.float32), 8)
    rule = keep_largest(windows, Histogram.of(windows), keep)
    assert kept_by(rule, windows.values).nonzero()[0].tolist() == list(range(keep))
