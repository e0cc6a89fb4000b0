"""Results in a bucket: published by several warehouses, found by others, whole at every moment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import fetch_layers
from mergepipe_pipeline.progress import Silent
from mergepipe_pipeline.remote.bucket import Bucket, Entry
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.snapshots import mirror as mirror_module
from mergepipe_pipeline.snapshots.mirror import COLLECTING, Mirror, mirror_at, object_key
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.verbs.pull import pull
from mergepipe_pipeline.verbs.tools import extract_lora
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.writing.watched_s3 import Answer, WatchedS3
from tests.snapshots.tiny import Store

CODE = "from mergepipe_pipeline.cli.main import program; program()"


@pytest.fixture
def shared(s3: WatchedS3, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Mirror:
    """An empty bucket that all warehouses of this process publish to."""
    monkeypatch.setenv("MERGEPIPE_BUCKET", f"s3://{bucket}/team")
    return mirror_at(f"s3://{bucket}/team", "the test")


@pytest.fixture
def warehouse(tmp_path: Path) -> Callable[[str], Warehouse]:
    """Warehouses by name, as of several machines."""
    return lambda name: Warehouse.at(tmp_path / name).ensure()


def _run(home: Warehouse, *words: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*words, "--home", str(home.root), "--json"])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout), result.stderr


def _publishing(home: Warehouse, made: Snapshot, *words: str) -> list[str]:
    """The command of a process of its own that publishes a snapshot as `live`."""
    place = ["--home", str(home.root)]
    return [
        sys.executable,
        "-c",
        CODE,
        "publish",
        made.snapshot_id,
        "--ref",
        "live",
        *place,
        *words,
    ]


def _exit_code(home: Warehouse, made: Snapshot) -> int:
    """What publishing a snapshot as `live` ends with."""
    try:
        publish(home, made.snapshot_id, "live")
    except MergePipeError as error:
        return error.exit_code
    return 0


def _is_sound(mirror: Mirror) -> bool:
    """Whether whatever has a name in the bucket is whole, down to the bytes of objects."""
    for ref, numbers in mirror.versions().items():
        for number in numbers:
            assert mirror.version(ref, number).snapshot_id in mirror.snapshot_ids()
    for snapshot_id in mirror.snapshot_ids():
        manifest = mirror.manifest(snapshot_id)
        assert len(dict(mirror.side_files(manifest))) == len(manifest.side_files) + 1
        for shard in manifest.shards:
            found = mirror.bucket.find(object_key(shard.sha256))
            assert found is not None
            assert found.nbytes == shard.nbytes
    return True


def test_a_publisher_that_ends_at_any_step_leaves_what_readers_use_and_is_finished_by_the_next(
    shared: Mirror, s3: WatchedS3, warehouse: Callable[[str], Warehouse]
) -> None:
    home = warehouse("a")
    first = Store(home.root).commit((1,))
    publish(home, first.snapshot_id, "live")
    for step in range(20):
        made = Store(home.root).commit((1, step + 2))
        written = 0

        def stop(method: str, path: str, last: int = step) -> Answer | None:
            nonlocal written
            written += method == "PUT"
            return ("403 Forbidden", "AccessDenied") if written > last else None

        s3.before = stop
        ended = _exit_code(home, made)
        s3.clear()
        if ended == 0:
            break
        assert ended == 29
        assert home.refs.current("live").snapshot_id == first.snapshot_id
        assert _is_sound(shared)
        current = shared.current("live")
        assert current is not None
        assert current.snapshot_id == first.snapshot_id
    assert step == 8  # object, two actions, two side files, provenance, manifest, ref
    assert _is_sound(shared)
    again = publish(warehouse("a"), made.snapshot_id, "live")
    assert (again.snapshot_id, shared.versions()) == (made.snapshot_id, {"live": [1, 2]})


def test_a_publisher_killed_in_the_middle_of_an_object_goes_on_when_it_is_run_again(
    shared: Mirror, s3: WatchedS3, warehouse: Callable[[str], Warehouse]
) -> None:
    home = warehouse("a")
    made = Store(home.root).commit((1, 2, 3))
    reached, killed = threading.Event(), threading.Event()
    third = made.manifest.shards[2].sha256

    def hold(method: str, path: str) -> Answer | None:
        if method == "PUT" and path.endswith(third):
            reached.set()
            killed.wait(20)
            return "503 Slow Down", "SlowDown"
        return None

    s3.before = hold
    process = subprocess.Popen(_publishing(home, made), env=dict(os.environ))
    assert reached.wait(30)
    process.kill()
    process.wait(10)
    killed.set()
    assert (shared.versions(), shared.snapshot_ids(), home.refs.names()) == ({}, [], [])
    s3.clear()
    publish(home, made.snapshot_id, "live")
    assert third in s3.puts()
    assert not {s.sha256 for s in made.manifest.shards[:2]} & {*s3.puts()}
    assert _is_sound(shared)


def test_of_two_warehouses_that_publish_a_ref_at_once_one_wins_and_nothing_is_lost(
    shared: Mirror, s3: WatchedS3, warehouse: Callable[[str], Warehouse]
) -> None:
    homes = [warehouse("a"), warehouse("b")]
    made = [Store(home.root).commit((1, n)) for n, home in enumerate(homes, 2)]
    both = threading.Barrier(2, timeout=120)  # a start may take half a minute

    def meet(method: str, path: str) -> Answer | None:
        if method == "PUT" and "/refs/" in path:
            both.wait()
        return None

    s3.before = meet
    processes = [
        subprocess.Popen(
            _publishing(home, snapshot, "--json"),
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for home, snapshot in zip(homes, made, strict=True)
    ]
    told = [json.loads(p.communicate(timeout=180)[0]) for p in processes]
    codes = [p.returncode for p in processes]
    s3.clear()
    assert sorted(codes) == [0, 18]
    won, lost = codes.index(0), codes.index(18)
    assert "published first" in told[lost]["error"]["what"]
    current = shared.current("live")
    assert current is not None
    assert current.snapshot_id == made[won].snapshot_id
    assert sorted(shared.snapshot_ids()) == sorted(s.snapshot_id for s in made)
    assert homes[lost].refs.names() == []
    publish(homes[lost], made[lost].snapshot_id, "live")
    assert shared.versions() == {"live": [1, 2]}


def test_another_machine_takes_layers_from_the_bucket_and_merges_those_that_are_damaged_there(
    shared: Mirror,
    s3: WatchedS3,
    warehouse: Callable[[str], Warehouse],
    recipe_text: Callable[..., str],
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "mine.yml"
    recipe.write_text(recipe_text(experts=2))
    first, _ = _run(warehouse("a"), "merge", str(recipe))
    _run(warehouse("a"), "publish", first["snapshot_id"], "--ref", "live")
    second, _ = _run(warehouse("b"), "merge", str(recipe))
    assert second["snapshot_id"] == first["snapshot_id"]
    assert (second["layers_executed"], second["expert_bytes_read"]) == (0, 0)
    shard = shared.manifest(first["snapshot_id"]).shards[1]
    key = f"team/{object_key(shard.sha256)}"
    store = s3.store(os.environ["MERGEPIPE_BUCKET"].split("/")[2])
    data = bytearray(obstore.get(store, key).bytes())
    data[-1] ^= 1
    obstore.put(store, key, bytes(data), attributes={"sha256": shard.sha256})
    third, said = _run(warehouse("c"), "merge", str(recipe))
    assert third["snapshot_id"] == first["snapshot_id"]
    assert (third["layers_executed"], third["layers_reused"]) == (1, 3)
    assert shard.sha256 in said


def test_a_bucket_that_cannot_be_reached_is_said_and_keeps_no_merge_waiting(
    warehouse: Callable[[str], Warehouse],
    recipe_text: Callable[..., str],
    tmp_path: Path,
    s3: WatchedS3,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = tmp_path / "mine.yml"
    recipe.write_text(recipe_text(experts=2))
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
    monkeypatch.setenv("MERGEPIPE_BUCKET", "s3://nowhere/team")
    home = warehouse("a")
    plan = make_plan(home, parse(recipe.read_text(), name="m", where="m.yml"))
    began_s = time.monotonic()
    assert fetch_layers(home, plan.layers, Silent()) == {}
    assert time.monotonic() - began_s < 3
    assert "s3://nowhere/team" in caplog.text
    assert _run(home, "merge", str(recipe))[0]["layers_executed"] == 4


def test_what_one_warehouse_published_another_pulls_verifies_and_rolls_back_from(
    shared: Mirror, s3: WatchedS3, warehouse: Callable[[str], Warehouse]
) -> None:
    here, there = warehouse("a"), warehouse("b")
    made = [Store(here.root).commit(contents) for contents in ((1, 2), (2, 3))]
    for snapshot in made:
        _run(here, "publish", snapshot.snapshot_id, "--ref", "live")
    assert _run(there, "pull", "live")[0]["snapshot_id"] == made[1].snapshot_id
    s3.clear()
    assert _run(there, "pull", "live@1")[0]["snapshot_id"] == made[0].snapshot_id
    common = made[0].manifest.shards[1].sha256
    assert not any(path.endswith(common) for method, path in s3.seen if method == "GET")
    for snapshot in made:
        assert _run(there, "verify", snapshot.snapshot_id)[0]["ok"] is True
        assert there.objects.lookup(snapshot.manifest.shards[0].layer_key) is not None
    found, _ = _run(there, "pull", "nothing", exit_code=17)
    assert "live" in found["error"]["expected"]
    _run(here, "rollback", "live")
    assert _run(there, "pull", "live")[0]["snapshot_id"] == made[0].snapshot_id
    elsewhere = warehouse("c")
    pulled = pull(elsewhere, made[1].snapshot_id[:8])
    rotten = Path(pulled.path) / pulled.manifest.shards[0].file
    right, stat = rotten.read_bytes(), rotten.stat()
    rotten.chmod(0o644)
    rotten.write_bytes(bytes(len(right)))
    os.utime(rotten, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert pull(elsewhere, pulled.snapshot_id) == pulled
    assert rotten.read_bytes() == right
    assert len(list(elsewhere.aside.glob(f"*/snapshots/{pulled.snapshot_id}"))) == 1


def test_a_snapshot_that_no_recipe_made_is_pulled_like_others(
    shared: Mirror, warehouse: Callable[[str], Warehouse], family: Path
) -> None:
    home, other = warehouse("a"), warehouse("b")
    made = extract_lora(home, str(family / "expert_00"), str(family / "base"), rank=2)
    publish(home, made.snapshot_id, "adapter")
    assert pull(other, "adapter").snapshot_id == made.snapshot_id
    assert _run(other, "verify", made.snapshot_id)[0]["snapshot_id"] == made.snapshot_id
    (listed,) = _run(other, "ls")[0]["snapshots"]
    assert listed["snapshot_id"] == made.snapshot_id


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets everything in buckets be two weeks old from now on; what comes later is young."""
    real, since = Bucket.entries, [0.0]

    def entries(self: Bucket, below: str = "") -> Iterator[Entry]:
        for entry in real(self, below):
            age = 14 * 86400 if entry.modified_s <= since[0] else 0
            yield replace(entry, modified_s=entry.modified_s - age)

    def age() -> None:
        since[0] = time.time()
        time.sleep(1.05)  # the server tells of whole seconds

    monkeypatch.setattr(Bucket, "entries", entries)
    return age


