"""Whoever publishes to a bucket is not believed: of a forged snapshot nothing stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.digest import digest_json, seal, sha256_hex, unseal
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.verbs.pull import pull
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.writing.watched_s3 import WatchedS3
from tests.snapshots.tiny import Store

Value = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """A snapshot in a bucket of somebody else, whose files may be changed."""

    address: str
    snapshot_id: str
    store: Any

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self.store, f"team/snapshots/{self.snapshot_id}/{name}").bytes())

    def put(self, manifest: Value) -> str:
        """Publish another manifest with all that it needs; gives its snapshot's id."""
        snapshot_id = digest_json(manifest)[:32]
        folder = f"team/snapshots/{snapshot_id}"
        for name in ("config.json", "README.md", "provenance.json"):
            obstore.put(self.store, f"{folder}/{name}", self.read(name))
        obstore.put(self.store, f"{folder}/manifest.json", seal(manifest))
        return snapshot_id

    def manifest(self) -> Value:
        return unseal(self.read("manifest.json"), "")


@pytest.fixture
def published(
    tmp_path: Path, s3: WatchedS3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Published:
    monkeypatch.setenv("MERGEPIPE_BUCKET", f"s3://{bucket}/team")
    here = Warehouse.at(tmp_path / "here").ensure()
    made = Store(here.root).commit((1, 2))
    publish(here, made.snapshot_id, "live")
    monkeypatch.delenv("MERGEPIPE_BUCKET")
    return Published(f"s3://{bucket}/team", made.snapshot_id, s3.store(bucket))


def _shard(**change: Any) -> Callable[[Value], None]:
    return lambda manifest: manifest["shards"][0].update(change)


def _side(**change: Any) -> Callable[[Value], None]:
    return lambda manifest: manifest["side_files"][0].update(change)


FORGED: dict[str, Callable[[Value], None]] = {
    "a shard outside": _shard(file="../../../../outside.safetensors"),
    "a shard in the inbox": _shard(file="../../../inbox/outside.safetensors"),
    "a shard in a subfolder": _shard(file="sub/outside.safetensors"),
    "a shard called as the manifest": _shard(file="manifest.json"),
    "a shard called as another": _shard(file="model-2.safetensors"),
    "a shard of no name": _shard(file=""),
    "a shard called as the folder above": _shard(file=".."),
    "a shard of a name too long": _shard(file="x" * 300),
    "a shard that is a number": _shard(file=1),
    "a shard with a nul": _shard(file="a\0b"),
    "a side file outside": _side(file="../../../../outside.json"),
    "a side file called as the provenance": _side(file="provenance.json"),
    "a side file called as a shard": _side(file="model-1.safetensors"),
    "a digest that is a path": _shard(sha256="../../../../outside"),
    "a digest that is a number": _shard(sha256=1),
    "a layer's key that is a path": _shard(layer_key="../../outside"),
    "a layer's key of no letter": _shard(layer_key=""),
    "a layer's key that fits all": _shard(layer_key="*"),
    "a size that is a text": _shard(nbytes="1"),
    "a size below zero": _shard(nbytes=-1),
    "a size that is a fraction": _shard(nbytes=1.5),
    "tensors that are numbers": _shard(tensors=[[1, 2]]),
    "tensors of one part": _shard(tensors=[["a"]]),
    "no shards": lambda manifest: manifest.update(shards=None),
    "inputs of numbers": lambda m: m["inputs"][0].update(name=1),
    "a method that is a list": lambda m: m.update(method=["ties"]),
    "a plan that is a path": lambda m: m.update(plan_id="../../../../etc/passwd"),
    "a content that is no digest": lambda m: m["inputs"][0].update(content_sha256="x"),
    "a key of nobody": lambda m: m.update(extra=1),
    "a side file of a terabyte": _side(nbytes=1 << 40),
    "an operator's count that is a text": lambda m: m.update(operators=[["ties", "", "x"]]),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_manifest_is_refused_by_name_and_writes_nothing(
    published: Published, tmp_path: Path, what: str
) -> None:
    manifest = published.manifest()
    FORGED[what](manifest)
    forged = published.put(manifest)
    there = Warehouse.at(tmp_path / "there").ensure()
    before = {p for p in tmp_path.rglob("*") if "leases" not in p.parts}
    words = ["pull", forged, "--from", published.address, "--home", str(there.root)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 19, result.output
    assert forged in result.stderr
    assert {p for p in tmp_path.rglob("*") if "leases" not in p.parts} == before


@pytest.mark.parametrize("value", [{}, {"snapshot_id": 1}, {"snapshot_id": ["x"], "reason": ""}])
def test_a_version_of_a_ref_that_names_no_snapshot_is_refused_by_name(
    published: Published, tmp_path: Path, value: Value
) -> None:
    obstore.put(
        published.store, "team/refs/odd/00000001.json", seal({**value, "version_of": "odd/1"})
    )
    words = ["pull", "odd", "--from", published.address, "--home", str(tmp_path / "there")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 19, result.output
    assert "refs/odd/00000001.json" in result.stderr


def _told(**change: Any) -> Callable[[Value], None]:
    return lambda provenance: provenance.update(change)


ODD: dict[str, Callable[[Value], None]] = {
    "nothing": lambda p: p.clear(),
    "no time": lambda p: p.pop("created"),
    "a time that is a number": _told(created=1),
    "no name of a recipe": lambda p: p.pop("recipe_name"),
    "a recipe that is a list": _told(recipe=["x"]),
    "a ref that is a map": _told(ref={}),
    "estimates that are a text": _told(estimates="x"),
    "a bound of a huge number": lambda p: p["estimates"].update(error_bound=10**400),
    "estimates without a bound": lambda p: p["estimates"].pop("error_bound"),
    "estimates of texts": lambda p: p["estimates"].update(budget_bytes="x"),
    "bytes beyond 64 bits": lambda p: p["estimates"].update(expert_bytes_total=1 << 70),
    "a strategy that is a list": lambda p: p["estimates"].update(strategy=[]),
    "what happened as a text": _told(realised="x"),
    "seconds that are a text": _told(realised={"layers_s": "x"}),
    "no inputs": _told(sources=[]),
    "inputs of texts": _told(sources=["x"]),
    "an input without a folder": lambda p: p["sources"][0].pop("root"),
    "a verb that is a list": _told(made_by={"verb": [], "parameters": {}}),
    "a verb without parameters": _told(made_by={"verb": "moe", "parameters": 1}),
    "a request that is a text": _told(request="x"),
    "a card that is a list": _told(card=[]),
    "a warning that is a number": _told(warnings=[1]),
    "an id that is a path": lambda p: p["sources"][0].update(checkpoint_id="../../x"),
    "a request of a text for a number": _told(request={"models": [], "block_elems": "x"}),
    "selectors that are numbers": _told(request={"selected": [1]}),
}


@pytest.mark.parametrize("what", ODD)
def test_a_provenance_that_no_merge_wrote_is_refused_and_harms_no_list_of_snapshots(
    published: Published, tmp_path: Path, what: str
) -> None:
    provenance = unseal(published.read("provenance.json"), "")
    ODD[what](provenance)
    folder = f"team/snapshots/{published.snapshot_id}"
    obstore.put(published.store, f"{folder}/provenance.json", seal(provenance))
    home = str(tmp_path / "there")
    words = ["pull", published.snapshot_id, "--from", published.address, "--home", home]
    result = CliRunner().invoke(main, words)
    listings = (["ls"], ["sql", "select * from snapshots"], ["sql", "from snapshot_inputs"])
    for listing in listings:
        listed = CliRunner().invoke(main, [*listing, "--home", home])
        assert listed.exit_code == 0, listed.output
    assert result.exit_code == 19, result.output
    assert f"{published.snapshot_id}/provenance.json" in result.stderr
    assert list(Warehouse.at(tmp_path / "there").snapshots.iterdir()) == []


@pytest.mark.parametrize("data", [b"no weights", (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_snapshot_whose_object_is_no_weight_file_does_not_stay(
    published: Published, tmp_path: Path, data: bytes
) -> None:
    manifest, digest = published.manifest(), sha256_hex(data)
    manifest["shards"][0].update(sha256=digest, nbytes=len(data))
    obstore.put(published.store, f"team/objects/{digest[:2]}/{digest}", data)
    home = ["--home", str(tmp_path / "there")]
    words = ["pull", published.put(manifest), "--from", published.address, *home]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 19, result.output
    assert "A shard's header" in result.stderr
    assert CliRunner().invoke(main, ["verify", "--all", *home]).exit_code == 0
    assert list((tmp_path / "there" / "snapshots").iterdir()) == []


def test_actions_of_a_bucket_that_is_not_the_warehouses_own_are_not_taken(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger, team = (Warehouse.at(tmp_path / name).ensure() for name in ("there", "team"))
    keys = [shard["layer_key"] for shard in published.manifest()["shards"]]
    pull(stranger, "live", published.address)
    assert [stranger.objects.lookup(key) for key in keys] == [None, None]
    assert (
        CliRunner().invoke(main, ["verify", "--all", "--home", str(stranger.root)]).exit_code == 0
    )
    monkeypatch.setenv("MERGEPIPE_BUCKET", published.address)
    pull(Warehouse.at(team.root), "live", published.address)
    assert None not in [team.objects.lookup(key) for key in keys]
