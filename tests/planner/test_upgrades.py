"""Going down a list of upgrades."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.planner.hulls import affordable_levels
from mergepipe_pipeline.planner.packed_rows import ORIGINAL
from mergepipe_pipeline.planner.upgrades import affordable
from tests.support.laws import examples

#: Few sizes, as blocks have.
SIZES = st.sampled_from([1, 2, 3, 500, 512])


@settings(max_examples=examples(200))
@given(
    upgrades=st.lists(st.tuples(SIZES, st.integers(0, 3)), max_size=60),
    budget=st.integers(0, 6000),
    caps=st.lists(st.integers(0, 2000) | st.just(2**63 - 1), min_size=4, max_size=4),
)
def test_each_upgrade_is_bought_if_budget_and_cap_still_have_room(
    upgrades: list[tuple[int, int]], budget: int, caps: list[int]
) -> None:
    bought, left, room = [], budget, list(caps)
    for cost, of in upgrades:
        fits = cost <= min(left, room[of])
        bought.append(fits)
        left -= cost * fits
        room[of] -= cost * fits
    nbytes, expert = np.array(upgrades, np.int64).reshape(-1, 2).T.copy()
    room_of = np.array(caps, np.int64)
    assert affordable(nbytes, expert, budget, room_of).tolist() == bought
    # As those that read packs, where none does and each candidate is of a row of its own.
    own, n = np.arange(len(nbytes)), len(nbytes)
    candidate, level, fees = own.astype(np.int32), np.full(n, ORIGINAL, np.int8), np.zeros_like(own)
    as_packed = affordable_levels(candidate, level, nbytes, own, expert, fees, n, budget, room_of)
    assert as_packed.tolist() == bought
