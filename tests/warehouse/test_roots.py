"""Records name folders by roots, so that a warehouse may be moved and machines mount elsewhere."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.deploy.arrivals import ask
from mergepipe_pipeline.deploy.inbox import Patience, scan_inbox
from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.digest import unseal
from mergepipe_pipeline.errors import CheckpointError, MergePipeError
from mergepipe_pipeline.execution.lookup import load_plan
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.resolution.locate import locate_registered
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.roots import ENVIRONMENT, Place, Roots
from mergepipe_pipeline.verbs import deploy
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.test_replace import files_in, with_side_files
from tests.support.laws import examples

METHODS = {
    "ties": "parameters: {density: 0.3}",
    "task_arithmetic": "",
    "dare_linear": "parameters: {density: 0.5}",
}
names = st.text("abcxyz_ -é", min_size=1, max_size=8).map(lambda t: f"m{t.strip()}")
places = st.lists(names, min_size=1, max_size=3).map(lambda parts: Path("/", *parts))


def recipe(base: str, *experts: str, method: str = "ties") -> str:
    models = "".join(f"- {{model: {e}, parameters: {{weight: 0.5}}}}\n" for e in experts)
    said = f"merge_method: {method}\nbase_model: {base}\nmodels:\n{models}"
    return f"{said}{METHODS[method]}\nseed: 1\n"


def merged(home: Warehouse, text: str) -> dict[str, object]:
    """What merging a recipe shows, in a process that has just begun."""
    return merge(Warehouse.at(home.root), parse(text, name="r", where="r")).summary()


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    keys = "plan_id", "snapshot_id"
    return [one[key] for key in keys] == [other[key] for key in keys]


def recorded(home: Warehouse, name: str) -> list[str]:
    """The folders of a name's versions, as the files of the catalog have them."""
    paths = sorted((home.catalog_dir / "names" / name).glob("*.json"))
    return [unseal(path.read_bytes(), str(path))["root"] for path in paths]


