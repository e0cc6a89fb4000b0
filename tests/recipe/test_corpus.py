"""A corpus of recipes: those that hold, and those that are refused for a reason beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.errors import RecipeError
from tests.recipe.schemas import METHODS
from tests.recipe.synthetic import parse_all, resolve_all

CORPUS = Path(__file__).parent.parent / "recipes"
VALID = sorted((CORPUS / "valid").glob("*.yml"))
INVALID = sorted((CORPUS / "invalid").glob("*.yml"))


def test_the_corpus_is_there() -> None:
    assert len(VALID) >= 40
    assert len(INVALID) >= 40


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_a_valid_recipe_resolves_with_every_parameter_of_its_method(path: Path) -> None:
    for recipe in resolve_all(path.read_text(encoding="utf-8")):
        schema = METHODS[recipe.method]
        wanted = {
            scope: [p.name for p in schema.parameters if p.scope == scope]
            for scope in ("method", "model")
        }
        fewest, most = schema.experts
        assert recipe.tensors
        assert len({t.name for t in recipe.tensors}) == len(recipe.tensors)
        for t in recipe.tensors:
            assert t.inputs or t.base
            if not t.inputs:
                continue
            assert fewest <= len(t.inputs) <= (most or len(recipe.models))
            assert [n for n, _ in t.params] == wanted["method"]
            assert all([n for n, _ in i.params] == wanted["model"] for i in t.inputs)
            assert all(0 <= i.model < len(recipe.models) for i in t.inputs)
            assert t.base is not None or schema.base != "required"


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_a_valid_recipe_tells_its_models_without_files(path: Path) -> None:
    for raw in parse_all(path.read_text(encoding="utf-8")):
        assert len(set(raw.references)) == len(raw.references) > 0
        assert all(0 <= entry.model < len(raw.references) for entry in raw.entries())
        assert raw.base is None or 0 <= raw.base < len(raw.references)
        assert set(raw.stages_used) <= {ref.model for ref in raw.references}
        assert [stage.stage for stage in raw.before] == list(raw.stages_used)


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_an_invalid_recipe_is_refused_for_its_own_reason_alone(path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing was read or written") as caught:
        resolve_all(path.read_text(encoding="utf-8"))
    expected = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert "\n".join(caught.value.problems) + "\n" == expected
