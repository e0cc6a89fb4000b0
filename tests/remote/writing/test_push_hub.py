"""`mergepipe push` to a server of the hub's protocol, through the real client of the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import HfApi

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.warehouse import Warehouse
from tests.remote.writing.hub_writes import Hub, Repo
from tests.snapshots.tiny import Store

TO = "hf://org/model"


@pytest.fixture
def home(tmp_path: Path) -> Warehouse:
    return Warehouse.at(tmp_path / "w").ensure()


@pytest.fixture
def made(home: Warehouse) -> Snapshot:
    """A snapshot of three shards, a card and a config."""
    return Store(home.root).commit((1, 2, 3))


def _push(home: Warehouse, *words: str, exit_code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["push", *words, "--home", str(home.root), "--json"])
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def _files(snapshot: Snapshot) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in Path(snapshot.path).iterdir()}


def test_a_pushed_model_is_one_private_commit_and_a_second_push_sends_nothing(
    home: Warehouse, made: Snapshot, hub: Hub
) -> None:
    told = _push(home, made.snapshot_id, TO, "--dry-run")
    assert (hub.repos, told["commit"]) == ({}, "")
    done = _push(home, made.snapshot_id, TO)
    assert done["sent_nbytes"] == told["sent_nbytes"] == done["nbytes"]
    repo = hub.repos["org/model"]
    assert repo.private
    assert len(repo.commits) == 2  # the hub's own first one, and ours
    assert hub.tree("org/model").items() >= _files(made).items() - {"provenance.json"}
    assert repo.branches["main"] == done["commit"]
    sent = len(hub.sent)
    again = _push(home, made.snapshot_id, TO)
    assert (again["sent_files"], again["commit"]) == ([], done["commit"])
    assert (len(hub.sent), len(repo.commits)) == (sent, 2)


def test_the_next_snapshot_takes_the_place_of_the_last_in_one_commit_on_a_branch(
    home: Warehouse, made: Snapshot, hub: Hub
) -> None:
    to = f"{TO}@next"
    _push(home, made.snapshot_id, to, "--public")
    assert not hub.repos["org/model"].private
    assert "provenance.json" not in hub.tree("org/model", "next")
    other = Store(home.root).commit((4, 1))
    done = _push(home, other.snapshot_id, to, "--no-provenance")
    assert done["removed"] == ["model-2.safetensors", "model-3.safetensors"]
    assert "model-1.safetensors" not in done["sent_files"]
    weights = {n for n in hub.tree("org/model", "next") if n.endswith(".safetensors")}
    assert weights == {"model-1.safetensors", "model-4.safetensors"}
    assert set(hub.tree("org/model")) == {".gitattributes"}


def test_weights_of_others_stay_unless_they_are_to_be_replaced(
    home: Warehouse, made: Snapshot, hub: Hub
) -> None:
    HfApi().create_repo("org/model")
    hub.repos["org/model"].commit("main", {"pytorch_model.bin": b"x", "LICENSE": b"mine"})
    found = _push(home, made.snapshot_id, TO, exit_code=10)
    assert "pytorch_model.bin" in found["error"]["found"]
    assert hub.sent == []
    done = _push(home, made.snapshot_id, TO, "--replace")
    assert done["removed"] == ["pytorch_model.bin"]
    assert hub.tree("org/model")["LICENSE"] == b"mine"


def test_a_new_branch_begins_as_main_and_holds_no_weights_of_main(
    home: Warehouse, made: Snapshot, hub: Hub
) -> None:
    HfApi().create_repo("org/model")
    main = {"model.safetensors": b"others", "LICENSE": b"mine"}
    hub.repos["org/model"].commit("main", main)
    done = _push(home, made.snapshot_id, f"{TO}@next")
    assert done["removed"] == ["model.safetensors"]
    assert hub.tree("org/model", "next").keys() == {
        *_files(made),
        "LICENSE",
        "mergepipe_recipe.yml",
    }
    assert hub.tree("org/model") == main


def test_a_branch_from_a_snapshot_that_was_pushed_to_main_has_the_new_shards_alone(
    home: Warehouse, made: Snapshot, hub: Hub
) -> None:
    _push(home, made.snapshot_id, TO)
    other = Store(home.root).commit((4, 1))
    told = _push(home, other.snapshot_id, f"{TO}@next", "--dry-run")
    assert (set(hub.repos["org/model"].branches), told["commit"]) == ({"main"}, "")
    done = _push(home, other.snapshot_id, f"{TO}@next")
    assert done["removed"] == told["removed"] == ["model-2.safetensors", "model-3.safetensors"]
    weights = {n for n in hub.tree("org/model", "next") if n.endswith(".safetensors")}
    assert weights == {"model-1.safetensors", "model-4.safetensors"}


def test_of_two_pushes_that_find_no_repository_the_second_mixes_no_model(
    home: Warehouse, made: Snapshot, hub: Hub
) -> None:
    theirs = {"model.safetensors": b"of the other push"}

    def meanwhile(method: str, path: str) -> int | None:
        if path == "/api/repos/create" and "org/model" not in hub.repos:
            hub.repos["org/model"] = Repo(private=True)
            hub.repos["org/model"].commit("main", theirs)
        return None

    hub.before = meanwhile
    found = _push(home, made.snapshot_id, TO, exit_code=10)
    assert "model.safetensors" in found["error"]["found"]
    assert (hub.sent, hub.tree("org/model")) == ([], theirs)


def test_a_commit_of_another_in_between_is_told_and_nothing_is_lost(
    home: Warehouse, made: Snapshot, hub: Hub
) -> None:
    HfApi().create_repo("org/model")

    def meanwhile(method: str, path: str) -> int | None:
        if path.startswith("/lfs/") and len(hub.repos["org/model"].commits) == 1:
            hub.repos["org/model"].commit("main", {"LICENSE": b"theirs"})
        return None

    hub.before = meanwhile
    found = _push(home, made.snapshot_id, TO, exit_code=18)
    assert "Another writer was first" in found["error"]["what"]
    assert hub.tree("org/model") == {"LICENSE": b"theirs"}
    sent = len(hub.sent)
    _push(home, made.snapshot_id, TO)
    assert hub.tree("org/model")["LICENSE"] == b"theirs"
    assert len(hub.sent) == sent


def test_who_may_not_write_is_told_so(home: Warehouse, made: Snapshot, hub: Hub) -> None:
    hub.before = lambda method, path: 403 if method == "POST" else None
    found = _push(home, made.snapshot_id, TO, exit_code=29)
    assert "403" in json.dumps(found["error"])
    assert TO in found["error"]["where"]


@pytest.mark.parametrize("status", [400, 402, 403, 413])
def test_what_the_hub_does_not_take_is_told_in_its_own_words(
    home: Warehouse, made: Snapshot, hub: Hub, status: int
) -> None:
    hub.before = lambda method, path: status if "/commit/" in path else None
    error = _push(home, made.snapshot_id, TO, exit_code=29)["error"]
    assert "refused by the test" in error["found"]
    assert "refuses" in error["what"]
    assert "network" not in error["next_step"]


def test_a_push_that_is_killed_shows_nothing_and_goes_on_where_it_was(
    home: Warehouse, made: Snapshot, hub: Hub, tmp_path: Path
) -> None:
    reached, killed = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> int | None:
        if method == "PUT" and len(hub.sent) == 1:
            reached.set()
            killed.wait(20)
            return 500
        return None

    hub.before = hold
    code = "from mergepipe_pipeline.cli.main import program; program()"
    command = [sys.executable, "-c", code, "push", made.snapshot_id, TO, "--home", str(home.root)]
    told = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    process = subprocess.Popen(command, env={**os.environ, **told})
    assert reached.wait(30)
    process.kill()
    process.wait(10)
    killed.set()
    assert set(hub.tree("org/model")) == {".gitattributes"}
    hub.before = lambda method, path: None
    _push(home, made.snapshot_id, TO)
    assert len(hub.sent) == len(set(hub.sent)) == 3
    assert hub.tree("org/model").items() >= _files(made).items() - {"provenance.json"}
