"""Contenders are asked for the same merge, in turn, on the same files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.bench.bench_merge import Arena, rounds, schedule
from tests.lab.bench.cases import CASES, Family, physical_limit, write_recipe
from tests.lab.bench.family import cached_family
from tests.lab.bench.rows import Needed, filesystem

pytestmark = pytest.mark.usefixtures("durable_writes")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = cached_family(tmp_path_factory.mktemp("families"), "tiny", 2)
    if filesystem(folder).startswith(("tmpfs", "ramfs")):
        pytest.skip("temporary files are in memory")
    return folder


def test_who_was_last_is_first_in_the_next_round() -> None:
    turns = [(turn, who) for turn, _, _, who in schedule([CASES["ties"]], [2], 2, 0)]
    whos = ["ours", "limit", "cat"]
    assert turns == [*((0, who) for who in whos), *((1, who) for who in whos[::-1])]


def test_mergekit_runs_once_for_cases_that_are_one_to_it_and_never_for_budgets() -> None:
    found = Counter(
        (turn, k, c.name)
        for turn, k, c, who in schedule(list(CASES.values()), [2, 5], 3, 1)
        if who == "mergekit"
    )
    names = ("linear", "task_arithmetic", "ties", "dare_ties")
    assert found == Counter((0, k, name) for k in (2, 5) for name in names)


@given(base=st.integers(0, 2_000_000), experts=st.integers(0, 5_000_000))
def test_the_limit_reads_and_writes_exactly_what_is_needed(
    tiny: Path, base: int, experts: int
) -> None:
    needed, family = Needed(base, experts, 7), Family.at(tiny, 2)
    command = physical_limit(needed, family, Path("out"), direct=False)
    past_cache = physical_limit(needed, family, Path("out"), direct=True)
    assert [word for word in past_cache if word != "--direct"] == command
    split = command.index("--write")
    reads = [word.rpartition(":") for word in command[command.index("--read") + 1 : split]]
    assert sum(int(nbytes) for _, _, nbytes in reads) == base + experts
    assert all(0 < int(nbytes) <= Path(file).stat().st_size for file, _, nbytes in reads)
    assert command[split + 1 :] == ["out:7"]


def test_a_family_with_too_few_experts_is_refused(tiny: Path) -> None:
    with pytest.raises(SystemExit, match="2 of 3 experts"):
        Family.at(tiny, 3)


def test_linear_has_no_base_and_the_others_have(tiny: Path, tmp_path: Path) -> None:
    for case in CASES.values():
        recipe = yaml.safe_load(write_recipe(case, Family.at(tiny, 2), tmp_path).read_text())
        assert ("base_model" in recipe) == case.based == (case.name != "linear")
        assert len(recipe["models"]) == 2


def test_a_merge_under_a_budget_is_measured_against_the_limit(tiny: Path, tmp_path: Path) -> None:
    arena = Arena(tiny, tiny, tmp_path.resolve(), timeout_s=60, fills_memory=False)
    cat, limit, ours = sorted(
        rounds(arena, [CASES["task_arithmetic-10%"]], [2], 1, 0), key=lambda row: row.who
    )
    base_nbytes = sum(t.stat().st_size for t in (tiny / "base").glob("*.safetensors"))
    assert 0.98 * base_nbytes < ours.needed.base_nbytes <= base_nbytes
    assert 0.05 < ours.needed.expert_nbytes / (2 * base_nbytes) <= 0.1
    assert ours.cost.stopped is None
    assert ours.cost.wall_s > limit.cost.wall_s > 0
    assert ours.cost.anon_nbytes > 30 << 20
    assert ours.cost.storage_read_nbytes >= ours.needed.base_nbytes
    needed = limit.needed.base_nbytes + limit.needed.expert_nbytes
    # Beside it, what the system reads for it: pages of the program that memory does not hold. An
    # expert read whole would be more.
    for bare in (cat, limit):
        assert needed <= bare.cost.storage_read_nbytes < needed + (1 << 20) < needed + base_nbytes
    assert ours.setting == limit.setting
    assert [p.name for p in tmp_path.iterdir() if p.name == "scratch"] == []
