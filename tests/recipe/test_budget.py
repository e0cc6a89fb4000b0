"""What a budget may look like, and what it is in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.recipe.budget import parse_budget
from mergepipe_pipeline.spec.recipe import Budget


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
    ],
)
def test_a_budget_means_what_it_says(written: object, meant: Budget) -> None:
    assert parse_budget(written, "here") == meant


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        (0.25, "write 25% for a share"),
        (1.5, "write whole bytes"),
        (float("nan"), "write whole bytes"),
        (float("inf"), "write whole bytes"),
        (-1, "from 0 up"),
        (1 << 63, "from 0 up"),
        ("-1", "25%"),
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


@settings(max_examples=50, deadline=None)
@given(st.text() | st.integers() | st.floats() | st.booleans() | st.none())
def test_any_value_is_a_budget_or_a_budget_error(value: object) -> None:
    try:
        budget = parse_budget(value, "here")
    except BudgetError:
        return
    limit = budget.resolve(10**12)
    assert limit is None or limit >= 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**40), st.sampled_from([("kB", 10**3), ("MiB", 2**20), ("B", 1), ("", 1)]))
def test_whole_units_are_exact(n: int, unit: tuple[str, int]) -> None:
    assert parse_budget(f"{n}{unit[0]}", "here") == Budget(nbytes=n * unit[1])
