"""Plans under a budget of blocks are the same on every machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mergepipe_pipeline.domain.machine_profile import MachineProfile
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.profile import store_profile
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import make_family
from tests.support.profiles import PROFILE

#: Bytes that are read in the time of a seek: 50 kB and 1.2 MB.
SSD = replace(PROFILE, read_bytes_per_s=5e8, seek_s=0.0001)
DISK = replace(PROFILE, read_bytes_per_s=1.5e8, seek_s=0.008)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_what_a_machine_is_measured_to_do_changes_no_plan_and_no_snapshot(
    tmp_path: Path, method: str
) -> None:
    family = make_family(tmp_path / "models", 3)
    rows = [
        f"- {{model: {family / f'expert_0{n}'}, parameters: {{weight: 0.5}}}}" for n in range(3)
    ]
    text = "\n".join(
        [f"merge_method: {method}", f"base_model: {family / 'base'}", "models:", *rows]
    )
    parsed = parse(text, name="machines", where="machines")

    def ids(profile: MachineProfile | None) -> tuple[str, str, int]:
        home = Warehouse.at(tmp_path / str(profile and profile.seek_s)).ensure()
        if profile:
            store_profile(home.profile_path, profile)
        plan = make_plan(home, parsed, budget="30%", block_elems=4096)
        snapshot = run_plan(home, plan).snapshot
        return plan.plan_id, snapshot.snapshot_id, plan.estimates.expert_bytes_planned

    assert ids(None) == ids(SSD) == ids(DISK)
