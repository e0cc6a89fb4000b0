"""The card of a copy names the hub's models that went into it, and what all inputs agree on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse

RECIPE = """\
merge_method: task_arithmetic
base_model: org/base
models: [{model: org/math, parameters: {weight: 0.5}}, {model: code, parameters: {weight: 0.5}}]
"""
STAGED = """\
name: both
merge_method: task_arithmetic
base_model: org/base
models: [{model: org/math, parameters: {weight: 0.5}}]
---
merge_method: linear
models: [{model: both, parameters: {weight: 1}}, {model: code, parameters: {weight: 1}}]
"""
SAID = "license: apache-2.0\nlanguage: [en, 'no']\n"
Cards = dict[str, str | None]
Merge = Callable[..., tuple[Snapshot, dict[str, Any]]]


@pytest.fixture
def merged(family: Path, home: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Merge:
    """Merges two models of the hub's cache and a folder, whose cards say this."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    places = {"code": tmp_path / "code"}
    for name in ("base", "math"):
        repo = tmp_path / "hub" / f"models--org--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("c0ffee")
        places[name] = repo / "snapshots" / "c0ffee"
    for name, source in (("base", "base"), ("math", "expert_00"), ("code", "expert_01")):
        shutil.copytree(family / source, places[name])

    def merge_with(cards: Cards, text: str = RECIPE) -> tuple[Snapshot, dict[str, Any]]:
        for name, front in cards.items():
            card = places[name] / "README.md"
            card.unlink(missing_ok=True)
            if front is not None:
                card.write_text(f"---\n{front}---\n# A model\n")
        recipe, out = tmp_path / "r.yml", tmp_path / "out"
        recipe.write_text(text)
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(home.root, ignore_errors=True)  # a snapshot keeps what was said at first
        made = merge(home, recipe, relative_to=tmp_path, out=out)
        merge(home, recipe, relative_to=tmp_path, out=out)  # which leaves it as it is
        assert verify(home, str(out)).snapshot_id == made.outcome.snapshot.snapshot_id
        _, front, _ = (out / "README.md").read_text().split("---\n", 2)
        return made.outcome.snapshot, yaml.safe_load(front)

    return merge_with


def test_a_card_names_the_models_of_the_hub_and_what_all_inputs_agree_on(merged: Merge) -> None:
    _, front = merged(dict.fromkeys(("base", "math", "code"), SAID))
    assert front == {
        "base_model": ["org/base", "org/math"],
        "base_model_relation": "merge",
        "license": "apache-2.0",
        "language": ["en", "no"],
        "library_name": "transformers",
        "tags": ["merge", "mergepipe"],
    }


@pytest.mark.parametrize(
    "other",
    [
        None,
        "tags: [x]\n",
        "license: mit\nlanguage: [en]\n",
        "license: [a, b]\nlanguage: {en: 1}\n",
        "license: 'apache-2.0\\nbase_model: evil'\nlanguage: !!python/object:os.system [x]\n",
        "license: &a [*a]\n",
        "[" * 5000 + "\n",
    ],
)
def test_what_one_input_does_not_say_is_not_stated_of_the_result(
    merged: Merge, other: str | None
) -> None:
    snapshot, front = merged({"base": SAID, "math": SAID, "code": other})
    assert front["base_model"] == ["org/base", "org/math"]
    assert front.keys().isdisjoint({"license", "language"})
    # What inputs say of themselves is no part of what was merged.
    assert merged({"base": None, "math": None, "code": None})[0].snapshot_id == snapshot.snapshot_id


def test_the_order_of_languages_and_a_licence_without_a_meaning_are_not_compared(
    merged: Merge,
) -> None:
    first, last = "license: other\nlanguage: [de, en]\n", "license: other\nlanguage: [en, de]\n"
    _, front = merged({"base": first, "math": last, "code": last})
    assert "license" not in front
    assert front["language"] == ["de", "en"]


def test_a_stage_says_what_its_inputs_did(merged: Merge) -> None:
    _, front = merged(dict.fromkeys(("base", "math", "code"), SAID), STAGED)
    assert front["base_model"] == ["org/base", "org/math"]
    assert (front["license"], front["language"]) == ("apache-2.0", ["en", "no"])
