"""What the soak itself rests on."""

from __future__ import annotations

from tests.soak.model import BASE, Model, Recipe


def test_the_model_asks_nothing_of_a_recipe_whose_expert_is_gone_or_whose_text_is_broken() -> None:
    model = Model({BASE: 10, "a": 14, "b": 11})
    model.recipes = {
        "both": Recipe(("a", "b"), scale=2.0),
        "gone": Recipe(("a", "c")),
        "broken": Recipe(("a",), broken=True),
    }
    assert model.all_wanted() == {"both": 20.0}
    model.lost("b")
    assert model.all_wanted() == {}
