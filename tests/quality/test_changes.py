"""What differs from the live snapshot is told with a refusal."""

from __future__ import annotations

import re

from mergepipe_pipeline.verbs.gate import refusal
from tests.quality.world import World


def test_a_refusal_says_which_experts_and_layers_changed_since_the_live_snapshot(
    world: World,
) -> None:
    world.write(experts=("a", "b", "e"))
    assert world.becomes(e=1.0, b=(1.0, {"layer_2": 9.0})) is not None
    found = refusal(world.home, "mix")
    assert found is not None
    summary = re.sub(r"version \d+", "version N", found.summary)
    assert (
        "since the live snapshot b changed from version N to version N; e came (version N); "
        "c went; d went; the recipe says something else; 6 of 6 layers differ"
    ) in summary
