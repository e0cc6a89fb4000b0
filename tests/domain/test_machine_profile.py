"""What a machine's profile predicts, and what is read of one of another version."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.machine_profile import MachineProfile
from tests.support.profiles import PROFILE


@settings(max_examples=50, deadline=None)
@given(st.floats(1e6, 1e10), st.floats(0, 0.05))
def test_a_seek_is_as_long_as_reading_its_bytes(rate: float, seek_s: float) -> None:
    profile = MachineProfile(rate, seek_s, 1e9, "2025-01-01T00:00:00+00:00", "/f")
    assert profile.read_s(1, 0) == pytest.approx(
        profile.read_s(0, profile.seek_nbytes), abs=1 / rate
    )
    assert MachineProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_profile_with_an_engine_comes_back_as_it_was() -> None:
    assert MachineProfile.from_json(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE


@pytest.mark.parametrize("version", [None, 1, 3])
def test_a_profile_of_another_version_keeps_its_storage_and_loses_its_engine(
    version: int | None,
) -> None:
    stored = {**PROFILE.to_json(), "version": version, "engine": {"version": 1, "cores": "two"}}
    assert MachineProfile.from_json(stored) == replace(PROFILE, engine=None)


def test_a_profile_without_its_rates_is_no_profile() -> None:
    with pytest.raises(KeyError, match="seek_s"):
        MachineProfile.from_json({k: v for k, v in PROFILE.to_json().items() if k != "seek_s"})
