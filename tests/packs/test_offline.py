"""An expert in cold storage is merged, checked and verified as if its files were still there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import (
    CheckpointError,
    CorruptionError,
    MergePipeError,
    NotFoundError,
)
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.execution.run import MergeOutcome, run_plan
from mergepipe_pipeline.facts.pack_source import pack_files
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.packs.offline import leftover
from mergepipe_pipeline.resolution.locate import Places, locate_registered
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import packed_family, write_family
from tests.packs.test_upkeep import flip
from tests.support.family import tensors_of, write_model

METHODS = {
    "ties": "{density: 0.5, weight: 0.5}",
    "task_arithmetic": "{weight: 0.5}",
    "dare_ties": "{density: 0.5, weight: 0.5}",
    "linear": "{weight: 0.5}",
    "slerp": "{t: 0.4}",
}


def text_of(method: str, *names: str, extra: str = "") -> str:
    """A recipe over registered names or paths, published as `m`."""
    experts = names or (("e0",) if method == "slerp" else ("e0", "e1"))
    listed = ", ".join(f"{{model: {name}}}" for name in experts)
    return (
        f"merge_method: {method}\nbase_model: base\nmodels: [{listed}]\n"
        f"parameters: {METHODS[method]}\n{extra}"
    )


def merged(warehouse: Warehouse, text: str, **planning: object) -> MergeOutcome:
    """A merge that takes nothing from the action cache."""
    recipe = parse(text, name="m", where="m.yml")
    return merge(warehouse, recipe, fresh=True, **planning).outcome  # type: ignore[arg-type]


def ids_of(outcome: MergeOutcome) -> tuple[str, str, list[str]]:
    """Snapshot, plan and layer keys."""
    keys = [layer.layer_key for layer in outcome.plan.layers]
    return outcome.snapshot.snapshot_id, outcome.plan.plan_id, keys


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts; read-only."""
    folder = tmp_path_factory.mktemp("files")
    write_family(folder)
    return folder


