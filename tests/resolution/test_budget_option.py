"""The option `--budget` against a recipe's own budget, as far as `resolve` tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mergepipe_pipeline.domain.recipe import Budget, Selection, Share
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse

WISHES = "budget: {limit: 10%, pin: [expert_00], shares: {'expert_*': 1MB}}"
PIN, SHARE = Selection(("expert_00",)), Share("expert_*", nbytes=10**6)


@pytest.mark.parametrize(
    ("option", "amount"),
    [
        (None, {"fraction": 0.1}),
        ("50%", {"fraction": 0.5}),
        ("none", {}),
        ("7B", {"nbytes": 7}),
        ("error=0.02", {"error": 0.02}),
        ("error=2%", {"error": 0.02}),
    ],
)
def test_the_option_replaces_the_amount_and_keeps_the_wishes(
    home: Warehouse,
    recipe_text: Callable[..., str],
    option: str | None,
    amount: dict[str, Any],
) -> None:
    raw = parse(recipe_text(extra=WISHES), name="r", where="r.yml")
    recipe = resolve(home, raw, budget=option).recipe
    assert recipe.budget == Budget(pin=(PIN,), shares=(SHARE,), **amount)


def test_a_pattern_that_fits_no_expert_is_told_by_check(
    home: Warehouse, recipe_text: Callable[..., str]
) -> None:
    raw = parse(recipe_text(extra=WISHES.replace("_00]", "_09]")), name="r", where="r.yml")
    with pytest.raises(RecipeError, match=r"no expert fits 'expert_09'; did you.*budget\.pin\[0\]"):
        resolve(home, raw)
