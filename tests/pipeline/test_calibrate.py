"""Calibration: a known storage is found again, a real file is measured, bad places are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.pipeline import calibrate as module
from mergepipe_pipeline.pipeline.calibrate import (
    MIN_NBYTES,
    REPEATS,
    SIZES,
    calibrate,
    fit,
    observe,
)
from mergepipe_pipeline.pipeline.trial import Trial
from mergepipe_pipeline.spec.checkpoint import Checkpoint, FileEntry
from mergepipe_pipeline.spec.engine_pace import MethodPace
from mergepipe_pipeline.storage.measure import ColdFile, write_s
from mergepipe_pipeline.storage.profile import load_profile
from mergepipe_pipeline.warehouse import Warehouse

SEEKS = st.floats(1e-5, 2e-2)
RATES = st.floats(5e7, 1e10)


@settings(max_examples=50, deadline=None)
@given(SEEKS, RATES)
def test_a_storage_without_noise_is_found_exactly(seek_s: float, rate: float) -> None:
    found = fit(tuple(observe(lambda s, n: len(s) * (seek_s + n / rate), 1 << 31)))
    assert found == pytest.approx((seek_s, rate), rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(SEEKS, RATES, st.integers(0, 99))
def test_a_noisy_storage_is_found_although_some_reads_are_disturbed(
    seek_s: float, rate: float, seed: int
) -> None:
    rng, calls = random.Random(seed), 0

    def read_s(starts: Sequence[int], nbytes: int) -> float:
        nonlocal calls
        calls += 1
        disturbed = 30 if calls % REPEATS in (1, 3) else 1
        return len(starts) * (seek_s + nbytes / rate) * rng.uniform(0.98, 1.02) * disturbed

    found_seek_s, found_rate = fit(tuple(observe(read_s, 1 << 31)))
    # What a seek costs is seen beside the bytes of the smallest read only.
    assert found_seek_s == pytest.approx(seek_s, rel=0.1, abs=0.1 * SIZES[0] / rate)
    # And the rate beside the seeks of the largest run only.
    assert found_rate == pytest.approx(rate, rel=0.15)


@settings(max_examples=50, deadline=None)
@given(st.integers(MIN_NBYTES, 1 << 40))
def test_reads_are_inside_the_file_and_never_twice_the_same_in_a_trial(file_nbytes: int) -> None:
    def read_s(starts: Sequence[int], nbytes: int) -> float:
        places = sorted(starts)
        assert places[0] >= 0
        assert places[-1] + nbytes <= file_nbytes
        assert all(b - a >= nbytes for a, b in pairwise(places))
        assert all(start % 4096 == 0 for start in starts)
        return 1.0

    found = tuple(observe(read_s, file_nbytes))
    assert found[-1].seeks == 1
    assert len({o.nbytes / o.seeks for o in found}) > 2


def test_a_storage_where_seeks_seem_to_cost_less_than_nothing_has_free_seeks() -> None:
    seek_s, rate = fit(
        tuple(observe(lambda s, n: len(s) * n / (1e9 if len(s) > 1 else 5e8), 1 << 30))
    )
    assert seek_s == 0
    assert 5e8 < rate < 1e9


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    monkeypatch.setattr(module, "RUN_NBYTES", 8 << 20)
    home = Warehouse.at(tmp_path / "home").ensure()
    probe = tmp_path / "probe"
    write_s(probe, 4096)
    try:
        with ColdFile(probe) as file:
            file.read_s([0], 4096)
    except MergePipeError:
        pytest.skip("this file system keeps files in memory")
    return home


def test_a_real_file_is_measured_and_remembered(home: Warehouse, tmp_path: Path) -> None:
    assert load_profile(home.profile_path) is None
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_s(folder / "model.safetensors", 16 << 20)
    done = calibrate(home, folder, temp_nbytes=8 << 20, with_engine=False)
    profile = done.profile
    assert profile.where == str(folder / "model.safetensors")
    assert 1e5 < profile.read_bytes_per_s < 1e12
    assert 1e5 < profile.write_bytes_per_s < 1e12
    assert 0 <= profile.seek_s < 1
    assert load_profile(home.profile_path) == profile
    assert list(home.staging.iterdir()) == []


def test_without_a_path_the_largest_registered_file_is_read_or_a_temporary_one(
    home: Warehouse, tmp_path: Path
) -> None:
    assert calibrate(home, temp_nbytes=8 << 20, with_engine=False).profile.where == str(home.root)
    files = []
    for name, nbytes in (("small", 8 << 20), ("large", 12 << 20)):
        (tmp_path / name).mkdir()
        write_s(tmp_path / name / "w", nbytes)
        files.append(FileEntry("w", nbytes, 0, "0" * 64, ""))
        Catalog(home.catalog).register(
            Checkpoint(name, str(tmp_path / name), (files[-1],), (), "{}"), None
        )
    done = calibrate(home, temp_nbytes=8 << 20, with_engine=False)
    assert done.profile.where == str(tmp_path / "large" / "w")
    assert list(home.staging.iterdir()) == []


@pytest.mark.parametrize("nbytes", [0, 3, 64 << 20])
def test_a_place_without_a_file_that_is_large_enough_and_no_hole_is_refused(
    home: Warehouse, tmp_path: Path, nbytes: int
) -> None:
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "w").open("wb") as file:
        file.truncate(nbytes)
    with pytest.raises(MergePipeError, match=r"no file to measure.*at least 4 MiB without holes"):
        calibrate(home, tmp_path / "model")
    assert load_profile(home.profile_path) is None


def test_a_damaged_profile_is_told_by_its_file(home: Warehouse) -> None:
    calibrate(home, temp_nbytes=8 << 20, with_engine=False)
    home.profile_path.write_bytes(home.profile_path.read_bytes().replace(b"T", b"t"))
    with pytest.raises(CorruptionError, match=r"profile\.json"):
        load_profile(home.profile_path)


def test_the_engine_is_measured_with_the_storage_and_remembered(
    home: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = MethodPace(0.1, 0.001, 0.0, 0.0, 1e-9, 1e-10)
    trial = Trial(2.0, 0.1, 2e-9, {"linear": pace})
    monkeypatch.setattr(module, "try_engine", lambda folder: trial)
    found = calibrate(home, temp_nbytes=16 << 20).profile.engine
    assert found is not None
    assert found.methods == {"linear": pace}
    assert (found.start_s, found.commit_s, found.analysis_elem_s) == (2.0, 0.1, 2e-9)
    for flow in (found.cold, found.past_cache, found.cached):
        assert 1e5 < flow.bytes_per_s < 1e12
        assert 0 <= flow.cpu_s_per_byte < 1e-6
    assert 1e7 < found.hash_bytes_per_s < 1e11
    profile = load_profile(home.profile_path)
    assert profile is not None
    assert profile.engine == found