@pytest.fixture(scope="module")
def here(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """Packed experts whose files are there."""
    return packed_family(tmp_path_factory.mktemp("here"), files)


@pytest.fixture(scope="module")
def away(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """The same, after the files of e0 were moved away and lost."""
    folder = tmp_path_factory.mktemp("away")
    warehouse = packed_family(folder, files, away=("e0",))
    shutil.rmtree(folder / "cold")
    return warehouse


@pytest.mark.parametrize("budget", [None, "25%"])
@pytest.mark.parametrize("method", METHODS)
def test_a_merge_of_an_expert_that_is_away_is_that_of_its_files(
    here: Warehouse, away: Warehouse, method: str, budget: str | None
) -> None:
    of_files = merged(here, text_of(method), budget=budget)
    of_pack = merged(away, text_of(method), budget=budget)
    assert ids_of(of_pack) == ids_of(of_files)
    planned = of_pack.plan.estimates.expert_bytes_planned
    assert of_pack.realised.expert_bytes_read == planned


def test_a_full_merge_reads_the_pack_where_the_files_would_be_faster(away: Warehouse) -> None:
    plan = merged(away, text_of("task_arithmetic", "e0")).plan
    tasks = [task for layer in plan.layers for task in layer.tasks]
    assert {task.name for task in tasks for e in task.experts if e.read} == {
        "model.layers.1.fp8.weight"
    }
    assert plan.estimates.expert_bytes_packed


def test_what_the_catalog_does_not_know_of_it_is_found_from_the_pack(
    here: Warehouse, away: Warehouse
) -> None:
    # Another grid needs statistics and segments that nobody took; model_stock norms of its own.
    stock = "merge_method: model_stock\nbase_model: base\nmodels: [{model: e0}, {model: e1}]\n"
    for text in (text_of("ties", extra="budget: 40%\nstrategy: magnitude\n"), stock):
        of_files = merged(here, text, block_elems=4096)
        assert ids_of(merged(away, text, block_elems=4096)) == ids_of(of_files)


def test_every_read_of_a_file_that_is_away_gives_its_bytes(files: Path, away: Warehouse) -> None:
    data = (files / "e0" / "e0.safetensors").read_bytes()
    checkpoint = Places(away).locate("e0")
    edges = sorted({0, len(data), *(t.start_byte for t in checkpoint.tensors)})
    with pack_files(Path(checkpoint.root.removeprefix("pack://"))) as source:
        assert source.list() == ["config.json", "e0.safetensors"]
        for a in edges:
            for start in range(max(0, a - 3), min(a + 3, len(data))):
                for nbytes in (0, 1, 7, 200_000, 700_000):
                    nbytes = min(nbytes, len(data) - start)
                    found = source.read_range("e0.safetensors", start, nbytes)
                    assert found == data[start : start + nbytes], (start, nbytes)
        with pytest.raises(CheckpointError, match="not there"):
            source.size("other.json")
        with pytest.raises(CheckpointError, match="ended"):
            source.read_range("e0.safetensors", len(data) - 1, 2)


def test_it_is_found_by_name_by_revision_and_where_it_was(away: Warehouse) -> None:
    registered = locate_registered(away, "e0")
    root = away.root.parent / "e0"
    assert registered.checkpoint.is_offline
    assert (registered.version, away.catalog.root("e0")) == (1, str(root))
    assert Places(away).locate(str(root)) == registered.checkpoint
    assert Places(away, root.parent / "recipes").locate("e0") == registered.checkpoint
    assert Places(away).locate("e0", revision="1") == registered.checkpoint
    before = ids_of(merged(away, text_of("ties")))
    assert ids_of(merged(away, text_of("ties", str(root), "e1"))) == before


def test_the_verbs_about_recipes_and_snapshots_take_it_as_any_other(
    away: Warehouse, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yml"
    recipe.write_text(text_of("task_arithmetic", extra="budget: 30%\n"))
    for command in ("check", "curve", "plan", "merge"):
        done = CliRunner().invoke(main, ["--home", str(away.root), command, str(recipe)])
        assert done.exit_code == 0, done.output
    snapshot = merged(away, recipe.read_text()).snapshot
    done = CliRunner().invoke(main, ["--home", str(away.root), "explain", snapshot.snapshot_id])
    assert done.exit_code == 0, done.output
    assert replay(away, snapshot.snapshot_id).snapshot_id == snapshot.snapshot_id
    report = verify_all(away, inputs_of=snapshot)
    assert report.ok
    assert report.notes == ("in cold storage, and compared as packs and bases give them: e0",)


def test_without_packs_it_is_refused_with_what_to_run(away: Warehouse) -> None:
    plans = set(away.plans.iterdir())
    with pytest.raises(CheckpointError, match="cold storage") as refused:
        merged(away, text_of("ties"), no_packs=True)
    assert "mergepipe unpack e0" in str(refused.value)
    assert set(away.plans.iterdir()) == plans


@pytest.mark.parametrize("damaged", ["X.frames", "index", "rest"])
def test_a_flipped_bit_is_named_and_nothing_is_published(
    files: Path, tmp_path: Path, damaged: str
) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    checkpoint_id = warehouse.catalog.get("e0").checkpoint.checkpoint_id
    record = warehouse.offline.find(checkpoint_id)
    assert record is not None
    pack_root = warehouse.packs.path(record.pack_id)
    path = {
        "X.frames": frames_path(pack_root, "X"),
        "index": next(pack_root.glob("index.*")),
        "rest": leftover(warehouse.offline.path(checkpoint_id), 0),
    }[damaged]
    flip(path, {"index": -path.stat().st_size // 2, "rest": -30}.get(damaged, -1))
    recipe = parse(text_of("task_arithmetic", extra="ref: m\n"), name="m", where="m.yml")
    with pytest.raises(CorruptionError) as refused:
        merge(warehouse, recipe, publish_ref=True)
    place = str(path.parent if damaged == "index" else path)
    assert place in str(refused.value)
    assert not list(warehouse.snapshots.iterdir())
    assert warehouse.refs.names() == []
    assert not verify_all(warehouse, ["inputs"]).ok
    # The original in its old place heals all.
    shutil.copytree(tmp_path / "cold" / "e0", tmp_path / "e0", dirs_exist_ok=True)
    assert merge(warehouse, recipe, publish_ref=True, no_packs=True).ref


def test_a_merge_that_is_killed_is_taken_up_again(
    files: Path, here: Warehouse, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    recipe = tmp_path / "m.yml"
    recipe.write_text(text_of("task_arithmetic"))
    command = [sys.executable, "-m", "tests.packs.killed_merge", str(warehouse.root), str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2
    again = merge(warehouse, recipe).outcome
    assert ids_of(again) == ids_of(merged(here, recipe.read_text()))
    assert verify_all(warehouse).ok


def test_its_own_tokenizer_takes_part_in_a_union(tmp_path: Path) -> None:
    found = []
    for place, is_away in (("here", False), ("away", True)):
        warehouse = Warehouse.at(tmp_path / place / "home").ensure()
        for number, name in ((None, "base"), (0, "e0"), (1, "e1")):
            folder = write_model(tmp_path / place / name, tensors_of(0, number))
            if name == "e0":  # a token of its own, and two in each other's place
                text = (folder / "tokenizer.json").read_text()
                text = text.replace('"w7": 7', '"own": 7')
                text = text.replace('"w8": 8', '"w9": 8').replace('"w9": 9', '"w8": 9')
                (folder / "tokenizer.json").write_text(text)
            register(warehouse, folder, name, None if name == "base" else "base")
        (made,) = pack(warehouse, ["e0"])
        if is_away:
            move_to_cold(warehouse, made, tmp_path / "cold")
        text = text_of("task_arithmetic", extra="tokenizer_source: union\n")
        outcome = merged(warehouse, text)
        assert '"own"' in Path(outcome.snapshot.path, "tokenizer.json").read_text()
        found.append(ids_of(outcome))
    assert found[0] == found[1]


def test_a_base_that_is_away_is_read_like_any_other(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files)
    text = text_of("task_arithmetic", "e1").replace("base_model: base", "base_model: e0")
    before = ids_of(merged(warehouse, text))
    (made,) = pack(warehouse, ["e0"])
    move_to_cold(warehouse, made, tmp_path / "cold")
    assert ids_of(merged(warehouse, text)) == before
    # Two that stand for each other would give nothing.
    with pytest.raises(MergePipeError, match="moved away"):
        move_to_cold(warehouse, pack(warehouse, ["e1"], base="e0")[0], tmp_path / "cold")
    assert move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold").before


def test_another_base_under_its_name_is_named(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    shutil.copy(tmp_path / "e1" / "e1.safetensors", tmp_path / "base" / "base.safetensors")
    analyze(warehouse, ["base"])
    with pytest.raises(CorruptionError, match=r"not the one .* packed against.*tensor") as refused:
        merged(warehouse, text_of("task_arithmetic", "e0"))
    assert str(tmp_path / "cold" / "e0") in str(refused.value)


def test_a_snapshot_made_of_it_is_verified_after_it_came_back(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    snapshot = merged(warehouse, text_of("ties")).snapshot
    unpack(warehouse, "e0")
    assert verify_all(warehouse, ["inputs"], inputs_of=snapshot).notes == ()
    assert replay(warehouse, snapshot.snapshot_id).snapshot_id == snapshot.snapshot_id
    shutil.rmtree(tmp_path / "e0")
    with pytest.raises(NotFoundError, match="not moved away"):
        unpack(warehouse, "e0")


def test_a_merge_of_the_files_is_explained_and_replayed_when_they_are_away(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    made = merged(warehouse, text_of("ties"), no_packs=True)
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")
    asked = ["explain", made.plan.plan_id, "--by", "tensor"]
    done = CliRunner().invoke(main, ["--home", str(warehouse.root), *asked])
    assert done.exit_code == 0, done.output
    assert replay(warehouse, made.snapshot.snapshot_id).snapshot_id == made.snapshot.snapshot_id


def test_looking_for_a_checkpoint_loads_no_codec() -> None:
    code = "import sys, mergepipe_pipeline.resolution.resolve; sys.exit('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_plan_that_reads_it_is_run_after_the_warehouse_was_moved(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGEPIPE_ROOTS", f"models={tmp_path}")
    warehouse = packed_family(tmp_path, files, away=("e0",))
    made = merged(warehouse, text_of("ties", extra="budget: 40%\n"))
    by_place = merged(warehouse, text_of("ties", "models:e0", "e1", extra="budget: 40%\n"))
    assert ids_of(by_place) == ids_of(made)
    moved = Warehouse.at(warehouse.root.rename(tmp_path / "moved"))
    again = run_plan(moved, load_plan(moved, made.plan.plan_id), fresh=True)
    assert again.snapshot.snapshot_id == made.snapshot.snapshot_id
    report = verify_all(moved, ["inputs"], inputs_of=again.snapshot)
    assert report.ok, report.findings


def test_a_later_version_that_is_gone_does_not_bring_back_the_one_that_was_moved_away(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files, away=("e0",))
    first = Places(warehouse).locate("e0")
    shutil.copytree(files / "e1", tmp_path / "e0", dirs_exist_ok=True)
    assert register(warehouse, tmp_path / "e0", "e0", "base").version == 2
    (tmp_path / "e0").rename(tmp_path / "elsewhere")
    with pytest.raises(MergePipeError) as refused:
        merged(warehouse, text_of("ties", "e0"))
    assert str(tmp_path / "e0") in str(refused.value)
    assert warehouse.catalog.get("e0").version == 2
    (tmp_path / "elsewhere").rename(tmp_path / "e0")
    assert Places(warehouse).locate("e0").checkpoint_id != first.checkpoint_id
    merged(warehouse, text_of("ties", "e0"))
