"""A gate keeps a worse snapshot from its ref, and remembers it, whatever way it comes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, recipe_files
from mergepipe_pipeline.deploy.standing import Standing
from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import EvaluationError, GateError, MergePipeError
from mergepipe_pipeline.verbs.deploy import (
    Due,
    current,
    due,
    merge_recipe,
    plan_recipe,
    release_recipe,
    snapshot_recipe,
)
from mergepipe_pipeline.verbs.gate import promote, refusal
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.merge import export
from mergepipe_pipeline.verbs.publish import history
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.verify import verify, verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.quality.scored_family import EVALUATOR, recipe, set_weight, standing


def recipe_file_of(home: Warehouse) -> RecipeFile:
    (recipe_file,) = recipe_files(home)
    return recipe_file


def made(home: Warehouse, budget: str | None = None) -> Snapshot:
    """What recipe n gives now, without its release."""
    recipe_file = recipe_file_of(home)
    plan = plan_recipe(home, recipe_file, budget=budget)
    layers = [layer.name for layer in plan.layers]
    list(merge_recipe(home, recipe_file.name, layers, EngineOptions()))
    return snapshot_recipe(home, recipe_file.name)[0]


def land(home: Warehouse, weight: float) -> None:
    """Let a version of the expert with this weight land."""
    set_weight(home.inbox / "expert_00", weight)
    index_arrival(home, "expert_00")


def versions(home: Warehouse) -> list[int]:
    return [r.number for r in history(home, "n")]


def cli(home: Warehouse, *words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*map(str, words), "--home", str(home.root)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, family: Path) -> Path:
    """A warehouse whose recipe n has released a good version, and refused a worse one."""
    home = Warehouse.at(tmp_path_factory.mktemp("gated") / "w").ensure()
    standing(home, "n")
    for name in ("base", "expert_00"):
        shutil.copytree(family / name, home.inbox / name)
        index_arrival(home, name)
    made(home)
    release_recipe(home, recipe_file_of(home))
    assert due(home, recipe_file_of(home)) == current(recipe_file_of(home))
    land(home, 8.0)
    made(home)
    with pytest.raises(GateError, match=r"is 4, 0\.07.* live; the gate asks for at most 1"):
        release_recipe(home, recipe_file_of(home))
    return home.root


@pytest.fixture
def home(whole: Path, tmp_path: Path) -> Warehouse:
    """A copy with its times and hard links; names of experts lead to the copy."""
    subprocess.run(["cp", "-a", str(whole), str(tmp_path / "w")], check=True, timeout=60)
    copy = Warehouse.at(tmp_path / "w")
    for name in ("base", "expert_00"):
        index_arrival(copy, name)
    return copy


def test_a_refused_candidate_leaves_the_ref_and_is_not_asked_for_again(home: Warehouse) -> None:
    assert versions(home) == [1]
    refused = due(home, recipe_file_of(home))
    assert isinstance(refused, Standing)
    assert refused.state == "refused"
    told = refused.told
    assert "largest is 4, 0.07" in told
    assert "live; the gate asks for at most 1; " in told
    assert told.endswith("n stays as it is, until the recipe, its evaluator or an input changes")
    assert due(home, recipe_file_of(home)) == refused
    with pytest.raises(GateError):
        release_recipe(home, recipe_file_of(home))
    assert versions(home) == [1]


def test_a_mended_version_is_asked_for_and_released(home: Warehouse) -> None:
    land(home, 0.02)
    assert isinstance(due(home, recipe_file_of(home)), Due)
    made(home)
    release_recipe(home, recipe_file_of(home))
    assert versions(home) == [1, 2]
    assert due(home, recipe_file_of(home)) == current(recipe_file_of(home))
    assert refusal(home, "n") is None


def test_nothing_is_merged_that_could_not_be_measured(home: Warehouse) -> None:
    (home.recipes / "eval.py").unlink()
    land(home, 0.02)
    where = due(home, recipe_file_of(home))
    assert isinstance(where, Standing)
    assert where.state == "cannot be used"
    assert re.search(r"eval\.py.*no such file", where.told)
    standing(home, "n")
    assert isinstance(due(home, recipe_file_of(home)), Due)


@pytest.mark.parametrize("changed", ["evaluator", "gate", "record", "measurement"])
def test_what_was_refused_is_asked_for_again_when_the_measure_changes(
    home: Warehouse, changed: str
) -> None:
    if changed == "evaluator":
        (home.recipes / "eval.py").write_text(EVALUATOR + "# mended\n")
    elif changed == "gate":
        path = home.recipe_path("n")
        path.write_text(path.read_text().replace("max: 1,", "max: 9,"))
    elif changed == "measurement":
        shutil.rmtree(home.evaluations)
    else:
        home.refusal_path("n").write_text("{}")
    assert isinstance(due(home, recipe_file_of(home)), Due)


def test_a_refusal_of_another_budget_says_nothing_of_what_the_recipe_wants(
    home: Warehouse,
) -> None:
    land(home, 8.5)
    made(home, budget="100%")
    with pytest.raises(GateError):
        release_recipe(home, recipe_file_of(home))
    assert isinstance(due(home, recipe_file_of(home)), Due)


def test_a_refused_candidate_is_listed_and_goes_with_a_collection_and_its_measurements(
    home: Warehouse,
) -> None:
    refused = refusal(home, "n")
    assert refused is not None
    gone = refused.verdict.snapshot_id
    listed = {s["snapshot_id"]: s for s in ls(home).snapshots}
    assert listed[gone]["refused"].startswith("by n: largest is 4")
    assert listed[gone]["evaluations"][0]["metrics"]["largest"] > 1
    live = history(home, "n")[-1].snapshot_id
    assert listed[live]["refused"] is None
    assert collect(home, older_than_s=0).snapshots == ()  # its plan is the current one
    land(home, 0.02)
    made(home)
    assert collect(home, older_than_s=0).snapshots == (gone,)
    assert {p.name for p in home.evaluations.iterdir()} == {live}


def test_relative_thresholds_compare_with_what_the_ref_names_measured_anew_if_need_be(
    home: Warehouse,
) -> None:
    standing(home, "n", "evaluate: {command: [python, eval.py]}\ngate: {largest: {max_rise: 50%}}")
    shutil.rmtree(home.evaluations)
    with pytest.raises(GateError, match=r"largest is 4.* live; the gate asks for a rise of at m"):
        release_recipe(home, recipe_file_of(home))
    shutil.rmtree(home.refs_dir / "n")
    made(home)
    release_recipe(home, recipe_file_of(home))
    assert versions(home) == [1]


def test_promote_passes_only_what_the_gate_does_or_somebody_answers_for(home: Warehouse) -> None:
    refused = refusal(home, "n")
    assert refused is not None
    worse = refused.verdict.snapshot_id
    code, told = cli(home, "promote", worse, "--ref", "n")
    assert code == GateError.exit_code
    assert "the gate asks for at most 1" in told
    assert versions(home) == [1]
    live = history(home, "n")[-1].snapshot_id
    path = home.recipe_path("n")
    assert promote(home, live, "stable", recipe=path).ref.reason == "promoted: the gate of n passed"
    with pytest.raises(GateError, match="There is no gate to pass"):
        promote(home, live, "other")
    (home.recipes / "eval.py").unlink()
    with pytest.raises(EvaluationError, match=r"eval\.py"):
        promote(home, live, "n")
    assert cli(home, "promote", worse, "--ref", "n", "--force", "the demo is today")[0] == 0
    assert history(home, "n")[-1].reason == "forced past the gate: the demo is today"


def test_a_copy_carries_the_metrics_and_the_snapshot_stays_as_it_was(
    home: Warehouse, tmp_path: Path
) -> None:
    live, out = history(home, "n")[-1].snapshot_id, tmp_path / "out"
    export(home, live, out)
    verify(home, live)
    assert "| largest | 0." in (out / "README.md").read_text()
    told = unseal((out / "provenance.json").read_bytes(), "")
    assert told["evaluations"][0]["metrics"]["largest"] < 1
    export(home, live, out)
    (out / "README.md").write_text((out / "README.md").read_text() + "edited")
    with pytest.raises(MergePipeError, match=r"README\.md is edited"):
        export(home, live, out)


def test_damage_of_what_was_measured_is_found_and_mended(home: Warehouse) -> None:
    live = history(home, "n")[-1].snapshot_id
    record, log = (next((home.evaluations / live).glob(f"*.{end}")) for end in ("json", "log"))
    assert verify_all(home, ["structure"]).ok
    log.write_text("another log")
    (finding,) = verify_all(home, ["structure"]).findings
    assert str(log) in str(finding)
    assert repair(home).taken == (str(record),)
    assert verify_all(home, ["structure"]).ok
    assert ls(home).snapshots


def test_a_merge_that_does_not_pass_has_neither_folder_nor_ref(
    family: Path, tmp_path: Path
) -> None:
    shutil.copytree(family / "expert_00", worse := tmp_path / "worse")
    set_weight(worse, 8.0)
    (tmp_path / "eval.py").write_text(EVALUATOR)
    file, out, new = tmp_path / "r.yml", tmp_path / "out", Warehouse.at(tmp_path / "new")
    words = ("merge", file, "--out", out, "--publish")
    file.write_text(recipe(family / "base", worse))
    code, told = cli(new, *words)
    assert code == GateError.exit_code
    assert "r has no version yet" in told
    assert f"mergepipe bisect {file}" in told
    assert not out.exists()
    assert new.refs.names() == []
    file.write_text(recipe(family / "base", family / "expert_00"))
    code, told = cli(new, *words)
    assert code == 0
    assert "gate          passed: largest is 0." in told
    assert "nothing is live yet" in told
    assert (out / "README.md").exists()
    code, told = cli(new, "explain", "r")
    assert "measured by python eval.py" in told
    (tmp_path / "eval.py").unlink()
    for verb in ("check", "merge"):
        code, told = cli(Warehouse.at(tmp_path / "third"), verb, file)
        assert (code, "eval.py" in told) == (EvaluationError.exit_code, True)
    assert not (tmp_path / "third" / "plans").exists() or not any(
        (tmp_path / "third" / "plans").iterdir()
    )


def test_evaluate_measures_any_snapshot_and_prints_it_for_machines(
    home: Warehouse, tmp_path: Path
) -> None:
    (tmp_path / "e.py").write_text("print('{\"a\": 1.5}')")
    other = home.recipe_path("n").read_text().partition("evaluate:")[0]
    (tmp_path / "o.yml").write_text(f"{other}evaluate: {{command: [python, e.py]}}\n")
    code, told = cli(home, "evaluate", "n", "--recipe", tmp_path / "o.yml", "--json")
    assert (code, json.loads(told)["metrics"]) == (0, {"a": 1.5})
    assert Path(json.loads(told)["log"]).read_text().endswith('{"a": 1.5}\n')
    code, told = cli(home, "evaluate", "n", "--recipe", home.recipe_path("n"))
    assert (code, "largest  0." in told) == (0, True)
    assert cli(home, "evaluate", "n")[0] == 2
