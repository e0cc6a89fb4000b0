"""A machine whose figures are easy to reckon with."""

from __future__ import annotations

from mergepipe_pipeline.spec.engine_pace import EnginePace, Flow, MethodPace
from mergepipe_pipeline.spec.storage_profile import StorageProfile
from mergepipe_pipeline.storage.profile import store_profile
from mergepipe_pipeline.warehouse import Warehouse

GB = 10**9
ENGINE = EnginePace(
    cores=2,
    threads=3,
    cold=Flow(GB, 0.5 / GB),
    past_cache=Flow(2 * GB, 0.25 / GB),
    cached=Flow(8 * GB, 0.125 / GB),
    hash_bytes_per_s=2 * GB,
    start_s=3.0,
    commit_s=0.25,
    analysis_elem_s=4 / GB,
    methods={"ties": MethodPace(0.5, 0.001, 0.002, 2 / GB, 2 / GB, 1 / GB)},
)
PROFILE = StorageProfile(GB, 0.001, GB / 2, "2025-01-01T00:00:00+00:00", "/f", ENGINE)


def settle_in(home: Warehouse) -> None:
    """Let a warehouse be on this machine."""
    store_profile(home.profile_path, PROFILE)
