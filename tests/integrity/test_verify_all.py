"""Every kind of damage in a warehouse is found and named, and what is derivable is mended."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.storage import atomic
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.repair import repair
from mergepipe_pipeline.verbs.verify import verify, verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.support.listed import folders_listed

DERIVABLE = {
    "record": "catalog/checkpoints/v*/*.parquet",
    "contents": "catalog/contents/v*/*.parquet",
    "statistics": "catalog/facts/v*/*/*/b[0-9]*.parquet",
    "side files": "catalog/side_files/v*/*.parquet",
    "places": "catalog/places/v*/*/*.json",
    "facts": "catalog/facts/v*/*/*/k*.parquet",
    "plan": "plans/*.json",
    "action": "actions/*/*.json",
}
KEPT = {
    "name": "catalog/names/expert_00/*.json",
    "ref": "refs/live/*.json",
    "manifest": "snapshots/*/manifest.json",
    "provenance": "snapshots/*/provenance.json",
    "side file": "snapshots/*/tokenizer.json",
}


@pytest.fixture(scope="module")
def models(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(family, tmp_path_factory.mktemp("models") / "m"))


@pytest.fixture(scope="module")
def recipe(models: Path) -> str:
    lines = ["merge_method: ties", f"base_model: {models}/base", "models:"]
    lines += [f"- {{model: {models}/expert_0{n}, parameters: {{weight: 1}}}}" for n in range(3)]
    return "\n".join([*lines, "parameters: {density: 0.3}", ""])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, recipe: str) -> Path:
    """A warehouse of one budgeted merge, published."""
    home = Warehouse.at(tmp_path_factory.mktemp("whole") / "w").ensure()
    publish(home, run(home, recipe, budget="60%").snapshot.snapshot_id, "live")
    return home.root


@pytest.fixture
def home(whole: Path, tmp_path: Path) -> Warehouse:
    """A copy with its hard links."""
    subprocess.run(["cp", "-a", str(whole), str(tmp_path / "w")], check=True, timeout=60)
    return Warehouse.at(tmp_path / "w")


def flip(path: Path, at: int, *, keep_time: bool = False) -> None:
    data, was = bytearray(path.read_bytes()), path.stat()
    data[at] ^= 1 << (at % 8)
    path.chmod(0o644)
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def places(path: Path, n: int = 1) -> list[int]:
    size = path.stat().st_size
    return [0, size - 1, *(random.Random(size).randrange(size) for _ in range(n))]


def cli(home: Warehouse, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*words, "--home", str(home.root)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_a_right_warehouse_is_ok_in_every_scope_and_nothing_is_changed(home: Warehouse) -> None:
    before = {p: p.stat().st_mtime_ns for p in home.root.rglob("*") if p.is_file()}
    report = verify_all(home)
    assert report.findings == ()
    objects = sum(p.stat().st_size for p in home.objects_dir.glob("*/*"))
    assert report.nbytes > 2 * objects  # those, once, and four inputs
    assert {p: p.stat().st_mtime_ns for p in home.root.rglob("*") if p.is_file()} == before
    assert repair(home).taken == ()


@pytest.mark.parametrize("kind", [*DERIVABLE, *KEPT])
def test_a_flipped_bit_in_any_record_is_found_and_the_file_is_named(
    home: Warehouse, kind: str
) -> None:
    path = sorted(home.root.glob((DERIVABLE | KEPT)[kind]))[0]
    for at in places(path):
        right = path.read_bytes()
        flip(path, at)
        found = verify_all(home, ("structure", "digests")).findings
        assert any(str(path) in f.where for f in found), (at, found)
        assert {f.is_derivable for f in found if str(path) in f.where} == {kind in DERIVABLE}
        assert all(f.next_step for f in found)
        assert path.exists()
        path.write_bytes(right)


SEALED = {k: p for k, p in DERIVABLE.items() if p.startswith("catalog")}


@pytest.mark.parametrize("kind", SEALED)
def test_a_sealed_file_under_the_name_of_another_is_found_and_made_again(
    home: Warehouse, recipe: str, kind: str
) -> None:
    """Two files of one kind exchange what their names say of whose facts they hold."""
    one, other = _of_two_owners(home, SEALED[kind])
    swapped = [_renamed(one, other), _renamed(other, one)]
    data = [path.read_bytes() for path in (one, other)]
    for path in (one, other):
        path.unlink()
    for path, bytes_ in zip(swapped, data, strict=True):
        path.write_bytes(bytes_)
    found = verify_all(home, ["structure"]).findings
    assert {Path(f.file) for f in found} == set(swapped)
    for action in home.actions_dir.glob("*/*.json"):
        action.unlink()
    again = run(home, recipe, budget="60%").snapshot.snapshot_id
    assert again == home.refs.current("live").snapshot_id
    repair(home)
    assert verify_all(home).ok


def _of_two_owners(home: Warehouse, pattern: str) -> tuple[Path, Path]:
    """The first file of a kind, and one about another checkpoint."""
    one, *others = sorted(home.root.glob(pattern))
    key = one.name.rpartition(".parquet")[0].rpartition(".")[0]
    return one, next(p for p in others if not p.name.startswith(key) or p.parent != one.parent)


def _renamed(path: Path, other: Path) -> Path:
    """Where a file would lie that is taken for the other one, under its own seal."""
    seal = path.name.split(".")[-2]
    return other.with_name(other.name.replace(other.name.split(".")[-2], seal))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_bit_of_a_warehouse_can_flip_unseen(home: Warehouse, data: st.DataObject) -> None:
    files = sorted(p for p in home.root.rglob("*") if p.is_file() and p.stat().st_size)
    path = data.draw(st.sampled_from(files), "file")
    at = data.draw(st.integers(0, path.stat().st_size - 1), "byte")
    right, was = path.read_bytes(), path.stat()
    flip(path, at, keep_time=True)
    try:
        report = verify_all(home, ("structure", "digests"))
        assert any(str(path) in (f.file, *f.where.split(", ")) for f in report.findings), path
    finally:
        path.write_bytes(right)
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize("kind", DERIVABLE)
def test_what_is_derivable_is_taken_away_and_made_again_with_the_same_ids(
    home: Warehouse, recipe: str, kind: str
) -> None:
    for path in sorted(home.root.glob(DERIVABLE[kind])):
        flip(path, places(path)[-1])
    before = {p.name for p in home.root.glob(DERIVABLE[kind])}
    assert repair(home, dry_run=True).quarantine is None
    assert verify_all(home, ["structure"]).findings
    done = repair(home)
    assert (done.left, done.not_made) == ((), ())
    assert {Path(p).name for p in done.taken} >= before
    assert {p.name for p in Path(str(done.quarantine)).rglob("*") if p.is_file()} >= before
    assert verify_all(home).ok
    if kind in ("record", "contents", "statistics"):
        assert {p.name for p in home.root.glob(DERIVABLE[kind])} == before
    again = run(home, recipe, budget="60%").snapshot.snapshot_id
    assert again == home.refs.current("live").snapshot_id
    assert verify_all(home).ok


def test_a_damaged_object_is_named_with_its_tensor_and_its_snapshot_is_left_for_a_person(
    home: Warehouse, recipe: str
) -> None:
    shard = sorted(home.snapshots.glob("*/*.safetensors"))[2]
    stray = home.objects_dir / "ab" / ("ab" + 62 * "0")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"nothing")
    flip(shard, shard.stat().st_size - 3, keep_time=True)
    code, text = cli(home, "verify", "--all", "--json")
    found = json.loads(text)["findings"]
    assert code == 19
    assert any("tensor model.layers.1." in f["where"] and f["is_derivable"] for f in found)
    assert any(str(shard) in f["where"] and not f["is_derivable"] for f in found)
    assert any(str(stray) in f["where"] for f in found)
    code, text = cli(home, "repair")
    assert code == 19
    assert "left for you" in text
    assert shard.exists()
    assert not stray.exists()
    shutil.rmtree(shard.parent)
    again = run(home, recipe, budget="60%").snapshot
    assert verify(home, again.snapshot_id).snapshot_id == shard.parent.name
    assert cli(home, "verify", "--all")[0] == 0


@pytest.mark.parametrize("damage", ["object", "touched object", "side file", "manifest", "gone"])
def test_a_damaged_snapshot_is_made_anew_by_the_next_merge_and_the_old_one_is_kept(
    home: Warehouse, recipe: str, damage: str
) -> None:
    folder = next(home.snapshots.iterdir())
    shard = sorted(folder.glob("*.safetensors"))[2]
    match damage:
        case "object" | "touched object":
            flip(shard, shard.stat().st_size - 3, keep_time=damage == "object")
        case "side file" | "manifest":
            flip(folder / {"manifest": "manifest.json"}.get(damage, "tokenizer.json"), 40)
        case _:
            shard.unlink()
    if damage == "object":  # nobody but a verification sees what a disk does
        assert cli(home, "repair")[0] == 19
    seen: list[bool] = []
    atomic.crash_hook = lambda step: seen.append(folder.is_dir())
    again = run(home, recipe, budget="60%").snapshot
    assert all(seen)
    assert again.path == str(folder)
    assert home.refs.current("live").snapshot_id == again.snapshot_id
    assert verify_all(home).ok
    (old,) = home.aside.glob(f"*/snapshots/{again.snapshot_id}")
    with pytest.raises(CorruptionError):
        verify_snapshot(old)


def test_all_findings_are_listed_not_only_the_first(home: Warehouse) -> None:
    kinds = {"plan": "plans/*.json", "action": "actions/*/*.json", "ref": "refs/live/*.json"}
    paths = [sorted(home.root.glob(pattern))[0] for pattern in kinds.values()]
    for path in paths:
        flip(path, 5)
    (next(home.snapshots.iterdir()) / "config.json").unlink()
    (next(home.snapshots.iterdir()) / "extra").write_text("x")
    code, text = cli(home, "verify", "--all", "--scope", "structure", "--scope", "lineage")
    assert code == 19
    for name in [*map(str, paths), "config.json", "extra"]:
        assert name in text


def test_lineage_tells_of_names_without_snapshots_and_of_actions_that_disagree(
    home: Warehouse, recipe: str
) -> None:
    snapshot = next(home.snapshots.iterdir())
    manifest = json.loads((snapshot / "manifest.json").read_text())
    one, other = (s["layer_key"] for s in manifest["shards"][:2])

    store = home.objects
    keys = {path.stem.partition(".")[0]: path.stem for path in store.all_actions()}
    wrong = store.lookup(keys[other])
    assert wrong is not None
    store.record(keys[one], wrong)
    (found,) = verify_all(home, ["lineage"]).findings
    assert (one in found.file, found.is_derivable) == (True, True)
    repair(home)
    assert verify_all(home, ["lineage"]).ok
    shutil.rmtree(snapshot)
    (found,) = verify_all(home, ["lineage"]).findings
    assert found.file == str(home.refs_dir / "live" / "00000001.json")
    assert run(home, recipe, budget="60%").snapshot.snapshot_id == snapshot.name
    assert verify_all(home).ok


def test_lineage_lists_actions_once_however_many_snapshots_there_are(
    home: Warehouse, recipe: str
) -> None:
    other = run(home, recipe, budget="30%").snapshot
    assert {other.snapshot_id} < {folder.name for folder in home.snapshots.iterdir()}
    with folders_listed() as listed:
        assert verify_all(home, ["lineage"]).ok
    assert listed.count(home.actions_dir) == 1


def test_a_missing_version_and_a_pipe_in_place_of_a_file_are_findings(home: Warehouse) -> None:
    chain = home.catalog_dir / "names" / "base"
    (chain / "00000001.json").rename(chain / "00000002.json")
    pipe = home.catalog_dir / "contents" / "v1" / f"x.{32 * '0'}.parquet"
    os.mkfifo(pipe)
    started = time.monotonic()
    found = verify_all(home, ["structure"]).findings
    assert time.monotonic() - started < 5
    moved = chain / "00000002.json"
    assert {f.file for f in found} == {str(chain), str(moved), str(pipe)}


@pytest.mark.parametrize("command", [("--all", "--scope", "inputs"), ("live", "--inputs")])
def test_a_byte_of_an_analysed_expert_that_changed_is_found_though_size_and_time_are_kept(
    home: Warehouse, models: Path, command: tuple[str, ...]
) -> None:
    file = models / "expert_02" / "model.safetensors"
    right, was = file.read_bytes(), file.stat()
    try:
        flip(file, len(right) - 9, keep_time=True)
        code, text = cli(home, "verify", *command)
        assert code == 19
        assert f"{file}, tensor model.norm.weight" in text
        file.write_bytes(right)
        flip(file, 90_000)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        assert f"{file}, tensor model.layers." in cli(home, "verify", *command)[1]
        os.utime(file)
        code, text = cli(home, "verify", *command)
        assert (code, "not those that were recorded" in text) == (19, True)
        file.unlink()
        assert cli(home, "verify", *command)[0] == 19
    finally:
        file.write_bytes(right)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert cli(home, "verify", *command)[0] == 0


@pytest.mark.parametrize("command", [("--all", "--scope", "inputs"), ("live", "--inputs")])
def test_a_side_file_of_an_input_that_changed_under_its_time_or_went_is_found(
    home: Warehouse, models: Path, command: tuple[str, ...]
) -> None:
    file = models / "expert_02" / "config.json"
    right, was = file.read_bytes(), file.stat()
    try:
        flip(file, 9, keep_time=True)
        code, text = cli(home, "verify", *command)
        assert (code, text.count("not those that were registered")) == (19, 1)
        assert f"{file.parent}, {file.name}" in text
        file.unlink()
        code, text = cli(home, "verify", *command)
        assert (code, text.count("weights is missing")) == (19, 1)
        register(home, models / "expert_02", "expert_02")
        assert cli(home, "verify", *command)[0] == 0
        file.write_text("{}")  # another size is another version
        assert cli(home, "verify", *command)[0] == 0
    finally:
        file.write_bytes(right)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert cli(home, "verify", *command)[0] == 0


IN_PLACES = DERIVABLE | {
    "stage": "stages/*.json",
    "arrival": "arrivals/*.json",
    "result": "catalog/searches/*/results/*.json",
    "object": "objects/*/*",
}


@pytest.mark.parametrize("kind", IN_PLACES)
def test_a_folder_in_the_place_of_a_file_is_found_and_taken_away(
    home: Warehouse, kind: str
) -> None:
    made = home.root / IN_PLACES[kind].replace("*", "a")
    path = next(home.root.glob(IN_PLACES[kind]), made)
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    found = verify_all(home).findings
    assert str(path) in {f.file for f in found if f.is_derivable}
    assert str(path) in repair(home).taken
    assert not path.is_dir()
    assert str(path) not in {f.file for f in verify_all(home).findings}


def test_repair_says_that_it_does_not_read_inputs(home: Warehouse, models: Path) -> None:
    file = models / "expert_02" / "model.safetensors"
    right, was = file.read_bytes(), file.stat()
    try:
        flip(file, len(right) - 9, keep_time=True)
        code, text = cli(home, "repair")
        assert (code, "not at inputs, which `mergepipe verify --all --scope inputs`" in text) == (
            0,
            True,
        )
    finally:
        file.write_bytes(right)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


def test_an_expert_that_left_the_inbox_is_a_note_and_one_that_left_another_place_a_finding(
    home: Warehouse, models: Path
) -> None:
    for place in (home.inbox / "here", home.root.parent / "there"):
        shutil.copytree(models / "expert_00", place)
        assert cli(home, "register", str(place), "--name", place.name)[0] == 0
        shutil.rmtree(place)
    report = verify_all(home, ["inputs"])
    assert any("left the inbox" in note and "here" in note for note in report.notes)
    assert [Path(finding.file).name for finding in report.findings] == ["there"]


def test_the_options_that_do_not_go_together_are_refused(home: Warehouse) -> None:
    for words in ((), ("live", "--all"), ("live", "--scope", "digests"), ("--all", "--inputs")):
        assert cli(home, "verify", *words)[0] == 2


def test_made_embedding_rows_that_changed_are_found(home: Warehouse, models: Path) -> None:
    text = (
        f"merge_method: linear\nmodels:\n- {{model: {models}/base, parameters: {{weight: 1}}}}\n"
        f"- {{model: {models}/expert_00, parameters: {{weight: 1}}}}\n"
        "tokenizer: {source: base, tokens: {w5: {source: {kind: zero}, force: true}}}\n"
    ).replace("source: base", f"source: {models}/base")
    made = run(home, text).snapshot.snapshot_id
    (file, *_) = sorted(home.token_rows.glob("*.safetensors"))
    flip(file, file.stat().st_size - 1, keep_time=True)
    (found,) = verify_all(home, ["structure"]).findings
    assert (found.file, found.is_derivable) == (str(file), True)
    repair(home)
    assert run(home, text).snapshot.snapshot_id == made
    assert verify_all(home).ok


def test_a_collection_keeps_what_was_taken_away_for_a_month(home: Warehouse) -> None:
    flip(next(home.plans.iterdir()), 7)
    folder = Path(str(repair(home).quarantine))
    collect(home, older_than_s=0)
    assert folder.exists()
    month_ago = time.time() - 31 * 86400
    os.utime(folder, (month_ago, month_ago))
    assert str(folder) in collect(home, older_than_s=0, dry_run=True).paths
    collect(home, older_than_s=40 * 86400)
    assert folder.exists()
    collect(home)
    assert not folder.exists()
