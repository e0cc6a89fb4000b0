"""Packs of another version of the codec: nothing is wrong with them, and they are written again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from mergepipe_pipeline.catalog.arrow_tables import decode, encode
from mergepipe_pipeline.catalog.seals import find_sealed, read_sealed, write_sealed
from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.contents.damaged_packs import refuse_damaged
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.pack import CODEC_VERSION
from mergepipe_pipeline.errors import DamagedPackError, PackVersionError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.packs.index import INDEX, read_contents
from mergepipe_pipeline.packs.replaced import put_record
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.replace import move_to_cold, unpack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import packed_family, write_family
from tests.support.told import Told

RECIPE = """
merge_method: task_arithmetic
base_model: base
models: [{model: e0}, {model: e1}]
parameters: {weight: 0.5}
"""
OTHER = f"0{CODEC_VERSION}"
EXPECTED, FOUND = f"version {CODEC_VERSION} of the codec", f"version {OTHER}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    write_family(root)
    return root


def recipe(extra: str = "") -> ParsedRecipe:
    return parse(RECIPE + extra, name="m", where="m.yml")


def of_other_codec(root: Path, *, is_renamed: bool = True) -> Path:
    """Let another version of the codec have written a pack: its index says so, and its name.

    Seals cover the name, so all are made anew. Gives its folder.
    """
    (index,) = find_sealed(root, "index")
    table, meta = decode(read_sealed(index), str(index), INDEX)
    name = digest_json([OTHER, meta["tiers"], sorted(read_contents(root))])
    final = root.with_name(name) if is_renamed else root
    index.unlink()
    if is_renamed:
        root.rename(final)
    for path in [p for p in final.glob("*.parquet") if p.name.startswith(("chunks", "sums"))]:
        assert path.stat().st_size  # other columns and seals: nothing may depend on these
        path.write_bytes(b"of another form")
    write_sealed(final, "index", encode(table, {**meta, "codec": OTHER}))
    return final


def older(warehouse: Warehouse, name: str) -> Path:
    """The pack of an expert, of another version of the codec."""
    return of_other_codec(warehouse.packs.path(pack(warehouse, [name])[0].pack_id))


def away_with_older(tmp: Path, files: Path) -> tuple[Warehouse, Path, Path]:
    """A warehouse whose e0 is in cold storage beside an older pack; the folders of both."""
    warehouse = packed_family(tmp, files)
    made = pack(warehouse, ["e0"])[0]
    moved = move_to_cold(warehouse, made, tmp / "cold")
    root = of_other_codec(warehouse.packs.path(made.pack_id))
    (checkpoint_id,) = warehouse.replaced.ids()
    record = warehouse.replaced.find(checkpoint_id)
    assert record is not None
    renamed = replace(record, pack_id=root.name)
    put_record(warehouse.replaced.path(checkpoint_id), renamed, warehouse.roots)
    return warehouse, root, Path(moved.cold)


@pytest.mark.parametrize("extra", ["", "budget: 40%\n"])
def test_a_merge_goes_on_from_the_original_and_says_what_to_run(
    files: Path, tmp_path: Path, extra: str
) -> None:
    warehouse, without = (packed_family(tmp_path / name, files) for name in ("a", "b"))
    root, told = older(warehouse, "e0"), Told()
    shutil.rmtree(without.packs.path(pack(without, ["e0"])[0].pack_id))
    found = merge(warehouse, recipe(extra), progress=told).outcome
    wanted = merge(without, recipe(extra)).outcome
    assert found.snapshot.snapshot_id == wanted.snapshot.snapshot_id
    (warning,) = (w for w in told.warnings if "codec" in w)
    assert warning == (
        f"the pack of e0 was written by another version of the codec (expected {EXPECTED}, found "
        f"{FOUND}), so that the original is read; `mergepipe pack e0` writes it again"
    )
    assert root.is_dir()
    # What it says to do helps.
    assert pack(warehouse, ["e0"])[0].fresh
    told = Told()
    merge(warehouse, recipe(extra), progress=told, fresh=True)
    assert not [w for w in told.warnings if "codec" in w]


def test_nobody_is_warned_who_wants_no_packs(files: Path, tmp_path: Path) -> None:
    warehouse, told = packed_family(tmp_path, files), Told()
    older(warehouse, "e0")
    merge(warehouse, recipe(), progress=told, no_packs=True)
    assert not [w for w in told.warnings if "codec" in w]


def test_the_command_that_packs_writes_it_again_and_takes_nothing_from_it(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    same = warehouse.packs.path(pack(warehouse, ["e1"])[0].pack_id)
    of_other_codec(same, is_renamed=False)
    made, again = pack(warehouse, ["e0", "e1"])
    assert (made.fresh, made.taken_over, again.fresh) == (True, 0, True)
    assert made.pack_id != root.name
    assert again.pack_id == same.name
    assert verify_all(warehouse).ok
    assert not caplog.records


def test_whoever_opens_it_is_told_what_wrote_it_and_that_nothing_is_wrong(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    with pytest.raises(PackVersionError, match=r"another version .* nothing is wrong") as refused:
        warehouse.packs.open(root.name)
    assert (refused.value.expected, refused.value.found) == (EXPECTED, FOUND)
    assert "mergepipe pack" in str(refused.value.next_step)


def test_a_plan_of_an_earlier_release_says_to_pack_and_to_plan_again(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    plan = make_plan(warehouse, recipe("budget: 12.5%\n"))
    of_other_codec(warehouse.packs.path(pack(warehouse, ["e0"])[0].pack_id), is_renamed=False)
    with pytest.raises(PackVersionError) as refused:
        list(run_layers(warehouse, plan))
    assert "`mergepipe pack e0`" in str(refused.value.next_step)
    assert "plan again" in str(refused.value.next_step)


def test_verify_and_ls_find_nothing_wrong_and_gc_removes_it(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    report = verify_all(warehouse)
    assert report.ok
    assert [n for n in report.notes if root.name[:16] in n and "mergepipe pack" in n]
    assert ls(warehouse).damaged == ()
    assert str(root) in collect(warehouse, older_than_s=0).paths
    assert not root.exists()
    assert len(warehouse.packs.ids()) == 1


def test_a_standing_recipe_sets_it_aside_so_that_the_expert_is_packed_again(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    with pytest.raises(DamagedPackError, match=r"written by another version .* set aside"):
        refuse_damaged(warehouse, {"e0": [root.name]})
    assert not root.exists()


def by_unpack(warehouse: Warehouse) -> object:
    return unpack(warehouse, "e0")


def by_merge(warehouse: Warehouse) -> object:
    return merge(warehouse, recipe())


def by_budget(warehouse: Warehouse) -> object:
    return merge(warehouse, recipe("budget: 40%\n"))


def by_pack(warehouse: Warehouse) -> object:
    return pack(warehouse, ["e0"])


def by_standing_recipe(warehouse: Warehouse) -> None:
    refuse_damaged(warehouse, {"e0": warehouse.packs.ids()})


@pytest.mark.parametrize(
    "act", [by_unpack, by_merge, by_budget, by_pack, by_standing_recipe], ids=lambda f: f.__name__
)
def test_an_expert_that_it_stands_for_comes_back_by_the_release_that_wrote_it_or_from_cold_storage(
    files: Path, tmp_path: Path, act: Callable[[Warehouse], object]
) -> None:
    warehouse, root, cold = away_with_older(tmp_path, files)
    with pytest.raises(PackVersionError) as refused:
        act(warehouse)
    assert str(refused.value.where).startswith(f"e0, {root}")
    assert (refused.value.expected, refused.value.found) == (EXPECTED, FOUND)
    assert refused.value.next_step == (
        "run `mergepipe unpack e0` with the release that wrote it, or bring the original back: "
        f"copy {cold} to {tmp_path / 'e0'}; then `mergepipe pack e0` writes it again"
    )
    collect(warehouse, older_than_s=0)
    assert root.is_dir()
    (finding,) = verify_all(warehouse, ["structure"]).findings
    assert (finding.file, finding.is_derivable) == (str(root), False)
    assert "with the release that wrote it" in finding.next_step
    assert "codec" in finding.what


def test_the_original_in_its_place_heals_all_and_then_the_pack_is_of_no_use(
    files: Path, tmp_path: Path
) -> None:
    warehouse, root, cold = away_with_older(tmp_path, files)
    shutil.copytree(cold, tmp_path / "e0")
    told = Told()
    merge(warehouse, recipe(), progress=told)
    assert [w for w in told.warnings if "mergepipe pack e0" in w]
    assert pack(warehouse, ["e0"])[0].fresh
    collect(warehouse, older_than_s=0)
    assert not root.exists()


def test_the_exit_code_is_one_of_its_own(files: Path, tmp_path: Path) -> None:
    warehouse, _, _ = away_with_older(tmp_path, files)
    done = CliRunner().invoke(main, ["--home", str(warehouse.root), "unpack", "e0"])
    assert done.exit_code == PackVersionError.exit_code
    assert "nothing is wrong with the expert" in done.output


def test_an_index_without_a_version_is_damaged(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files)
    root = warehouse.packs.path(pack(warehouse, ["e0"])[0].pack_id)
    (index,) = find_sealed(root, "index")
    index.unlink()
    write_sealed(root, "index", encode(pa.table({"x": [1]}), {}))
    assert warehouse.packs.of_other_codecs() == {}
    (finding,) = verify_all(warehouse, ["structure"]).findings
    assert finding.file == str(root)
