"""A content in quarantine keeps recipes waiting, and only that content."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.standing import Standing
from mergepipe_pipeline.errors import GateError, NotFoundError
from mergepipe_pipeline.facts.quarantine import decide, kept_out
from mergepipe_pipeline.quality.regression import changes_between
from mergepipe_pipeline.resolution.recipe_text import load_recipe
from mergepipe_pipeline.snapshots.find import load_snapshot
from mergepipe_pipeline.verbs.check import check
from mergepipe_pipeline.verbs.deploy import Due, due
from mergepipe_pipeline.verbs.gate import promote
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.verbs.register import quarantine
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.tools import extract_lora
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse

Land = Callable[[str, str], None]


@pytest.fixture
def land(home: Warehouse, family: Path) -> Land:
    """Put a checkpoint of the family into the inbox under a name, and index it."""

    def put(name: str, source: str) -> None:
        shutil.rmtree(home.inbox / name, ignore_errors=True)
        shutil.copytree(family / source, home.inbox / name)
        index_arrival(home, name)

    return put


@pytest.fixture
def recipe(home: Warehouse, land: Land) -> Path:
    """A standing recipe of a base and the expert `chat`, which are indexed."""
    path = home.recipe_path("mix")
    path.write_text("merge_method: linear\nmodels: [{model: base}, {model: chat}]\n"
                    "parameters: {weight: 0.5}\n")  # fmt: skip
    land("base", "base")
    land("chat", "expert_00")
    return path


def _due(home: Warehouse) -> Due | Standing:
    (recipe_file,) = recipe_files(home)
    return due(home, recipe_file)


def test_a_recipe_waits_for_a_quarantined_content_alone_and_says_what_to_do(
    home: Warehouse, land: Land, recipe: Path
) -> None:
    assert isinstance(_due(home), Due)
    quarantine(home, "chat", reason="it forgot how to count")
    told = _due(home)
    assert isinstance(told, Standing)
    assert told.told.startswith("chat is quarantined since ")
    assert "it forgot how to count" in told.told
    assert "`mergepipe quarantine chat --release`" in told.told
    land("chat", "expert_01")
    assert isinstance(_due(home), Due)
    land("chat", "expert_00")
    assert _due(home) == told
    quarantine(home, "chat", release=True)
    assert isinstance(_due(home), Due)


def test_check_warns_of_an_expert_in_quarantine_and_ls_lists_it(
    home: Warehouse, recipe: Path
) -> None:
    quarantine(home, "chat", reason="it forgot how to count")
    warnings = check(home, load_recipe(recipe, home)).warnings
    assert sum("chat is quarantined since " in w for w in warnings) == 1
    (row,) = ls(home).quarantined
    assert (row["name"], row["is_now"]) == ("chat", True)
    told = CliRunner().invoke(main, ["ls", "--home", str(home.root)]).stdout
    assert "it forgot how to count" in told


def test_what_holds_a_quarantined_content_gets_no_ref_behind_a_gate_and_a_warning_elsewhere(
    home: Warehouse, recipe: Path, tmp_path: Path
) -> None:
    (recipe.parent / "eval.py").write_text("print('{\"x\": 1}')")
    gated = "evaluate: {command: [python, eval.py]}\ngate: {x: {min: 0}}\n"
    recipe.write_text(recipe.read_text() + gated)
    snapshot = merge(home, recipe, relative_to=home.recipes).outcome.snapshot.snapshot_id
    quarantine(home, "chat", reason="it forgot how to count")
    for refused in (
        lambda: publish(home, snapshot, "mix"),
        lambda: promote(home, snapshot, "mix"),
        lambda: merge(
            home, recipe, relative_to=home.recipes, publish_ref=True, out=tmp_path / "out"
        ),
    ):
        with pytest.raises(GateError, match=r"chat is quarantined since .* forgot how to count"):
            refused()
    assert not (tmp_path / "out").exists()
    told = CliRunner().invoke(main, ["publish", snapshot, "--ref", "o", "--home", str(home.root)])
    assert (told.exit_code, home.refs.names()) == (0, ["o"])
    assert "chat is quarantined since " in told.stderr
    forced = promote(home, snapshot, "mix", force="we look at it")
    assert forced.ref.reason == "forced past the gate: we look at it"


def test_what_no_recipe_made_is_published_unless_it_holds_the_quarantined_content(
    home: Warehouse, land: Land, recipe: Path
) -> None:
    recipe.write_text(
        f"{recipe.read_text()}evaluate: {{command: [python]}}\ngate: {{x: {{min: 0}}}}\n"
    )
    land("code", "expert_01")
    made = {n: extract_lora(home, n, "base", rank=2).snapshot_id for n in ("chat", "code")}
    quarantine(home, "chat", reason="it forgot how to count")
    assert publish(home, made["code"], "mix").number == 1
    with pytest.raises(GateError, match="chat is quarantined since "):
        publish(home, made["chat"], "mix")
    live, other = (load_snapshot(home.snapshots, made[n]) for n in ("code", "chat"))
    assert "chat came" in changes_between(home, live, other).summary


@pytest.mark.parametrize(("name", "release"), [("cha", False), ("chat", True)])
def test_an_unknown_name_and_a_release_of_nothing_are_refused(
    home: Warehouse, recipe: Path, name: str, release: bool
) -> None:
    with pytest.raises(NotFoundError):
        quarantine(home, name, release=release)
    assert not home.quarantined_dir.exists()


def test_a_damaged_decision_keeps_the_expert_out_until_repair_sets_it_aside(
    home: Warehouse, recipe: Path
) -> None:
    quarantine(home, "chat")
    (decision,) = (home.quarantined_dir / "chat").iterdir()
    decision.write_bytes(decision.read_bytes().replace(b"by hand", b"by hond"))
    kept_out_for = _due(home)
    assert isinstance(kept_out_for, Standing)
    assert str(decision) in kept_out_for.told
    assert [d["kind"] for d in ls(home).damaged] == ["quarantine"]
    assert [f.file for f in verify_all(home).findings] == [str(decision)]
    repair(home)
    assert isinstance(_due(home), Due)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12))
def test_the_last_decision_about_each_content_holds(
    tmp_path_factory: pytest.TempPathFactory, decisions: list[tuple[str, bool]]
) -> None:
    home = Warehouse.at(tmp_path_factory.mktemp("decisions"))
    for content, is_kept_out in decisions:
        decide(home, "chat", content, "", is_kept_out=is_kept_out)
    last: dict[str, Any] = dict(decisions)
    assert {d.content for d in kept_out(home, "chat")} == {c for c, out in last.items() if out}
