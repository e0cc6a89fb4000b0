"""An error on a terminal: the cause first, every other part on a line of its own."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import MergePipeError, RecipeError


def test_the_cause_comes_first_then_where_expected_found_and_next() -> None:
    error = MergePipeError("It broke.", where="here", expected="a", found="b", next_step="look")
    assert error.for_terminal().splitlines() == [
        "It broke",
        "  where     here",
        "  expected  a",
        "  found     b",
        "  next      look",
    ]
    assert MergePipeError("It broke", found="b").for_terminal() == "It broke\n  found     b"


def test_problems_of_a_recipe_are_numbered_between_the_cause_and_the_next_step() -> None:
    error = RecipeError("Two problems", problems=("a", "b"), where="r.yml", next_step="mend both")
    assert error.for_terminal().splitlines() == [
        "Two problems",
        "  where     r.yml",
        "  1. a",
        "  2. b",
        "  next      mend both",
    ]


@given(st.text("ab\n :.", max_size=20), st.text("ab\n :.", max_size=20))
def test_no_text_from_outside_looks_like_a_line_of_the_message(what: str, found: str) -> None:
    shown = MergePipeError(f"It broke: {what}", found=f"x{found}", where="here").for_terminal()
    own = [line for line in shown.splitlines() if not line.startswith(" " * 12)]
    assert [line.split()[0] for line in own] == ["It", "where", "found"]


def test_the_command_line_prints_the_lines_and_json_the_parts(tmp_path: Path) -> None:
    words = ["history", "nothing", "--home", str(tmp_path / "w")]
    text, machine = (CliRunner().invoke(main, [*words, *more]) for more in ([], ["--json"]))
    cause, *rest = text.stderr.splitlines()
    parts = json.loads(machine.stdout)["error"]
    assert cause == f"error: {parts['what'].rstrip('.')}"
    assert {line.split()[0] for line in rest} == {
        name.removesuffix("_step") for name in parts.keys() - {"class", "what"}
    }
    assert text.exit_code == machine.exit_code == 17
