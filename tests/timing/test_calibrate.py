"""Calibration: a real file is measured and remembered, bad places are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.domain.checkpoint import Checkpoint, FileEntry
from mergepipe_pipeline.domain.machine_profile import MethodPace
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.storage.profile import load_profile
from mergepipe_pipeline.timing import calibrate as module
from mergepipe_pipeline.timing import storage_benchmark
from mergepipe_pipeline.timing.calibrate import calibrate
from mergepipe_pipeline.timing.engine_benchmark import EngineFigures
from mergepipe_pipeline.timing.storage_timers import ColdFile, write_s
from mergepipe_pipeline.warehouse import Warehouse

pytestmark = pytest.mark.usefixtures("durable_writes")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Warehouse:
    for room in (module, storage_benchmark):
        monkeypatch.setattr(room, "RUN_NBYTES", 8 << 20)
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
        home.catalog.register(Checkpoint(name, str(tmp_path / name), (files[-1],), (), "{}"), None)
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
    figures = EngineFigures(2.0, 0.001, {"linear": MethodPace(2e-9, 1e-9)})
    monkeypatch.setattr(module, "measure_engine", lambda folder: figures)
    found = calibrate(home, temp_nbytes=16 << 20).profile
    assert found.engine is not None
    assert found.engine.methods == figures.methods
    assert (found.engine.start_s, found.engine.plan_input_s) == (2.0, 0.001)
    assert 1e5 < found.engine.read_bytes_per_s < 1e12
    assert load_profile(home.profile_path) == found