def test_a_collection_of_the_bucket_keeps_all_that_refs_ever_named_and_what_is_young(
    shared: Mirror,
    s3: WatchedS3,
    warehouse: Callable[[str], Warehouse],
    aged: Callable[[], None],
) -> None:
    home = warehouse("a")
    live, dead, late, young = [Store(home.root).commit((1, n)) for n in (2, 3, 4, 5)]
    publish(home, live.snapshot_id, "live")

    def no_refs(method: str, path: str) -> Answer | None:
        is_ref = method == "PUT" and "/refs/" in path
        return ("403 Forbidden", "AccessDenied") if is_ref else None

    s3.before = no_refs
    assert _exit_code(home, dead) == _exit_code(home, late) == 29
    aged()
    assert _exit_code(home, young) == _exit_code(home, late) == 29
    s3.clear()
    assert len(shared.snapshot_ids()) == 4
    told, _ = _run(home, "gc", "--bucket", "--dry-run")
    assert len(shared.snapshot_ids()) == 4
    done, _ = _run(home, "gc", "--bucket")
    assert done == told
    assert done["snapshots"] == [dead.snapshot_id]
    kept = sorted(s.snapshot_id for s in (live, late, young))
    assert (shared.snapshot_ids(), _is_sound(shared)) == (kept, True)
    assert shared.bucket.find(object_key(dead.manifest.shards[1].sha256)) is None
    assert publish(home, dead.snapshot_id, "live").snapshot_id == dead.snapshot_id
    assert _is_sound(shared)
    refused, _ = _run(home, "gc", "--bucket", "--older-than", "0", exit_code=10)
    assert "just put" in refused["error"]["what"]


def test_a_publisher_waits_for_a_collection_that_runs_and_not_for_one_that_was_killed(
    shared: Mirror, s3: WatchedS3, warehouse: Callable[[str], Warehouse]
) -> None:
    home = warehouse("a")
    made = Store(home.root).commit((1, 2))
    gone = object_key(made.manifest.shards[0].sha256)
    shared.bucket.put(COLLECTING, b"{}")
    assert _exit_code(home, made) == 22
    assert _run(home, "gc", "--bucket", exit_code=22)[0]["error"]["where"].endswith(COLLECTING)
    shared.bucket.remove([COLLECTING])

    def collect_meanwhile(method: str, path: str) -> Answer | None:
        if method == "PUT" and path.endswith("manifest.json"):
            s3.before = lambda method, path: None
            shared.bucket.remove([gone])
        return None

    s3.before = collect_meanwhile
    publish(home, made.snapshot_id, "live")
    assert shared.bucket.find(gone) is not None
    assert _is_sound(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror_module, "STALE_S", -1.0)
        shared.bucket.put(COLLECTING, b"{}")
        publish(home, Store(home.root).commit((3,)).snapshot_id, "live")
        _run(home, "gc", "--bucket")
    assert shared.bucket.find(COLLECTING) is None
