"""Warnings where mergekit does something else, or where a recipe does not do what it seems to."""

from __future__ import annotations

import pytest

from tests.recipe.schemas import parse, resolve, table

TWO = "merge_method: {}\nbase_model: base\nmodels: [{{model: a}}, {{model: b}}]\nparameters: {}\n"


@pytest.mark.parametrize(
    ("method", "parameters", "warning"),
    [
        ("dare_ties", "{weight: 1}", "and not by 1/density as in the paper"),
        ("breadcrumbs", "{weight: 1}", "mergekit before 0.1.5 zeroes the whole delta"),
        ("model_stock", "{}", "negative cosine"),
        ("model_stock", "{weight: 1}", "parameters.weight has no effect: `model_stock` has no"),
        ("ties", "{weight: 1, int8_mask: true}", "parameters.int8_mask has no effect"),
    ],
)
def test_known_traps_are_warned_of_from_the_text_alone(
    method: str, parameters: str, warning: str
) -> None:
    raw = parse(TWO.format(method, parameters))
    assert [w for w in raw.warnings if warning in w]


def test_a_paper_variant_and_a_plain_recipe_have_no_warnings() -> None:
    assert parse(TWO.format("dare_ties", "{weight: 1, variant: paper}")).warnings == ()
    assert parse(TWO.format("ties", "{weight: 1}")).warnings == ()


@pytest.mark.parametrize(("t", "count"), [("0.5", 0), ("[0, 1]", 0), ("[0, 1.5]", 1), ("-0.1", 1)])
def test_a_t_beyond_the_two_models_is_warned_of(t: str, count: int) -> None:
    text = f"merge_method: slerp\nbase_model: a\nmodels: [{{model: b}}]\nparameters: {{t: {t}}}\n"
    assert sum("outside [0, 1]" in w for w in parse(text).warnings) == count


@pytest.mark.parametrize(
    ("density", "told"),
    [
        ("1.5", "parameters.density is 1.5: what is above 1 keeps everything, as 1 does"),
        ("[0.5, 2]", "parameters.density is 2: what is above 1 keeps everything, as 1 does"),
        ("0", "parameters.density is 0: nothing of the deltas is kept"),
        ("[0, 1]", None),
        ("1", None),
    ],
)
def test_a_density_that_is_no_share_is_warned_of(density: str, told: str | None) -> None:
    text = TWO.format("ties", f"{{weight: 1, density: {density}}}")
    assert parse(text).warnings == (() if told is None else (told,))


def test_each_warning_is_told_once_after_resolving() -> None:
    text = TWO.format("breadcrumbs", "{weight: 1, int8_mask: 1, t: 1}")
    recipe = resolve(text, every=table(dtype="BF16"))
    assert len(recipe.warnings) == len(set(recipe.warnings)) == 4


def test_keys_without_effect_are_warned_of() -> None:
    raw = parse(
        "merge_method: passthrough\nslices:\n- sources:\n"
        "  - {model: {model: {path: a}, override_architecture: X}, layer_range: [0, 1]}\n"
        "  residual_weight: 0.5\n"
    )
    assert [w.partition(" ")[0] for w in raw.warnings] == [
        "slices[0].residual_weight",
        "override_architecture",
    ]
