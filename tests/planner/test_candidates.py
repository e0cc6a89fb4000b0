"""What can be read: blocks one by one, adapters whole, and what each is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.planner.candidates import Candidates, lay_out
from tests.planner.drawn import GRID, candidates, row


@given(c=candidates())
def test_blocks_of_a_row_have_its_elements_and_bytes(c: Candidates) -> None:
    for r, cut in zip(c.rows, c.row_slices(), strict=True):
        assert c.block[cut].tolist() == list(range(GRID.count(r.numel)))
        wanted = r.numel * r.itemsize if r.bundle_nbytes is None else r.bundle_nbytes
        assert c.nbytes[cut].sum() == c.unit_nbytes[np.unique(c.unit[cut])].sum() == wanted


@given(c=candidates())
def test_a_unit_is_one_block_or_one_whole_bundle(c: Candidates) -> None:
    for r, cut in zip(c.rows, c.row_slices(), strict=True):
        units = np.unique(c.unit[cut])
        assert len(units) == (1 if r.bundle_nbytes is not None else GRID.count(r.numel))
        assert not np.isin(units, np.delete(c.unit, np.r_[cut])).any()
    assert np.unique(c.unit).tolist() == list(range(c.n_units))
    np.testing.assert_array_equal(c.unit[c.unit_first], np.arange(c.n_units))


@given(c=candidates())
def test_units_are_worth_and_cost_what_their_blocks_do(c: Candidates) -> None:
    for unit in range(c.n_units):
        mine = c.unit == unit
        np.testing.assert_allclose(c.unit_gain[unit], c.gain[mine].sum(), rtol=1e-12)
        assert c.unit_nbytes[unit] == c.nbytes[mine].sum()
        assert c.unit_zero[unit] == c.zero[mine].all() == c.zero[mine].any()


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
    np.testing.assert_allclose(c.unit_gain, [1.0, 0.0, 2.0, 3.0])


def test_a_bundle_without_a_difference_is_zero_as_a_whole() -> None:
    c = lay_out([row(0.0, 0.0, bundle_nbytes=0), row(0.0, 0.0, bundle_nbytes=9)], GRID)
    assert c.zero.all()
    assert c.unit_zero.tolist() == [True, True]


def test_a_row_without_statistics_is_worth_everything() -> None:
    unknown = replace(row(1.0, 1.0), block_l2sq=None, block_nonzero=None)
    c = lay_out([unknown, replace(unknown, bundle_nbytes=5)], GRID)
    assert np.isinf(c.unit_gain).all()
    assert not c.zero.any()


def test_nothing_to_lay_out_has_no_units() -> None:
    for rows in ([], [replace(row(), bundle_nbytes=4)]):
        c = lay_out(rows, GRID)
        assert (c.n_units, len(c.unit_nbytes), len(c.unit_gain), len(c.unit_zero)) == (0, 0, 0, 0)
        assert [cut.stop for cut in c.row_slices()] == [0] * len(rows)


@given(c=candidates())
def test_groups_are_the_candidates_of_each_tensor_as_a_table(c: Candidates) -> None:
    seen = []
    for group in c.groups():
        place = group.members[group.members >= 0]
        seen += np.sort(place).tolist()
        assert {c.rows[r].tensor for r in c.row[place]} == {group.tensor}
        for i, r in enumerate(group.rows):
            own = group.members[:, i]
            assert c.out_block[own[own >= 0]].tolist() == [
                group.first_out_block + n for n in range(GRID.count(r.numel))
            ]
            cost = np.where(own < 0, 0, c.nbytes[own])
            np.testing.assert_array_equal(group.table(c.nbytes)[:, i], cost)
    assert seen == list(range(len(c.row)))


@given(c=candidates(), share=st.floats(0, 1))
def test_only_what_changes_something_and_is_not_chosen_is_omitted(
    c: Candidates, share: float
) -> None:
    choice = np.random.default_rng(0).random(len(c.row)) < share
    found = [g.members[g.omitted(choice)] for g in c.groups()]
    assert np.concatenate(found).size == (~choice & ~c.zero).sum()
    assert not (choice | c.zero)[np.concatenate(found)].any()


def test_a_row_of_which_all_is_kept_keeps_all_of_its_sq_norm() -> None:
    half = replace(row(4.0, 1.0, position=1), block_sq_norm=np.array([2.0, 0.0]))
    (group,) = lay_out([row(4.0, 0.0), half], GRID).groups()
    assert group.kept.tolist() == [[1.0, 0.5], [1.0, 0.0]]
