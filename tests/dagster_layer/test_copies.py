"""Recipes of a project in a warehouse: written, taken out, edited by hand; where paths start."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mergepipe_pipeline.dagster import (
    build_housekeeping,
    build_inbox_defs,
    build_recipe_defs,
    build_search_defs,
)
from mergepipe_pipeline.deploy import copies
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.errors import EvaluationError, RecipeError
from mergepipe_pipeline.resolution.origins import folder_of
from mergepipe_pipeline.verbs.gate import refuse_unready
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.guests import repository_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

ONE = "merge_method: linear\nmodels:\n  - {model: math, parameters: {weight: 1}}\n"
MEASURED = ONE + "evaluate: {command: [python, eval.py]}\n"


class Location:
    """A code location over a warehouse, whose process begins anew with each `load`."""

    def __init__(self, home: Warehouse, name: str, patch: pytest.MonkeyPatch) -> None:
        self.home, self.name, self._patch = home, name, patch
        self.process: dict[str, Any] = {}

    def load(self, *parts: Callable[[], dg.Definitions] | copies.Source) -> None:
        """Load definitions in a new process."""
        self.process = {"_WRITTEN": {}, "_READ": {}, "_SETTLED": set()}
        self._enter()
        built = [
            part() if callable(part) else build_recipe_defs(part, home=self.root) for part in parts
        ]
        house = build_housekeeping(home=self.root, reload=True)
        self.defs = dg.Definitions.merge(build_inbox_defs(home=self.root), house, *built)

    @property
    def root(self) -> Path:
        return self.home.root

    def tick(self, sensor: str = "inbox_sensor") -> str:
        """Evaluate a sensor in that process; why it asks for nothing."""
        self._enter()
        repository = self.defs.get_repository_def()
        with (
            dg.DagsterInstance.ephemeral() as instance,
            dg.build_sensor_context(
                instance=instance,
                repository_def=repository,
                resources=repository.get_top_level_resources(),
            ) as context,
        ):
            made = repository_of(self.name).code_location_origin
            context._code_location_origin = made
            found: Any = repository.get_sensor_def(f"mergepipe_{sensor}")(context)
        said = found if isinstance(found, dg.SkipReason) else found.skip_reason
        return str(said.skip_message)

    def _enter(self) -> None:
        for name, value in self.process.items():
            self._patch.setattr(copies, name, value)


@pytest.fixture
def shop(home: Warehouse, monkeypatch: pytest.MonkeyPatch) -> Location:
    """A location over the warehouse."""
    return Location(home, "shop", monkeypatch)


def names(home: Warehouse) -> list[str]:
    """What a warehouse would merge."""
    return [file.name for file in recipe_files(home)]


def test_a_recipe_that_is_taken_out_leaves_the_warehouse_and_that_of_a_person_stays(
    shop: Location, home: Warehouse, tmp_path: Path
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.yml").write_text(ONE)
    home.recipe_path("person").write_text(ONE)
    texts = {"c": ONE, "d": ONE}
    several = partial(build_recipe_defs, texts, home=home.root, name="texts")
    shop.load(folder, several, {"e": ONE})
    shop.tick()
    (folder / "b.yml").unlink()
    shop.load(folder, {"c": ONE})
    assert names(home) == ["a", "b", "c", "d", "e", "person"]  # not all may be loaded yet
    shop.tick()
    assert names(home) == ["a", "c", "person"]
    shop.load()
    shop.tick("orphans_sensor")
    assert names(home) == ["person"]


def test_a_search_that_is_taken_out_leaves_the_warehouse(shop: Location, home: Warehouse) -> None:
    texts = {"s": "- no search\n", "t": "- no search\n"}
    shop.load(partial(build_search_defs, texts, home=home.root))
    shop.tick()
    del texts["s"]
    shop.load(partial(build_search_defs, texts, home=home.root))
    shop.tick()
    assert [path.name for path in home.searches.glob("*.yml")] == ["t.yml"]


def test_what_another_location_asks_for_stays(
    shop: Location, home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Location(home, "other", monkeypatch)
    shop.load({"a": ONE}, {"b": ONE}, {"c": ONE})
    shop.tick()
    other.load({"b": ONE}, {"c": ONE})
    other.tick()
    shop.load({"a": ONE})
    shop.tick()
    assert names(home) == ["a", "b", "c"]
    # One that moves, and whose new location has not ticked yet when the old one does.
    other.load({"a": ONE}, {"b": ONE})
    shop.load()
    shop.tick()
    assert names(home) == ["b", "c"]
    other.tick()
    assert names(home) == ["a", "b"]


def test_a_copy_that_was_edited_by_hand_is_not_lost(
    shop: Location, home: Warehouse, caplog: pytest.LogCaptureFixture
) -> None:
    shop.load({"a": ONE}, {"b": ONE})
    shop.tick()
    for name in ("a", "b"):
        home.recipe_path(name).write_text(ONE + "seed: 7\n")
    shop.load({"a": ONE})
    shop.tick()
    (kept,) = home.recipes.glob("a.yml.*.edited")
    assert (home.recipe_path("a").read_text(), kept.read_text()) == (ONE, ONE + "seed: 7\n")
    assert str(kept) in caplog.text
    assert home.recipe_path("b").read_text() == ONE + "seed: 7\n"
    assert names(home) == ["a", "b"]


def test_a_recipe_of_a_person_is_not_written_over(shop: Location, home: Warehouse) -> None:
    home.recipe_path("a").write_text(ONE + "seed: 7\n")
    with pytest.raises(RecipeError, match=r"that no project wrote.*Next: rename the project's"):
        shop.load({"a": ONE})
    assert home.recipe_path("a").read_text() == ONE + "seed: 7\n"
    home.recipe_path("a").write_text(ONE)
    shop.load({"a": ONE})
    shop.load({"a": ONE + "seed: 1\n"})  # it was edited in the project
    assert home.recipe_path("a").read_text() == ONE + "seed: 1\n"


def test_paths_of_evaluators_start_where_a_recipe_comes_from(
    shop: Location, home: Warehouse, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
        (folder / "eval.py").touch()
        (folder / f"{folder.name}.yml").write_text(MEASURED)
    measured = {"text": MEASURED}
    text = partial(build_recipe_defs, measured, home=home.root, relative_to=folders[2])
    shop.load(folders[0], str(folders[1] / "two.yml"), text, {"nowhere": MEASURED})
    found = {file.name: file for file in recipe_files(home)}
    starts = {name: file.folder for name, file in found.items()}
    assert starts == {
        "one": folders[0],
        "two": folders[1],
        "text": folders[2],
        "nowhere": home.recipes,
    }
    for name in ("one", "two", "text"):
        assert found[name].parsed is not None
        refuse_unready(found[name].recipe.evaluator, starts[name])
        assert folder_of(home.recipe_path(name)) == starts[name]
    with pytest.raises(EvaluationError, match="Expected a file beside the recipe, or its whole"):
        refuse_unready(found["nowhere"].recipe.evaluator, starts["nowhere"])
    home.recipe_path("one").write_text(ONE)  # a person's now
    assert folder_of(home.recipe_path("one")) == home.recipes


def test_the_reload_sensor_of_a_guest_asks_where_a_file_changed_came_or_went(
    shop: Location, tmp_path: Path
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    single = tmp_path / "single.yml"
    for path in (single, folder / "a.yml"):
        path.write_text(ONE)

    def said() -> str:
        said = shop.tick("reload_sensor")
        shop.load(folder, single, {"t": ONE})
        return said.partition(";")[0]

    shop.load(folder, single, {"t": ONE})
    for change in (
        lambda: single.write_text(ONE + "seed: 1\n"),
        lambda: (folder / "b.yml").write_text(ONE),
        lambda: (folder / "a.yml").unlink(),
    ):
        assert shop.tick("reload_sensor") == "recipes are loaded as they are"
        change()
        assert said() == "recipes changed"
    (folder / "no name.yml").write_text(ONE)
    with pytest.raises(RecipeError, match="found 'no name'"):  # it would not load
        shop.tick("reload_sensor")
