"""The report says what the rows say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.bench.measure import Measurement
from tests.lab.bench.report import ratios, report, spread, table
from tests.lab.bench.rows import Needed, Row, Setting, Spent, append, load

HERE = Setting("0123456789ab", "a CPU", 2, 24 << 30, "ext4", "6.0", "some-family")


def row(who: str, wall: float, turn: int = 0, case: str = "ties", k: int = 2) -> Row:
    cost = Measurement(
        wall_s=wall,
        cpu_s=2 * wall,
        sync_s=0.0,
        anon_nbytes=300 << 20,
        rss_nbytes=500 << 20,
        storage_read_nbytes=1_210_000_000,
        storage_write_nbytes=0,
        device_read_nbytes=None,
        device_write_nbytes=None,
        exit_code=0,
        stopped=None,
    )
    needed = Needed(1_000_000_000, 200_000_000, 1_000_000_000)
    return Row(case, k, who, turn, needed, cost, 0.5, "2026-01-01T00:00:00Z", HERE)


def stopped(found: Row, why: str) -> Row:
    return replace(found, cost=replace(found.cost, stopped=why))


ROWS = [
    row("ours", 9.0, 0),
    row("limit", 3.0, 0),
    row("mergekit", 90.0, 0),
    row("limit", 1.0, 1),
    row("cat", 6.0, 1),
    row("ours", 2.0, 1),
    row("ours", 5.0, 0, "ties-one-shot"),
    row("limit", 4.0, 0, "ties-one-shot"),
    row("ours", 4.0, 0, "ties-10%", 5),
]


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    for each in ROWS:
        append(tmp_path / "rows.jsonl", each)
    told = replace(ROWS[0], spent=Spent(1, 2, 3, 4, 5))
    append(tmp_path / "rows.jsonl", told)
    assert load(tmp_path / "rows.jsonl") == [*ROWS, told]


def test_ratios_are_of_runs_in_the_same_round() -> None:
    ours = [row("ours", 9.0, 0), row("ours", 2.0, 1), row("ours", 7.0, 2)]
    assert ratios(ours, [row("limit", 1.0, 1), row("limit", 3.0, 0)]) == [3.0, 2.0]


def test_runs_that_were_ended_give_no_ratio() -> None:
    assert ratios([row("ours", 2.0)], [stopped(row("limit", 1.0), "memory")]) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "–"), ([1.234], "1.23"), ([3.0, 1.0, 1.5], "1.00 / 1.50 / 3.00")],
)
def test_a_spread_is_min_median_and_max(values: list[float], text: str) -> None:
    assert spread(values) == text


def test_a_row_of_the_table_has_times_ratios_memory_and_bytes() -> None:
    assert table(ROWS).splitlines()[2:] == [
        "| ties | 2 | 2.00 / 5.50 / 9.00 | 1.00 / 2.00 / 3.00 | 6.00 | 2.00 / 2.50 / 3.00 "
        "| 90.00 | 300 / 300 / 300 | 300 | 1.050 / 1.050 / 1.050 |",
        "| ties-one-shot | 2 | 5.00 | 4.00 | – | 1.25 | 90.00 | 300 | 300 | 1.050 |",
        "| ties-10% | 5 | 4.00 | – | – | – | – | 300 | – | 1.050 |",
    ]


def test_a_run_that_was_ended_says_so() -> None:
    found = table([row("ours", 9.0), stopped(row("mergekit", 900.4), "timeout")])
    assert "| ended after 900 (timeout) |" in found


def test_each_commit_has_its_table_with_the_machine() -> None:
    other = [replace(r, setting=replace(HERE, commit="ba9876543210")) for r in ROWS]
    text = report([*ROWS, *other])
    assert text.index("some-family at 0123456789ab") < text.index("some-family at ba9876543210")
    assert text.count("2 cores (a CPU), 24 GiB, ext4, Linux 6.0.") == 2
    assert text.count(table(ROWS)) == 2
