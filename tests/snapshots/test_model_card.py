"""The model card shows names letter by letter, whatever they hold."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.domain.snapshot import LineageEntry
from mergepipe_pipeline.snapshots.model_folder import model_card


def _row(name: str) -> str:
    card = model_card("ties", "p" * 64, [LineageEntry("expert", name, "c" * 64)], [("ties", "", 3)])
    rows = [line for line in card.decode().splitlines() if line.startswith("| expert ")]
    assert len(rows) == 1
    assert card.decode().count("\n# ") == 1
    return rows[0]


def test_a_common_name_stands_as_it_is() -> None:
    assert _row("math_v2.1-chat") == f"| expert | math_v2.1-chat | `{'c' * 16}` |"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a | b", r"a \| b"),
        ("a`\n# Licence: all yours", r"a\`\\n# Licence: all yours"),
        ("[x](https://evil.example)", r"\[x\](https:\//evil.example)"),
        ("<img src=x>", r"\<img src=x\>"),
        ("a\u202eb\x1b[2J\udcff", r"a\\u202eb\\x1b\[2J\\udcff"),
    ],
)
def test_a_name_neither_ends_its_cell_nor_links_nor_steers(name: str, shown: str) -> None:
    assert _row(name) == f"| expert | {shown} | `{'c' * 16}` |"
