"""A machine whose figures are easy to reckon with."""

from __future__ import annotations

from mergepipe_pipeline.domain.machine_profile import EnginePace, MachineProfile, MethodPace
from mergepipe_pipeline.storage.profile import store_profile
from mergepipe_pipeline.warehouse import Warehouse

GB = 10**9
ENGINE = EnginePace(
    cores=2,
    read_bytes_per_s=GB,
    start_s=3.0,
    plan_input_s=0.002,
    methods={"ties": MethodPace(learn_byte_s=4 / GB, merge_elem_s=1 / GB)},
)
PROFILE = MachineProfile(GB, 0.001, GB / 2, "2025-01-01T00:00:00+00:00", "/f", ENGINE)


def settle_in(home: Warehouse) -> None:
    """Let a warehouse be on this machine."""
    store_profile(home.profile_path, PROFILE)
