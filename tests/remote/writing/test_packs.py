"""Packs travel: who has the base merges from tiers that another machine pushed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner
from huggingface_hub import HfApi

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.facts.test_input_segments import flip
from tests.packs.families import packed_family, write_family
from tests.packs.test_offline import ids_of, merged, text_of
from tests.packs.test_replace import files_in
from tests.remote.writing.hub_writes import Hub
from tests.remote.writing.watched_s3 import WatchedS3


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts; read-only."""
    folder = tmp_path_factory.mktemp("files")
    write_family(folder)
    return folder


@pytest.fixture(scope="module")
def here(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """The machine where the experts were packed."""
    return packed_family(tmp_path_factory.mktemp("here"), family)


@pytest.fixture
def there(family: Path, tmp_path: Path) -> Warehouse:
    """Another machine, which has the base under another name."""
    warehouse = Warehouse.at(tmp_path / "there").ensure()
    shutil.copytree(family / "base", tmp_path / "foundation")
    register(warehouse, tmp_path / "foundation", "foundation")
    return warehouse


def _run(home: Warehouse, *words: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*words, "--home", str(home.root), "--json"])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_an_expert_is_merged_from_tiers_that_another_machine_pushed_and_made_again_from_them(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str, family: Path, tmp_path: Path
) -> None:
    to = f"s3://{bucket}/experts"
    for name in ("e0", "e1"):
        sent = _run(here, "push", "--pack", name, to)
        assert sent["sent_nbytes"] == sent["nbytes"]
    s3.clear()
    assert _run(here, "push", "--pack", "e0", to)["sent_files"] == []
    assert s3.puts() == []
    came = _run(there, "pull-pack", to, "--base", "foundation")
    assert [(p["name"], p["base"], p["fresh"]) for p in came] == [
        ("e0", "foundation", True),
        ("e1", "foundation", True),
    ]
    assert [p["fresh"] for p in _run(there, "pull-pack", to, "--base", "foundation")] == [False] * 2
    for method, budget in (("ties", None), ("ties", "25%"), ("task_arithmetic", "40%")):
        text = text_of(method)
        of_files = merged(here, text, budget=budget)
        of_tiers = merged(there, text.replace(": base", ": foundation"), budget=budget)
        assert ids_of(of_tiers)[2] == ids_of(of_files)[2]
        planned = of_tiers.plan.estimates.expert_bytes_planned
        assert of_tiers.realised.expert_bytes_read == planned
    assert verify_all(there).ok
    unpack(there, "e0", tmp_path / "again")
    assert _bytes_in(tmp_path / "again") == _bytes_in(here.root.parent / "e0")


def test_packs_go_beside_the_model_that_was_merged_from_them(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str
) -> None:
    done = merged(here, text_of("ties"))
    to = f"s3://{bucket}/model"
    sent = _run(here, "push", done.snapshot.snapshot_id, to, "--packs")
    assert len(sent["packs"]) == 2
    again = _run(here, "push", done.snapshot.snapshot_id, to, "--packs")
    assert again["sent_files"] == [] == again["packs"][0]["sent_files"]
    assert _run(there, "pull-pack", to, "e1", "--base", "foundation")[0]["name"] == "e1"


