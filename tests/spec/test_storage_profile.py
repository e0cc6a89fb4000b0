"""What a storage profile predicts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.spec.storage_profile import StorageProfile
from tests.paces import PROFILE


@settings(max_examples=50, deadline=None)
@given(st.floats(1e6, 1e10), st.floats(0, 0.05))
def test_a_seek_is_as_long_as_reading_its_bytes(rate: float, seek_s: float) -> None:
    profile = StorageProfile(rate, seek_s, 1e9, "2025-01-01T00:00:00+00:00", "/f")
    assert profile.read_s(1, 0) == pytest.approx(
        profile.read_s(0, profile.seek_nbytes), abs=1 / rate
    )
    assert StorageProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_profile_with_an_engine_comes_back_as_it_was() -> None:
    assert StorageProfile.from_json(json.loads(json.dumps(PROFILE.to_json()))) == PROFILE


def test_a_profile_that_knew_no_engine_or_another_one_is_not_calibrated_for_time() -> None:
    stored = json.loads(json.dumps(PROFILE.to_json()))
    older = {k: v for k, v in stored.items() if k != "engine"}
    other = {**stored, "engine": {"version": 0, "cores": "two"}}
    for value in (older, other):
        assert StorageProfile.from_json(value) == replace(PROFILE, engine=None)
