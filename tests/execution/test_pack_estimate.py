"""What a pack would take is told before it is made, about as it comes."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.domain.pack import Tier
from mergepipe_pipeline.execution.packing import PackEstimate, estimate_pack
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.open_models import open_pair
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse

#: All but L0, of which there is next to nothing.
TIERS: tuple[Tier, ...] = ("L1", "L2", "L3", "X20", "X")


def estimate(home: Warehouse) -> PackEstimate | None:
    """Of the family's second expert."""
    return estimate_pack(home, *open_pair(*map(Places(home).locate, ("expert_01", "base"))))


def analysed(home: Warehouse, family: Path) -> None:
    """Register the family's base and second expert, and analyse it."""
    register(home, family / "base", "base")
    register(home, family / "expert_01", "expert_01", "base")
    analyze(home, ["expert_01"])


def test_sizes_are_estimated_within_a_seventh_and_only_where_there_is_no_pack(
    home: Warehouse, family: Path
) -> None:
    analysed(home, family)
    told = estimate(home)
    assert told is not None
    (made,) = pack(home, ["expert_01"])
    for tier in TIERS:
        assert abs(told.tier_nbytes[tier] / made.tier_nbytes[tier] - 1) < 0.15
    assert told.pays_back_after
    assert estimate(home) is None


def test_check_tells_it_of_analysed_experts_alone(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(
        "merge_method: task_arithmetic\nbase_model: base\nparameters: {weight: 1}\n"
        "models: [{model: expert_01}]\n"
    )

    def run(*words: str) -> str:
        result = CliRunner().invoke(main, [*words, "--home", str(home.root)])
        assert result.exit_code == 0, result.output
        return result.stdout

    register(home, family / "base", "base")
    register(home, family / "expert_01", "expert_01", "base")
    assert "pack" not in run("check", str(recipe))
    analyze(home, ["expert_01"])
    assert "paid back after about" in run("check", str(recipe))
    pack(home, ["expert_01"])
    assert "would take about" not in run("check", str(recipe))
