"""What can be read: blocks one by one, adapters whole, and what each is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given

from mergepipe_pipeline.planner.candidates import Candidates, lay_out
from tests.planner.drawn import GRID, candidates, row


@given(c=candidates())
def test_blocks_of_a_row_have_its_elements_and_bytes(c: Candidates) -> None:
    for r, cut in zip(c.rows, c.row_slices(), strict=True):
        assert c.block[cut].tolist() == list(range(GRID.count(r.numel)))
        wanted = r.numel * r.itemsize if r.bundle_nbytes is None else r.bundle_nbytes
        assert c.nbytes[cut].sum() == wanted


@given(c=candidates())
def test_a_unit_is_one_block_or_one_whole_bundle(c: Candidates) -> None:
    for r, cut in zip(c.rows, c.row_slices(), strict=True):
        units = np.unique(c.unit[cut])
        assert len(units) == (1 if r.bundle_nbytes is not None else GRID.count(r.numel))
        assert not np.isin(units, np.delete(c.unit, np.r_[cut])).any()
    assert np.unique(c.unit).tolist() == list(range(c.n_units))


@given(c=candidates())
def test_sites_are_the_same_elements_of_a_tensor(c: Candidates) -> None:
    places: dict[int, tuple[int, int]] = {}
    for i, out_block in enumerate(c.out_block.tolist()):
        place = (c.rows[c.row[i]].tensor, int(c.block[i]))
        assert places.setdefault(out_block, place) == place
    assert len(set(places.values())) == c.n_out_blocks


def test_a_bundle_costs_its_factors_at_its_first_block_alone() -> None:
    c = lay_out([row(1.0, 0.0, 2.0), row(1.0, 0.0, 2.0, bundle_nbytes=700)], GRID)
    assert c.nbytes.tolist() == [8192, 8192, 8192, 700, 0, 0]
    assert c.unit.tolist() == [0, 1, 2, 3, 3, 3]
    assert c.zero.tolist() == [False, True, False, False, False, False]


def test_a_bundle_without_a_difference_is_zero_as_a_whole() -> None:
    c = lay_out([row(0.0, 0.0, bundle_nbytes=0), row(0.0, 0.0, bundle_nbytes=9)], GRID)
    assert c.zero.all()
    assert c.unit_zero.tolist() == [True, True]


def test_a_row_without_statistics_is_worth_everything() -> None:
    unknown = replace(row(1.0, 1.0), block_l2sq=None, block_nonzero=None)
    c = lay_out([unknown, replace(unknown, bundle_nbytes=5)], GRID)
    assert np.isinf(c.gain).all()
    assert not c.zero.any()


def test_nothing_to_lay_out_has_no_units() -> None:
    for rows in ([], [replace(row(), bundle_nbytes=4)]):
        c = lay_out(rows, GRID)
        assert (c.n_units, len(c.nbytes), len(c.gain), len(c.unit_zero)) == (0, 0, 0, 0)
        assert [cut.stop for cut in c.row_slices()] == [0] * len(rows)


@given(c=candidates())
def test_groups_are_the_candidates_of_each_tensor_as_a_table(c: Candidates) -> None:
    seen = []
    for group in c.groups():
        # A table of numbers from 1 on has 0 where there is no candidate.
        numbers = group.table(np.arange(1, len(c.row) + 1))
        place = numbers[numbers > 0] - 1
        seen += np.sort(place).tolist()
        assert {c.rows[r].tensor for r in c.row[place]} == {group.tensor}
        for i, r in enumerate(group.rows):
            own = numbers[:, i]
            assert (own > 0).sum() == GRID.count(r.numel)
            cost = np.where(own > 0, c.nbytes[own - 1], 0)
            np.testing.assert_array_equal(group.table(c.nbytes)[:, i], cost)
    assert seen == list(range(len(c.row)))
