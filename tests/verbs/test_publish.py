"""Publishing and rolling back: a name never comes to stand for what is damaged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.verbs.explain import explain
from mergepipe_pipeline.verbs.publish import history, publish, rollback
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run


@pytest.fixture
def published(home: Warehouse, recipe_text: Callable[..., str]) -> list[str]:
    """Two snapshots under the name `live`, oldest first."""
    ids = []
    for weights in ("{lambda: 0.5}", "{lambda: 0.9}"):
        snapshot = run(home, recipe_text("task_arithmetic", weights)).snapshot
        ids.append(publish(home, snapshot.snapshot_id, "live").snapshot_id)
    return ids


def damage(home: Warehouse, snapshot_id: str) -> None:
    shard = next((home.snapshots / snapshot_id).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o644)
    shard.unlink()
    shard.write_bytes(data)


@pytest.mark.parametrize("to", [None, 1])
def test_rolling_back_to_a_damaged_snapshot_changes_nothing(
    home: Warehouse, published: list[str], to: int | None
) -> None:
    before = history(home, "live")
    damage(home, published[0])
    with pytest.raises(CorruptionError, match="tensor"):
        rollback(home, "live", to)
    assert history(home, "live") == before


def test_rolling_back_adds_a_version_that_says_so(home: Warehouse, published: list[str]) -> None:
    assert rollback(home, "live").snapshot_id == published[0]
    assert [r.snapshot_id for r in history(home, "live")] == [*published, published[0]]
    assert "version 1" in history(home, "live")[-1].reason


@pytest.mark.parametrize("what", ["*", "/etc", "", "[", "../plans", "?" * 64])
def test_a_text_that_is_no_id_is_not_found(
    home: Warehouse, published: list[str], what: str
) -> None:
    with pytest.raises(NotFoundError, match="Neither a plan, a snapshot nor a ref"):
        explain(home, what)


def test_a_version_of_a_ref_is_verified_and_not_the_one_that_is_live(
    home: Warehouse, published: list[str]
) -> None:
    damage(home, published[0])
    assert verify(home, "live").snapshot_id == published[1]
    assert verify(home, "live@2").snapshot_id == published[1]
    with pytest.raises(CorruptionError, match=published[0]):
        verify(home, "live@1")


def test_a_ref_names_what_another_ref_names_or_named_before(
    home: Warehouse, published: list[str]
) -> None:
    assert publish(home, "live", "canary").snapshot_id == published[1]
    assert publish(home, "live@1", "canary").snapshot_id == published[0]
    assert publish(home, published[1][:12], "canary").snapshot_id == published[1]
