"""The warehouse travels no further than the house promises, by a walk that counts as it says."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.lab.visits import PACKAGE, PROMISES, ROOT, House, walk

LOWER = """
    from mergepipe_pipeline.ground import touch

    class Shelf:
        def join(self, other):
            touch(self)

    def look(what):
        touch(what)
        return what
"""


def modules(root: Path, upper: str) -> list[str]:
    """The modules that `warehouse` of `act` enters, in a house of three rooms with this upper."""
    texts = {"ground": "def touch(what): pass", "lower": LOWER, "upper": upper}
    for name, text in texts.items():
        path = root / PACKAGE / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
    trip = walk(House.read(root), "upper:act", "warehouse")
    return [module.rpartition(".")[2] for module, _ in trip.stays]


@pytest.mark.parametrize(("function", "parameter", "most"), PROMISES)
def test_the_warehouse_travels_no_further_than_promised(
    function: str, parameter: str, most: tuple[int, int, int]
) -> None:
    trip = walk(House.read(ROOT), function, parameter)
    found = len(trip.stays), trip.climbs(), trip.returns()
    assert all(a <= b for a, b in zip(found, most, strict=True)), (found, most)


def test_a_method_is_entered_and_what_it_calls_in_turn(tmp_path: Path) -> None:
    upper = """
        from mergepipe_pipeline.lower import Shelf

        def act(warehouse):
            warehouse.shelf.join("a")
    """
    assert modules(tmp_path, upper) == ["upper", "lower", "ground"]


@pytest.mark.parametrize(
    "call", ["os.path.join(warehouse.root, 'a')", "', '.join(warehouse.names)"]
)
def test_what_others_have_is_no_method_of_the_house_by_the_same_name(
    tmp_path: Path, call: str
) -> None:
    assert modules(tmp_path, f"import os\n\ndef act(warehouse):\n    {call}\n") == ["upper"]


def test_what_a_comprehension_runs_over_is_entered_once(tmp_path: Path) -> None:
    upper = """
        from mergepipe_pipeline.ground import touch
        from mergepipe_pipeline.lower import look

        def act(warehouse):
            return [touch(thing) for thing in look(warehouse)]
    """
    assert modules(tmp_path, upper) == ["upper", "lower", "ground"]


def test_each_round_of_a_loop_begins_with_its_target(tmp_path: Path) -> None:
    upper = """
        from mergepipe_pipeline.ground import touch

        def act(warehouse):
            for thing in warehouse.things:
                touch(thing)
    """
    assert modules(tmp_path, upper) == ["upper", "ground"]
