"""Only regular files are opened, where they may lie, and whatever else is there does not block."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.remote.address import cached_model
from mergepipe_pipeline.storage.regular import open_regular, places_of, read_small
from mergepipe_pipeline.storage.source import LocalSource
from tests.hostile.corpus import CONFIG, MODEL, ONE, TWO, write_full, write_map, write_sharded

COMMIT = "0123abc"


def hub_snapshot(cache: Path) -> Path:
    """A model as the hub's cache has it: links from the snapshot into the repository's blobs."""
    repo = cache / "models--org--m"
    plain, snapshot, blobs = write_full(repo / "plain"), repo / "snapshots" / COMMIT, repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, file in enumerate(sorted(plain.iterdir())):
        file.rename(blobs / str(n))
        (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    plain.rmdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_snapshot(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cached_model("org/m") == snapshot
    assert open_checkpoint(str(snapshot), "m").config == '{"model_type": "x"}'
    (tmp_path / "linked").symlink_to(snapshot)
    assert open_checkpoint(str(tmp_path / "linked"), "m").config == '{"model_type": "x"}'


@pytest.mark.parametrize("target", ["../../../models--other/blobs/0", "../../refs/main", "../0"])
def test_a_snapshot_s_link_may_lead_into_the_blobs_of_its_own_repository_alone(
    tmp_path: Path, target: str
) -> None:
    snapshot = hub_snapshot(tmp_path)
    place = snapshot / target
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("{}")
    (snapshot / CONFIG).unlink()
    (snapshot / CONFIG).symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"link leaves its checkpoint.*{CONFIG}.*link to /"):
        open_checkpoint(str(snapshot), "m")


def test_a_folder_called_blobs_elsewhere_is_no_hub_cache(tmp_path: Path) -> None:
    folder = write_full(tmp_path / "snapshots" / "m")
    (tmp_path / "blobs").mkdir()
    (folder / CONFIG).rename(tmp_path / "blobs" / "0")
    (folder / CONFIG).symlink_to("../../blobs/0")
    with pytest.raises(CheckpointError, match=rf"{CONFIG}.*link to {tmp_path}/blobs/0"):
        open_checkpoint(str(folder), "m")


@pytest.mark.parametrize("damage", [b"../../..", b"", b"\xff\xfe", bytes(9000)])
def test_a_damaged_ref_of_the_hub_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    hub_snapshot(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--m" / "refs" / "main").write_bytes(damage)
    with pytest.raises(CheckpointError, match="refs/main"):
        cached_model("org/m")


def test_the_folder_itself_may_be_named_through_a_link_and_links_may_stay_inside(
    tmp_path: Path,
) -> None:
    folder = write_sharded(tmp_path / "m")
    (folder / "sub").mkdir()
    (folder / TWO).rename(folder / "sub" / TWO)
    (folder / "also").symlink_to("sub")
    (folder / CONFIG).rename(folder / "other.json")
    (folder / CONFIG).symlink_to("other.json")
    write_map(folder, {"model.norm.weight": ONE, "lm_head.weight": f"also/{TWO}"})
    (tmp_path / "linked").symlink_to("m")
    assert len(open_checkpoint(str(tmp_path / "linked"), "m").tensors) == 2


def test_a_single_file_may_be_named_through_a_link(tmp_path: Path) -> None:
    write_full(tmp_path / "m")
    (tmp_path / "w.safetensors").symlink_to(tmp_path / "m" / MODEL)
    assert len(open_checkpoint(str(tmp_path / "w.safetensors"), "m").tensors) == 1


def test_a_file_that_becomes_a_link_after_the_check_is_not_followed(tmp_path: Path) -> None:
    folder = write_full(tmp_path / "m")
    (tmp_path / "secret").write_text("secret")
    with LocalSource(folder) as source:
        assert source.size(CONFIG)
        (folder / CONFIG).unlink()
        (folder / CONFIG).symlink_to("../secret")
        with pytest.raises(CheckpointError, match=r"link leaves its checkpoint.*secret"):
            source.read_range(CONFIG, 0, 6)


def test_a_folder_that_becomes_a_link_after_the_check_is_not_followed(tmp_path: Path) -> None:
    folder = write_full(tmp_path / "m")
    with LocalSource(folder) as source:
        folder.rename(tmp_path / "before")
        (tmp_path / "private").mkdir()
        (tmp_path / "private" / CONFIG).write_text("secret")
        folder.symlink_to("private")
        with pytest.raises(CheckpointError, match="link leaves its checkpoint"):
            source.read_range(CONFIG, 0, 6)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a folder"),
        (lambda p: p.symlink_to("/dev/zero"), "a device"),
    ],
)
def test_what_is_no_regular_file_is_named_and_never_opened(
    tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=rf"no regular file.*/x.*found a.*{kind[2:]}"):
        read_small(tmp_path / "x", 10)
    with pytest.raises(CheckpointError):
        open_regular(tmp_path / "x", places_of(tmp_path))


def test_a_small_file_is_read_whole_or_refused_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    assert read_small(tmp_path / "x", 10) == b"0123456789"
    with pytest.raises(CheckpointError, match="at most 9 bytes, found 10 bytes"):
        read_small(tmp_path / "x", 9)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["register", "m"], CONFIG),
        (["merge", "r.yml"], "a FIFO"),
        (["check", "/dev/zero"], "a device"),
        (["register", "/dev/zero"], "neither a folder nor a file"),
    ],
    ids=["config", "recipe", "device as a recipe", "device as a model"],
)
def test_a_process_that_meets_a_fifo_or_a_device_answers(
    tmp_path: Path, words: list[str], found: str
) -> None:
    folder = write_full(tmp_path / "m")
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)
    os.mkfifo(tmp_path / "r.yml")
    done = subprocess.run(
        [sys.executable, "-m", "mergepipe_pipeline.cli.main", *words, "--home", "home"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (11, 12)
    assert found in done.stderr
    assert "Traceback" not in done.stderr
