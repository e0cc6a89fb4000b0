"""The tables of packs are of real merges, and their figures are what the merges gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.bench.bench_packs import SUM, TIES, table
from tests.lab.bench.family import cached_family
from tests.lab.bench.pack_cells import Cell, cells, least_exact, packed_home


def test_levels_err_less_than_blocks_for_the_same_bytes_and_all_levels_are_exact(
    tmp_path: Path,
) -> None:
    family = cached_family(tmp_path, "tiny", 2).resolve()
    base, experts = family / "base", tuple(sorted(family.glob("expert_*")))
    with packed_home(tmp_path / "home", base, experts) as home:
        found = {(c.budget, c.source): c for c in cells(home, SUM, base, experts, ("70%", "25%"))}
        least = least_exact(home, TIES, base, experts)
    assert found["70%", "packs"].error == 0.0
    assert 0.0 < found["25%", "packs"].error < 0.5 * found["25%", "blocks"].error
    assert all(c.nbytes_share <= float(c.budget.rstrip("%")) / 100 for c in found.values())
    assert found["70%", "packs"].nbytes_share < 0.7 < 1.0 == found["100%", "full"].nbytes_share
    assert 5 < least < 30


def test_skill_is_shown_in_points_or_of_what_the_full_merge_gains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = Cell("sum", "100%", "full", 0.0, 0.0, 0.0, 1.0, 0.8)
    part = Cell("sum", "25%", "packs", 0.1, None, None, 0.25, 0.6)
    table([full, part], relative=True)
    table([full, part], relative=False)
    shown = [line for line in capsys.readouterr().out.splitlines() if "| packs |" in line]
    assert [line.split("|")[-2].strip() for line in shown] == ["75.0%", "60.0"]
