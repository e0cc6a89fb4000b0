"""An expert that the inbox holds as a link is where the link leads, and leaves with the link."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.tick import Ticker
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.dagster_layer.conftest import Drop, known_experts
from tests.dagster_layer.test_experts import jobs, sum_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


@pytest.fixture
def models(home: Warehouse, drop: Drop, family: Path, tmp_path: Path, ticker: Ticker) -> Path:
    """Where chat-0 and chat-1 lie, which links of the inbox made known.

    Recipe n names chat-1, and the selector of recipe s takes both; all is released.
    """
    drop("base")
    for i in range(2):
        shutil.copytree(family / f"expert_0{i}", tmp_path / "models" / f"chat-{i}")
        (home.inbox / f"chat-{i}").symlink_to(tmp_path / "models" / f"chat-{i}")
    home.recipe_path("n").write_text(sum_of("base", "chat-1"))
    home.recipe_path("s").write_text(sum_of("base", "X").replace("model: X", "match: chat-*"))
    ticker.tick()
    assert [f.problem for f in recipe_files(home)] == [None, None]
    assert ticker.tick() == []
    return tmp_path / "models"


def test_an_expert_whose_link_leaves_the_inbox_is_gone_though_its_files_are_there(
    home: Warehouse, models: Path, ticker: Ticker, instance: dg.DagsterInstance
) -> None:
    (home.inbox / "chat-1").unlink()
    assert jobs(ticker.tick()) == ["merge_s"]
    assert ticker.tick() == []
    inbox, recipes = ticker.reasons()
    assert f"n: chat-1 is gone: nothing lies at {home.inbox / 'chat-1'}" in recipes
    assert recipe_files(home)[1].members == ("base", "chat-0")
    assert set(known_experts(instance, home)) == {"base", "chat-0"}
    assert "2 experts, 0 to index" in inbox
    register(home, models / "chat-1", "chat-1")  # as one outside the inbox it is known by itself
    assert jobs(ticker.tick()) == ["chat-1", "merge_s"]


def test_an_expert_whose_link_leads_to_nothing_has_not_left(
    home: Warehouse, models: Path, ticker: Ticker
) -> None:
    models.rename(models.with_name("unmounted"))
    assert ticker.tick() == []
    assert recipe_files(home)[1].members == ("base", "chat-0", "chat-1")
    models.with_name("unmounted").rename(models)
    assert ticker.tick() == []
    assert ticker.reasons()[1].count("the release is current") == 2