def test_packs_travel_by_the_hub_beside_what_is_in_the_repository(
    here: Warehouse, there: Warehouse, hub: Hub, tmp_path: Path
) -> None:
    HfApi().create_repo("org/model")
    hub.repos["org/model"].commit("main", {"model.safetensors": b"theirs"})
    sent = _run(here, "push", "--pack", "e0", "hf://org/model")
    assert hub.tree("org/model")["model.safetensors"] == b"theirs"
    assert _run(here, "push", "--pack", "e0", "hf://org/model")["commit"] == sent["commit"]
    came = _run(there, "pull-pack", "hf://org/model", "--base", "foundation")
    assert came[0]["nbytes"] > 0
    assert _names(there.packs.path(came[0]["pack_id"])) == _names(
        here.packs.path(came[0]["pack_id"])
    )
    assert not list(there.root.rglob(".cache")), "the hub's client keeps notes beside downloads"
    unpack(there, "e0", tmp_path / "again")
    assert _bytes_in(tmp_path / "again") == _bytes_in(here.root.parent / "e0")


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {path: data for path, (data, _) in files_in(folder).items()}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_another_base_and_a_flipped_byte_are_refused_and_leave_nothing(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str, family: Path
) -> None:
    to = f"s3://{bucket}/experts"
    _run(here, "push", "--pack", "e0", to)
    register(there, family / "e1", "other")
    found = _run(there, "pull-pack", to, "--base", "other", exit_code=19)
    assert "The base is not the one" in found["error"]["what"]
    assert not any(path.endswith(".frames") for method, path in s3.seen if method == "GET")
    key = next(k for k in s3.keys(bucket) if k.endswith("X.frames"))
    store = s3.store(bucket)
    data = bytearray(obstore.get(store, key).bytes())
    data[3] ^= 1
    obstore.put(store, key, bytes(data))
    found = _run(there, "pull-pack", to, "--base", "foundation", exit_code=19)
    assert key in found["error"]["where"]
    assert (there.packs.ids(), there.offline.ids()) == ([], [])
    assert there.catalog.names() == ["foundation", "other"]
    missing = _run(there, "pull-pack", to, "e9", "--base", "foundation", exit_code=17)
    assert missing["error"]["expected"] == "e0"
    unpacked = _run(here, "push", "--pack", "base", to, exit_code=10)
    assert "mergepipe pack base" in unpacked["error"]["next_step"]


def test_the_first_merge_of_a_pulled_expert_is_planned_as_the_second(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str
) -> None:
    to, text = f"s3://{bucket}/experts", text_of("ties").replace(": base", ": foundation")
    for name in ("e0", "e1"):
        _run(here, "push", "--pack", name, to)
    _run(there, "pull-pack", to, "--base", "foundation")
    assert all(there.catalog.has_content(name) for name in ("e0", "e1"))
    first = merged(there, text, budget="20%")
    for folder in ("contents", "facts"):
        shutil.rmtree(there.catalog_dir / folder, ignore_errors=True)
    again = merged(there, text, budget="20%")
    assert first.plan.estimates.strategy == again.plan.estimates.strategy == "packs"
    assert ids_of(again) == ids_of(first)


def test_packs_of_another_version_than_was_merged_are_not_sent_with_a_model(
    family: Path, tmp_path: Path, s3: WatchedS3, bucket: str
) -> None:
    warehouse = packed_family(tmp_path, family)
    done = merged(warehouse, text_of("ties"))
    shutil.copytree(family / "e1", tmp_path / "newer")
    register(warehouse, tmp_path / "newer", "e0", "base")
    pack(warehouse, ["e0"])
    sent = _run(warehouse, "push", done.snapshot.snapshot_id, f"s3://{bucket}/m", "--packs")
    assert len(sent["packs"]) == 1


def test_two_versions_of_an_expert_at_an_address_are_refused_by_the_names_of_their_folders(
    family: Path, there: Warehouse, tmp_path: Path, s3: WatchedS3, bucket: str
) -> None:
    warehouse, to = packed_family(tmp_path, family), f"s3://{bucket}/experts"
    _run(warehouse, "push", "--pack", "e0", to)
    shutil.copytree(family / "e1", tmp_path / "newer")
    register(warehouse, tmp_path / "newer", "e0", "base")
    pack(warehouse, ["e0"])
    _run(warehouse, "push", "--pack", "e0", to)
    found = _run(there, "pull-pack", to, "--base", "foundation", exit_code=10)
    assert found["error"]["found"].count("packs/") == 2
    assert there.packs.ids() == []


@pytest.mark.parametrize("part", ["frames", "weights", "config"])
def test_nothing_is_sent_of_an_expert_in_which_a_bit_turned(
    family: Path, s3: WatchedS3, bucket: str, tmp_path: Path, part: str
) -> None:
    warehouse, expert = packed_family(tmp_path, family), tmp_path / "e0"
    (packed,) = pack(warehouse, ["e0"])
    if part == "weights":
        flip(expert, wrong := "model.layers.1.c.weight", 0.1)
    else:
        frames = warehouse.packs.path(packed.pack_id) / "X.frames"
        place = frames if part == "frames" else expert / "config.json"
        wrong, stat, data = place.name, place.stat(), place.read_bytes()
        place.write_bytes(data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
        os.utime(place, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    code = 31 if part == "frames" else 19
    found = _run(warehouse, "push", "--pack", "e0", f"s3://{bucket}/p", exit_code=code)
    assert wrong in found["error"]["where"]
    assert s3.keys(bucket) == []
