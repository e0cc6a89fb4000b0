"""The table of differences to mergekit in docs and the tests that show them do not drift apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.parity.deviations import DEVIATIONS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "mergekit.md"


def rows() -> list[list[str]]:
    """The cells of the table, without its head."""
    after = PAGE.read_text().partition("| where | mergekit 0.1.5 | here |\n")[2]
    table = after.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_every_row_of_the_table_has_its_tests_and_no_test_is_without_a_row() -> None:
    assert [row[0] for row in rows()] == list(DEVIATIONS)
    assert {len(row) for row in rows()} == {3}


@pytest.mark.parametrize("title", DEVIATIONS)
def test_the_tests_of_a_row_exist(title: str) -> None:
    for node in DEVIATIONS[title]:
        file, _, name = node.partition("::")
        tree = ast.parse((HERE / file).read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, node
