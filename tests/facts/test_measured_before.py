"""What a warehouse has measured for other recipes changes no result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mergepipe_pipeline.operators import OPERATORS
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.warehouse import Warehouse

#: Parameters under which a method measures something else.
_PARAMETERS = {
    "nuslerp": (
        "{nuslerp_flatten: true}",
        "{nuslerp_flatten: false}",
        "{nuslerp_flatten: false, nuslerp_row_wise: true}",
    ),
    "model_stock": ("{filter_wise: false}", "{filter_wise: true}"),
    "slerp": ("{t: 0.4}",),
    "sce": ("{select_topk: 0.5}", "{select_topk: 1.0}"),
}


def _recipes(family: Path) -> Iterator[tuple[str, str]]:
    """A short name and the YAML of every way to measure two models, with and without a base."""
    measuring = sorted(name for name, o in OPERATORS.items() if o.measures)
    assert set(_PARAMETERS) < set(measuring)
    for method in measuring:
        schema = OPERATORS[method].schema
        for parameters in _PARAMETERS.get(method, ("{}",)):
            for base in ("none", "required"):
                if schema.base in (base, "optional"):
                    lines = [f"merge_method: {method}", f"parameters: {parameters}", "models:"]
                    count = min(2, schema.experts[1] or 2)
                    lines += [
                        f"- {{model: {family}/expert_0{i}, parameters: {{weight: 0.5}}}}"
                        for i in range(count)
                    ]
                    lines += [f"base_model: {family}/base"] if base == "required" else []
                    yield f"{method} {parameters} base {base}", "\n".join(lines) + "\n"


def _merged(home: Warehouse, text: str) -> str:
    done = merge(home, parse(text, name="r", where="r.yml", lenient=True))
    return done.outcome.snapshot.snapshot_id


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_result_does_not_depend_on_what_was_merged_before(
    tmp_path: Path, family: Path, is_reversed: bool
) -> None:
    recipes = dict(_recipes(family))
    assert len(recipes) > 8
    used = Warehouse.at(tmp_path / "used").ensure()
    for name in sorted(recipes, reverse=is_reversed):
        fresh_id = _merged(Warehouse.at(tmp_path / f"only {name}").ensure(), recipes[name])
        assert _merged(used, recipes[name]) == fresh_id, name
