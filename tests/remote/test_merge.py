"""Whole merges from addresses: the bits of local files, for the bytes that were planned."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.errors import CheckpointChangedError, IncompatibleCheckpointsError
from mergepipe_pipeline.remote.ranges import downloads_folder
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.atomic import remove_tree
from mergepipe_pipeline.verbs.merge import Merged, merge
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_side_files import add_modules
from tests.remote.servers import FolderServer, HubServer, Server

#: Of four models, with the eight bytes before.
_HEADERS_NBYTES = 4 * 3000
#: What folders give, by whether they have the names of the hub.
_LOCAL: dict[bool, Merged] = {}
Place = Callable[[str], str]
Build = Callable[..., str]


@pytest.fixture(params=["web", "hub", "s3"])
def place(request: pytest.FixtureRequest) -> tuple[Server, Place]:
    """A server of the family, and the addresses of its models."""
    server: Server = request.getfixturevalue({"web": "folder"}.get(request.param, request.param))
    prefix = {"web": server.url, "hub": "hf://org", "s3": "s3://models/family"}[request.param]
    return server, lambda name: f"{prefix}/{name}"


def _merge(home: Warehouse, text: str, *, fresh: bool = False) -> Merged:
    return merge(home, parse(text, name="r", where="r.yml"), fresh=fresh)


@pytest.fixture
def local(family: Path, tmp_path: Path, recipe_at: Build) -> Callable[[Place], Merged]:
    """Merges the family from folders of the names that its models get at a place."""

    def run(at: Place) -> Merged:
        root = tmp_path / "local"
        hub = at("").startswith("hf://")
        if hub in _LOCAL:
            return _LOCAL[hub]
        root.mkdir()
        for model in family.iterdir():
            shutil.copytree(model, root / (f"org-{model.name}" if hub else model.name))
        prefix = "org-" if hub else ""
        home = Warehouse.at(tmp_path / "local_home").ensure()
        _LOCAL[hub] = _merge(home, recipe_at(lambda name: f"{root}/{prefix}{name}"))
        return _LOCAL[hub]

    return run


def test_a_merge_from_an_address_has_the_bits_of_a_local_one_for_the_bytes_that_it_planned(
    place: tuple[Server, Place],
    home: Warehouse,
    local: Callable[[Place], Merged],
    recipe_at: Build,
) -> None:
    server, at = place
    expected, first = local(at).outcome, _merge(home, recipe_at(at)).outcome
    assert first.snapshot.snapshot_id == expected.snapshot.snapshot_id
    keys = [layer.layer_key for layer in first.plan.layers]
    assert keys == [layer.layer_key for layer in expected.plan.layers]

    # What came is kept: another merge asks for no weight.
    server.seen.requests.clear()
    _merge(home, recipe_at(at), fresh=True)
    assert _weights(server) == []

    # On another disk, only what the plan reads comes, and no cut connection changes a bit.
    remove_tree(downloads_folder())
    gets = count()
    server.fault = lambda method, path, number: (
        "cut" if method == "GET" and next(gets) % 10 == 9 else None
    )
    again = _merge(home, recipe_at(at), fresh=True).outcome
    assert again.snapshot.snapshot_id == expected.snapshot.snapshot_id
    planned = again.realised.expert_bytes_read + again.realised.base_bytes_read
    assert planned <= sum(_weights(server)) <= 1.02 * planned + _HEADERS_NBYTES
    assert len(_weights(server)) <= 2 * 5 + 30


def _with_modules(models: Path) -> None:
    for model in models.iterdir():
        add_modules(model)


def test_modules_on_the_hub_are_compared(hub: HubServer, home: Warehouse, recipe_at: Build) -> None:
    _with_modules(hub.folder / "org")
    text = recipe_at(lambda name: f"hf://org/{name}")
    _merge(home, text)
    dense = hub.folder / "org" / "expert_00" / "2_Dense" / "model.safetensors"
    save_file({"linear.weight": torch.ones(4, 4)}, dense)
    with pytest.raises(IncompatibleCheckpointsError, match=r"expert_00@\w+, 2_Dense/model"):
        _merge(home, text)


def test_modules_that_a_server_does_not_list_are_refused(
    folder: FolderServer, home: Warehouse, recipe_at: Build
) -> None:
    _with_modules(folder.folder)
    with pytest.raises(IncompatibleCheckpointsError, match="cannot be read from this address"):
        _merge(home, recipe_at(lambda name: f"{folder.url}/{name}"))


def _weights(server: Server) -> list[int]:
    """Bytes of each answer with a part of a weight file."""
    requests = server.seen.requests
    return [n for m, path, n in requests if m == "GET" and re.search(r"\.safetensors(\?|$)", path)]


def test_a_file_that_changes_underway_ends_the_merge_by_its_name(
    folder: FolderServer, home: Warehouse, recipe_at: Build
) -> None:
    _merge(home, recipe_at(lambda name: f"{folder.url}/{name}"))
    remove_tree(downloads_folder())
    file = folder.folder / "expert_02" / "model.safetensors"
    data = bytearray(file.read_bytes())
    gets = iter(range(1000))

    def changes(method: str, path: str, number: int) -> None:
        if method == "GET" and "expert_02/model.s" in path and next(gets) == 3:
            data[-1] ^= 1
            file.write_bytes(data)

    folder.fault = changes
    refs = sorted(home.refs_dir.rglob("*"))
    with pytest.raises(CheckpointChangedError, match=r"expert_02, model\.safetensors"):
        _merge(home, recipe_at(lambda n: f"{folder.url}/{n}"), fresh=True)
    assert sorted(home.refs_dir.rglob("*")) == refs