@pytest.fixture
def models(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The family in a folder that is the root `models` of this machine."""
    folder = Path(shutil.copytree(family, tmp_path / "mnt" / "models"))
    monkeypatch.setenv(ENVIRONMENT, f"models={folder}")
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Warehouse:
    """An empty warehouse, which reads the variable when it is first asked for a root."""
    return Warehouse.at(tmp_path / "warehouse")


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9_-]{0,9}", fullmatch=True), places), places)
def test_what_is_recorded_is_found_again_below_whatever_root(
    mounted: dict[str, Path], place: Path
) -> None:
    roots = Roots({name: Place(path) for name, path in mounted.items()})
    assert roots.here(roots.recorded(str(place))) == str(place)
    near = [path for path in mounted.values() if place.is_relative_to(path)]
    if near:
        name, _, below = roots.recorded(str(place)).partition(":")
        assert mounted[name] == max(near, key=lambda path: len(path.parts))
        elsewhere = Roots({name: Place(Path("/elsewhere"))})
        assert elsewhere.here(f"{name}:{below}") == str(Path("/elsewhere", below))
        unmounted = Roots({}).here(f"{name}:{below}")
        assert Roots({}).recorded(unmounted) == f"{name}:{below}"
    else:
        assert roots.recorded(str(place)) == str(place)


def test_a_moved_warehouse_merges_its_inbox_and_reads_and_makes_nothing_again(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    home.ensure()
    for name in ("base", "expert_00", "expert_01"):
        shutil.copytree(family / name, home.inbox / name)
        index_arrival(home, name)
    text = recipe("base", "expert_00", "expert_01")
    home.recipe_path("n").write_text(text)
    first = merged(home, text)
    (file,) = recipe_files(home)
    deploy.plan_recipe(home, file)
    deploy.snapshot_recipe(home, "n")
    deploy.release_recipe(home, file)

    moved = Warehouse.at(shutil.move(home.root, tmp_path / "elsewhere"))
    again = merged(moved, text)
    assert same(first, again)
    assert (again["layers_executed"], again["expert_bytes_read"]) == (0, 0)
    (file,) = recipe_files(moved)
    assert deploy.due(moved, file) == deploy.current(file)
    assert {Path(s.root).parent for s in deploy.current_plan(moved, "n").sources} == {moved.inbox}
    assert all(entry.is_indexed for entry in scan_inbox(moved, Patience(0.0, 0.0)))
    assert verify_all(moved).ok
    assert not home.root.exists()


def test_a_moved_warehouse_finds_the_packs_that_its_plans_read(
    home: Warehouse, family: Path, tmp_path: Path
) -> None:
    for name in ("base", "expert_00"):
        register(home.ensure(), family / name)
    pack(home, ["expert_00"], base="base")
    plan = make_plan(home, parse(recipe("base", "expert_00"), name="r", where="r"))
    assert plan.packs
    moved = Warehouse.at(shutil.move(home.root, tmp_path / "elsewhere"))
    for known in load_plan(moved, plan.plan_id).packs:
        assert Path(known.root) == moved.packs.path(known.pack_id)


def test_a_machine_that_mounts_elsewhere_shares_names_plans_and_layers(
    home: Warehouse, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(home, models / "base")
    text = recipe("base", "models:expert_00", "models:expert_01")
    first = merged(home, text)
    assert recorded(home, "base") == ["models:base"]
    assert recorded(home, "expert_00") == ["models:expert_00"]

    other = shutil.move(models, tmp_path / "other")
    monkeypatch.setenv(ENVIRONMENT, f"models={other}")
    again = merged(home, text)
    assert same(first, again)
    assert (again["layers_executed"], again["expert_bytes_read"]) == (0, 0)
    assert recorded(home, "expert_00") == ["models:expert_00"]
    assert Warehouse.at(home.root).catalog.root("base") == f"{other}/base"


@settings(max_examples=examples(2))
@given(places, places, st.sampled_from(sorted(METHODS)))
def test_ids_are_the_same_from_two_mounts(
    family: Path, one: Path, other: Path, method: str
) -> None:
    text = recipe("models:a/base", "models:a/e", "models:b/e", method=method)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        mount = Path(folder, "one", *one.parts[1:])
        for name, place in (("base", "a/base"), ("expert_00", "a/e"), ("expert_01", "b/e")):
            shutil.copytree(family / name, mount / place)
        found = []
        for number, point in enumerate((one, other)):
            there = Path(folder, "one" if number == 0 else "other", *point.parts[1:])
            if number:
                there.parent.mkdir(parents=True)
                mount.rename(there)
            patch.setenv(ENVIRONMENT, f"models={there}")
            found.append(merged(Warehouse.at(Path(folder, f"warehouse{number}")), text))
        assert same(*found)


def test_a_root_that_is_not_mounted_is_named_with_its_variable_and_the_place_it_had(
    home: Warehouse, models: Path, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(home.ensure(), models / "expert_00")
    shutil.copytree(family / "base", home.inbox / "base")
    index_arrival(home, "base")
    index_arrival(home, "expert_00")
    text = recipe("base", "expert_00")
    home.recipe_path("n").write_text(text)
    shutil.rmtree(models)
    models.mkdir()  # a mount point without its mount
    monkeypatch.delenv(ENVIRONMENT)

    here = Warehouse.at(home.root)
    with pytest.raises(CheckpointError) as caught:
        merged(here, text)
    told = caught.value.for_terminal()
    assert "The root 'models' is not mounted on this machine" in told
    assert "models:expert_00" in told
    assert f"nothing at {models}, where roots.json has it" in told
    assert f"{ENVIRONMENT}=models=" in told
    (file,) = recipe_files(here)
    assert "expert_00 lies below a root that is not mounted here" in str(deploy.due(here, file))
    listing = ls(here)
    assert [row["name"] for row in listing.checkpoints] == ["base", "expert_00"]
    assert not listing.damaged
    assert register(here, home.inbox / "base").version == 1

    (home.root / "roots.json").unlink()
    with pytest.raises(CheckpointError, match=f"neither {ENVIRONMENT} nor roots.json says"):
        merged(Warehouse.at(home.root), text)


def test_the_places_of_the_first_machine_are_the_defaults_of_the_others(
    home: Warehouse, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Warehouse.at(home.root).ensure()
    monkeypatch.setenv(ENVIRONMENT, f"models={tmp_path}/b, more={tmp_path}/c")
    other = Warehouse.at(home.root).ensure()
    assert other.roots.places["models"].path == tmp_path / "b"
    monkeypatch.delenv(ENVIRONMENT)
    assert json.loads((home.root / "roots.json").read_text()) == {
        "models": str(models),
        "more": str(tmp_path / "c"),
    }
    assert Warehouse.at(home.root).roots.places["models"].path == models


def test_a_catalog_that_has_absolute_folders_is_read_and_gets_roots_when_it_is_used(
    home: Warehouse, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENVIRONMENT)
    known = register(home.ensure(), models / "base").checkpoint
    assert recorded(home, "base") == [str(models / "base")]
    monkeypatch.setenv(ENVIRONMENT, f"models={models}")
    for _ in range(2):
        again = locate_registered(Warehouse.at(home.root), "base")
        assert again.checkpoint == known
        assert recorded(home, "base") == [str(models / "base"), "models:base"]
    monkeypatch.setenv(ENVIRONMENT, f"models={models.parent}")
    assert Warehouse.at(home.root).catalog.history("base")[0].checkpoint == known


def test_cold_storage_below_a_root_is_found_by_a_machine_that_mounts_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"models={tmp_path}/models,cold={tmp_path}/cold")
    (tmp_path / "models").mkdir()
    warehouse, before = with_side_files(tmp_path / "models")
    warehouse = Warehouse.at(shutil.move(warehouse.root, tmp_path / "warehouse")).ensure()
    move_to_cold(warehouse, pack(warehouse, ["e0"])[0], tmp_path / "cold")

    moved = shutil.move(tmp_path / "models", tmp_path / "other")
    monkeypatch.setenv(ENVIRONMENT, f"models={moved},cold={tmp_path}/gone")
    (known,) = map(Warehouse.at(warehouse.root).offline.find, warehouse.offline.ids())
    assert isinstance(known, OfflineExpert)
    assert known.root == f"{moved}/e0"
    assert known.cold.startswith("unmounted://cold/e0")
    unpack(Warehouse.at(warehouse.root), "e0")
    assert files_in(Path(known.root)) == before


def test_the_inbox_may_be_mounted_elsewhere(
    home: Warehouse, family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f"inbox={tmp_path}/landing")
    here = Warehouse.at(home.root).ensure()
    shutil.copytree(family / "base", here.inbox / "base")
    (landed,) = scan_inbox(here, Patience(0.0, 0.0))
    ask(here, "base", landed.token)
    index_arrival(here, "base")
    assert recorded(here, "base") == ["inbox:base"]
    assert here.catalog.root("base") == f"{tmp_path}/landing/base"


@pytest.mark.parametrize(
    "value", ["models", "Models=/m", "models=m", "warehouse=/m", "a b=/m", "=/m", "models="]
)
def test_a_wrong_root_is_refused_wherever_it_is_said(
    home: Warehouse, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, value)
    with pytest.raises(MergePipeError, match="places of named roots cannot be read") as caught:
        Warehouse.at(home.root).ensure()
    assert caught.value.where == ENVIRONMENT
    monkeypatch.delenv(ENVIRONMENT)
    name, equals, place = value.partition("=")
    home.root.mkdir()
    for text in (json.dumps({name: place}) if equals else "[]", "{"):
        (home.root / "roots.json").write_text(text)
        with pytest.raises(MergePipeError, match="places of named roots cannot be read"):
            Warehouse.at(home.root).ensure()
