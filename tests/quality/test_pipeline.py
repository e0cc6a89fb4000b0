"""A version that is made worse never reaches the live ref, and the one that mends it does."""

from __future__ import annotations

import dagster as dg
import pytest

from mergepipe_pipeline.facts.quarantine import quarantine_of
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.deploy import current_snapshot
from tests.quality.world import World

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def test_the_pipeline_refuses_traces_quarantines_and_releases_the_mended_version_by_itself(
    world: World,
) -> None:
    home = world.home
    with dg.DagsterInstance.ephemeral() as instance:
        ticker = Ticker(home, instance)

        def jobs() -> list[str]:
            """What a tick runs, with a mark for what fails."""
            return [run["job"] + "!" * (not run["success"]) for run in ticker.tick()]

        world.write("{distance: {max: 0.7}, on_failure: bisect}")
        world.run()
        good = home.refs.current("mix")

        world.index("a", 1.1)
        world.index("c", 1.0, layer_3=9.0)
        assert jobs() == ["merge_mix!", "bisect_mix"]
        refused = current_snapshot(home, "mix").snapshot_id
        assert home.refs.current("mix") == good
        kept_out = quarantine_of(home, "c")
        assert kept_out is not None
        assert "distance is 2" in kept_out.reason
        assert "c is the suspect" in kept_out.reason
        assert jobs() == []
        assert any("mix: c is quarantined since " in reason for reason in ticker.reasons())

        world.land("c", 1.2)
        assert jobs() == ["index_experts", "merge_mix"]
        assert home.refs.current("mix").number == good.number + 1
        assert home.refs.current("mix").snapshot_id != refused
        assert jobs() == []
    world.forget()
