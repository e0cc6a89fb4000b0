"""What a storage profile predicts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.spec.storage_profile import StorageProfile


@settings(max_examples=50, deadline=None)
@given(st.floats(1e6, 1e10), st.floats(0, 0.05))
def test_a_seek_is_as_long_as_reading_its_bytes(rate: float, seek_s: float) -> None:
    profile = StorageProfile(rate, seek_s, 1e9, "2025-01-01T00:00:00+00:00", "/f")
    assert profile.read_s(1, 0) == pytest.approx(
        profile.read_s(0, profile.seek_nbytes), abs=1 / rate
    )
    assert StorageProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
