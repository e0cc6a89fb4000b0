"""What a budget may look like, and what it is in bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.recipe import Budget, Selection, Share
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.recipe.budget import parse_budget, parse_error, with_amount
from tests.support.laws import examples


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (None, Budget()),
        ("none", Budget()),
        ("FULL", Budget()),
        (0, Budget(nbytes=0)),
        ("0", Budget(nbytes=0)),
        (1024, Budget(nbytes=1024)),
        ("1024", Budget(nbytes=1024)),
        ("1024 B", Budget(nbytes=1024)),
        (2.0e9, Budget(nbytes=2_000_000_000)),
        ("8GiB", Budget(nbytes=8 * 1024**3)),
        (" 8 gib ", Budget(nbytes=8 * 1024**3)),
        ("500MB", Budget(nbytes=500_000_000)),
        ("1.5KiB", Budget(nbytes=1536)),
        ("0.3B", Budget(nbytes=0)),
        ("25%", Budget(fraction=0.25)),
        ("12.5 %", Budget(fraction=0.125)),
        ("0%", Budget(fraction=0.0)),
        ("100%", Budget(fraction=1.0)),
        ("error=0.02", Budget(error=0.02)),
        (" Error = 2 %", Budget(error=0.02)),
        ("error=2e-2", Budget(error=0.02)),
        ("error=0", Budget(error=0.0)),
    ],
)
def test_a_budget_means_what_it_says(written: object, meant: Budget) -> None:
    assert parse_budget(written, "here") == meant


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        (0.25, "write 25% for a share"),
        ("0.25", "write 25% for a share"),
        (30, "write 30% for a share, 30B for bytes"),
        ("100", "write 100% for a share, 100B for bytes"),
        (1.5, "write whole bytes"),
        (float("nan"), "write whole bytes"),
        (float("inf"), "write whole bytes"),
        (-1, "write at least 0"),
        (-0.5, "write at least 0"),
        (1 << 63, "write `none`"),
        ("error=1", "from 0 to below 1"),
        ("error=-1%", "from 0 to below 1"),
        ("error=nan", "from 0 to below 1"),
        ("error=200%", "largest error you can accept"),
        ("error=", "from 0 to below 1"),
        ("eror=2%", "write error=0.02"),
        ("-1", "write at least 0"),
        ("-5 GB", "write at least 0"),
        ("1e9%", "at most 100%"),
        ("lots", "or an error like error=2%"),
        ("101%", "at most 100%"),
        ("8 giggles", "25%"),
        ("8Gb it", "25%"),
        ("8G", "use B, kB, MB"),
        ("9999999999TB", "write `none`"),
        ("٣", "25%"),
        ("1e9", "25%"),
        ("9" * 5000, "25%"),
        ("", "25%"),
        (True, "25%"),
        ([1], "25%"),
    ],
)
def test_what_is_no_budget_is_refused_with_a_next_step(written: object, hint: str) -> None:
    with pytest.raises(BudgetError, match="A budget cannot be understood") as caught:
        parse_budget(written, "--budget")
    assert hint in str(caught.value)
    assert "Where: --budget" in str(caught.value)
    assert len(str(caught.value)) < 300


@settings(max_examples=examples(50), deadline=None)
@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_any_value_is_a_budget_or_a_budget_error(value: object) -> None:
    try:
        budget = parse_budget(value, "here")
    except BudgetError:
        return
    limit = budget.resolve(10**12)
    assert limit is None or limit >= 0


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**40), st.sampled_from([("kB", 10**3), ("MiB", 2**20), ("B", 1)]))
def test_whole_units_are_exact(n: int, unit: tuple[str, int]) -> None:
    assert parse_budget(f"{n}{unit[0]}", "here") == Budget(nbytes=n * unit[1])


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**40) | st.integers(0, 200) | st.floats(0, 200).map(lambda x: round(x, 3)))
def test_a_number_without_a_unit_is_the_same_as_a_number_and_as_a_text(n: float) -> None:
    found = []
    for written in (n, str(n)):
        try:
            found.append(str(parse_budget(written, "here")))
        except BudgetError as error:
            found.append(str(error))
    assert found[0] == found[1]
    assert n == 0 or n > 100 or "for a share" in found[0] or "whole bytes" in found[0]


@settings(max_examples=examples(50), deadline=None)
@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_any_value_is_an_error_to_accept_or_a_budget_error(value: object) -> None:
    try:
        assert 0 <= parse_error(value, "here") < 1
    except BudgetError:
        return


@settings(max_examples=examples(50), deadline=None)
@given(st.floats(0, 1, exclude_max=True))
def test_an_error_is_the_same_as_a_number_and_as_a_text(error: float) -> None:
    assert parse_error(error, "here") == error
    assert parse_error(f"{error:.17f}", "here") == pytest.approx(error, abs=1e-16)


def test_a_whole_number_for_an_error_is_taken_for_a_forgotten_percent_sign() -> None:
    with pytest.raises(BudgetError, match="write 2% for a share"):
        parse_error(2, "here")


@pytest.mark.parametrize(
    "amount", [Budget(), Budget(nbytes=7), Budget(fraction=0.5), Budget(error=0.1)]
)
def test_an_amount_replaces_the_amount_and_leaves_the_wishes(amount: Budget) -> None:
    wishes: dict[str, Any] = {
        "pin": (Selection(("a",)),),
        "exclude": (Selection((), ("x",)),),
        "keep": ("y",),
        "shares": (Share("*", 8),),
    }
    for before in (Budget(), Budget(nbytes=1), Budget(fraction=0.1), Budget(error=0.2)):
        assert with_amount(with_amount(Budget(**wishes), before), amount) == with_amount(
            Budget(**wishes), amount
        )
    after = with_amount(Budget(error=0.2, **wishes), amount)
    assert (after.nbytes, after.fraction, after.error) == (
        amount.nbytes,
        amount.fraction,
        amount.error,
    )
    assert (after.pin, after.keep, after.shares) == (
        wishes["pin"],
        wishes["keep"],
        wishes["shares"],
    )
