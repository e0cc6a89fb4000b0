"""An expert whose file has other names than its base's: its pack is kept, told of, and enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import tensors_of, write_model

RECIPE = """
merge_method: ties
base_model: base
models: [{model: e0}]
parameters: {weight: 1, density: 0.5}
"""


@pytest.fixture(params=["without a prefix", "compiled"])
def named(tmp_path: Path, request: pytest.FixtureRequest) -> Warehouse:
    """A base and an expert without the base's prefix, or both as torch.compile names them."""
    warehouse, wrapper = Warehouse.at(tmp_path / "home").ensure(), ""
    if request.param == "compiled":
        wrapper = "_orig_mod."
    base = {f"{wrapper}{n}": t for n, t in tensors_of(0, None).items()}
    register(warehouse, write_model(tmp_path / "base", base), "base")
    stem = "" if wrapper else "model."
    tensors = {f"{wrapper}{n.removeprefix(stem)}": t for n, t in tensors_of(0, 0).items()}
    register(warehouse, write_model(tmp_path / "e0", tensors), "e0", "base")
    return warehouse


def test_a_collection_keeps_the_pack_and_a_listing_tells_of_it(named: Warehouse) -> None:
    (packed,) = pack(named, ["e0"])
    collect(named, older_than_s=0)
    assert named.packs.ids() == [packed.pack_id]
    (row,) = [row for row in ls(named).checkpoints if row["name"] == "e0"]
    assert row["pack_nbytes"] == sum(packed.tier_nbytes.values())


def test_little_stays_beside_the_pack_and_the_file_comes_back(
    named: Warehouse, tmp_path: Path
) -> None:
    (packed,) = pack(named, ["e0"])
    file = tmp_path / "e0" / "model.safetensors"
    sha256, nbytes = file_sha256(file), file.stat().st_size
    parsed = parse(RECIPE, name="r", where="r.yml")
    before = merge(named, parsed, no_packs=True).outcome.snapshot.snapshot_id
    move_to_cold(named, packed, tmp_path / "cold")
    assert merge(named, parsed, fresh=True).outcome.snapshot.snapshot_id == before
    kept = [p.stat().st_size for p in named.offline_dir.rglob("*") if p.is_file()]
    assert sum(kept) < nbytes / 4
    unpack(named, "e0")
    assert file_sha256(file) == sha256
