"""Delta debugging against its laws, over any predicate."""

from __future__ import annotations

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.quality.bisection import most_questions, narrow

_ITEMS = st.integers(1, 24).map(lambda n: tuple(range(n)))


@given(_ITEMS, st.data())
def test_a_single_guilty_item_is_found_in_few_questions(
    items: tuple[int, ...], data: st.DataObject
) -> None:
    guilty = data.draw(st.sampled_from(items))
    asked = list[tuple[int, ...]]()

    def is_guilty(part: tuple[int, ...]) -> bool:
        asked.append(part)
        return guilty in part

    found = narrow(items, is_guilty, most=10**6)
    assert (found.part, found.is_smallest) == ((guilty,), True)
    assert len(asked) <= 2 * ceil(log2(len(items)))


@given(_ITEMS, st.integers(0, 2**64 - 1), st.integers(0, 40))
def test_what_is_found_repairs_and_is_smallest_unless_the_questions_run_out(
    items: tuple[int, ...], seed: int, most: int
) -> None:
    asked = list[tuple[int, ...]]()

    def repairs(part: tuple[int, ...]) -> bool:
        asked.append(part)
        return part == items or hash((seed, part)) % 3 == 0

    found = narrow(items, repairs, most)
    assert len(asked) <= min(most, most_questions(len(items)))
    assert repairs(found.part)
    if found.is_smallest and len(found.part) > 1:
        fewer = (tuple(i for i in found.part if i != item) for item in found.part)
        assert not any(map(repairs, fewer))
    else:
        assert found.is_smallest or len(asked) > most
