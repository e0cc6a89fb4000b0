"""`mergepipe push` into a bucket: a real S3 server, and real processes where they are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner
from safetensors import safe_open

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.writing.watched_s3 import Answer, WatchedS3
from tests.snapshots.tiny import Store


@pytest.fixture
def home(tmp_path: Path) -> Warehouse:
    return Warehouse.at(tmp_path / "w").ensure()


@pytest.fixture
def made(home: Warehouse) -> Snapshot:
    """A snapshot of three shards, a card and a config."""
    return Store(home.root).commit((1, 2, 3))


def _push(home: Warehouse, *words: str, exit_code: int = 0) -> Any:
    args = ["push", *words, "--home", str(home.root), "--json"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def _command(home: Warehouse, *words: str) -> list[str]:
    code = "from mergepipe_pipeline.cli.main import program; program()"
    return [sys.executable, "-c", code, "push", *words, "--home", str(home.root), "--json"]


SHARDS = [f"model-{n}.safetensors" for n in (1, 2, 3)]
SIDES = ["README.md", "config.json", "manifest.json", "mergepipe_recipe.yml", "provenance.json"]


def test_a_pushed_model_is_whole_and_what_readers_open_first_comes_last(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str, tmp_path: Path
) -> None:
    done = _push(home, made.snapshot_id, f"s3://{bucket}/models/one")
    assert s3.puts()[0] == "manifest.json"
    assert s3.puts()[-1] == "config.json"
    assert s3.keys(bucket) == sorted(f"models/one/{name}" for name in (*SHARDS, *SIDES))
    assert sorted(done["sent_files"]) == sorted((*SHARDS, *SIDES))
    for name in (*SHARDS, "README.md", "config.json", "manifest.json"):
        there = bytes(obstore.get(s3.store(bucket), f"models/one/{name}").bytes())
        assert there == (Path(made.path) / name).read_bytes()
    (tmp_path / "shard").write_bytes(
        bytes(obstore.get(s3.store(bucket), f"models/one/{SHARDS[0]}").bytes())
    )
    with safe_open(tmp_path / "shard", "np") as shard:
        assert set(shard.keys()) == {"l1.w", "l1.b"}


def test_a_second_push_sends_nothing_and_a_dry_run_neither(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str
) -> None:
    told = _push(home, made.snapshot_id, f"s3://{bucket}/m", "--dry-run")
    assert s3.puts() == []
    first = _push(home, made.snapshot_id, f"s3://{bucket}/m")
    assert first["sent_nbytes"] == told["sent_nbytes"] == first["nbytes"] > 0
    s3.clear()
    second = _push(home, made.snapshot_id, f"s3://{bucket}/m")
    assert (second["sent_files"], second["sent_nbytes"]) == ([], 0)
    assert s3.puts() == []


def test_a_damaged_snapshot_is_refused_before_anything_is_sent(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str
) -> None:
    shard = Path(made.path) / SHARDS[1]
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    found = _push(home, made.snapshot_id, f"s3://{bucket}/m", exit_code=19)
    assert SHARDS[1] in found["error"]["where"]
    assert s3.seen == []


def test_a_push_that_is_killed_goes_on_where_it_was_and_shows_no_model_meanwhile(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str
) -> None:
    reached, killed = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> Answer | None:
        if method == "PUT" and path.endswith(SHARDS[1]):
            reached.set()
            killed.wait(20)
            return "503 Slow Down", "SlowDown"
        return None

    s3.before = hold
    command = _command(home, made.snapshot_id, f"s3://{bucket}/m")
    process = subprocess.Popen(command, env={**os.environ, **s3.environment})
    assert reached.wait(30)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    killed.set()
    assert s3.keys(bucket) == [f"m/{name}" for name in ("manifest.json", SHARDS[0])]
    s3.clear()
    done = _push(home, made.snapshot_id, f"s3://{bucket}/m")
    assert not {SHARDS[0], "manifest.json"} & {*s3.puts()}
    assert done["sent_files"] == [*SHARDS[1:], "README.md", *SIDES[4:2:-1], "config.json"]
    assert len(s3.keys(bucket)) == 8


def test_of_two_pushes_of_two_models_to_one_address_one_is_told(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str
) -> None:
    other = Store(home.root).commit((1, 2, 4))
    both = threading.Barrier(2, timeout=120)  # a start may take half a minute
    claims = 0

    def meet(method: str, path: str) -> Answer | None:
        """Hold the first claim until the other process has found the address empty, too."""
        nonlocal claims
        if method == "PUT" and path.endswith("/m/manifest.json") and claims < 2:
            claims += 1
            both.wait()
        return None

    s3.before = meet
    address = f"s3://{bucket}/m"
    processes = [
        subprocess.Popen(
            _command(home, snapshot.snapshot_id, address),
            env={**os.environ, **s3.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for snapshot in (made, other)
    ]
    told = [json.loads(p.communicate(timeout=180)[0]) for p in processes]
    codes = [p.returncode for p in processes]
    assert sorted(codes) == [0, 18]
    won = (made, other)[codes.index(0)]
    assert "Another push came first" in told[codes.index(18)]["error"]["what"]
    for shard in won.manifest.shards:
        there = bytes(obstore.get(s3.store(bucket), f"m/{shard.file}").bytes())
        assert there == (Path(won.path) / shard.file).read_bytes()
    assert (
        bytes(obstore.get(s3.store(bucket), "m/manifest.json").bytes())
        == (Path(won.path) / "manifest.json").read_bytes()
    )


def test_another_model_at_the_address_stays_unless_it_is_to_be_replaced(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str
) -> None:
    address = f"s3://{bucket}/m"
    _push(home, made.snapshot_id, address)
    other = Store(home.root).commit((4, 1))
    before = s3.keys(bucket)
    found = _push(home, other.snapshot_id, address, exit_code=10)
    assert "manifest.json" in found["error"]["found"]
    assert s3.keys(bucket) == before
    s3.clear()
    done = _push(home, other.snapshot_id, address, "--replace")
    assert set(done["removed"]) >= {"model-2.safetensors", "model-3.safetensors", "manifest.json"}
    hidden = [m for m, path in s3.seen if m in ("DELETE", "PUT", "POST")]
    assert hidden[0] == "PUT"  # the claim, then what readers open, then the rest
    assert [k for k in s3.keys(bucket) if k.endswith(".safetensors")] == [
        "m/model-1.safetensors",
        "m/model-4.safetensors",
    ]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_no_reader_opens_a_model_that_is_replaced_by_one_of_the_same_config(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str, is_resumed: bool
) -> None:
    address, config = f"s3://{bucket}/m", "m/config.json"
    _push(home, made.snapshot_id, address)
    other = Store(home.root).commit((4, 1))

    def refuse(method: str, path: str) -> Answer | None:
        is_removal = method == "DELETE" or (method == "POST" and path.endswith(bucket))
        return ("403 Forbidden", "AccessDenied") if is_removal else None

    if is_resumed:  # it claims the address, and goes no further
        s3.before = refuse
        _push(home, other.snapshot_id, address, "--replace", exit_code=29)
        assert config in s3.keys(bucket)
    readable: list[bool] = []

    def look(method: str, path: str) -> Answer | None:
        if method == "PUT" and path.endswith(".safetensors"):
            readable.append(config in s3.keys(bucket))
        return None

    s3.before = look
    done = _push(home, other.snapshot_id, address, "--replace")
    assert readable == [False]
    assert done["sent_files"][-1] == "config.json"
    assert config in s3.keys(bucket)


@pytest.mark.parametrize("name", ["README.md", SHARDS[0]])
def test_a_file_that_no_push_put_stays_unless_it_is_to_be_replaced(
    home: Warehouse, made: Snapshot, s3: WatchedS3, bucket: str, name: str
) -> None:
    for is_pushed in (False, True):
        to = f"s3://{bucket}/{is_pushed}"
        if is_pushed:
            _push(home, made.snapshot_id, to)
        key = f"{is_pushed}/{name}"
        obstore.put(s3.store(bucket), key, b"written by hand")
        found = _push(home, made.snapshot_id, to, exit_code=10)
        assert found["error"]["found"] == name
        assert bytes(obstore.get(s3.store(bucket), key).bytes()) == b"written by hand"
        assert _push(home, made.snapshot_id, to, "--replace")["removed"] == [name]
        now = bytes(obstore.get(s3.store(bucket), key).bytes())
        assert now == (Path(made.path) / name).read_bytes()


@pytest.mark.parametrize(
    ("answer", "exit_code", "told"),
    [
        (("403 Forbidden", "AccessDenied"), 29, "AccessDenied"),
        (("403 Forbidden", "QuotaExceeded"), 20, "The bucket is full"),
        (("400 Bad Request", "ExpiredToken"), 29, "check the credentials"),
        (("501 Not Implemented", "NotImplemented"), 29, "If-None-Match"),
    ],
)
def test_a_bucket_that_takes_nothing_is_named_and_nothing_here_is_touched(
    home: Warehouse,
    made: Snapshot,
    s3: WatchedS3,
    bucket: str,
    answer: Answer,
    exit_code: int,
    told: str,
) -> None:
    s3.before = lambda method, path: answer if method == "PUT" else None
    found = _push(home, made.snapshot_id, f"s3://{bucket}/m", exit_code=exit_code)
    assert told in json.dumps(found["error"])
    assert f"s3://{bucket}/m/manifest.json" in found["error"]["where"]
    s3.clear()
    _push(home, made.snapshot_id, f"s3://{bucket}/m")


def test_large_shards_go_in_parts_and_a_flipped_byte_on_the_way_is_never_stored(
    s3: WatchedS3, bucket: str, tmp_path: Path
) -> None:
    from mergepipe_pipeline.digest import sha256_hex
    from mergepipe_pipeline.errors import CorruptionError
    from mergepipe_pipeline.remote.address import parse_address
    from mergepipe_pipeline.remote.bucket import Bucket

    place, large = Bucket(parse_address(f"s3://{bucket}/m")), tmp_path / "large"
    large.write_bytes(os.urandom(20 << 20))
    sha256, sent = sha256_hex(large.read_bytes()), 0

    def advance(nbytes: int) -> None:
        nonlocal sent
        sent += nbytes

    etag = place.put_file("large", large, sha256, advance)
    found = place.find("large")
    assert found is not None
    assert (found.nbytes, found.sha256, found.etag) == (20 << 20, sha256, etag)
    assert sent == 20 << 20
    assert place.download("large", tmp_path / "again", sha256, 20 << 20)
    # A request may last two minutes, so that what is large comes by several.
    assert sum(method == "GET" and path.endswith("/large") for method, path in s3.seen) == 3
    assert (tmp_path / "again").read_bytes() == large.read_bytes()
    with pytest.raises(CorruptionError, match="changed after it was checked"):
        place.put_file("other", large, "0" * 64)
    assert place.find("other") is None
