"""Packs of another version of the codec: nothing is wrong with them, and they are written again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from mergepipe_pipeline.catalog.arrow_tables import decode, encode
from mergepipe_pipeline.catalog.seals import find_sealed, read_sealed, write_sealed
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.pack import CODEC_VERSION, TIERS
from mergepipe_pipeline.errors import PackVersionError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_layers
from mergepipe_pipeline.facts.damaged_packs import refuse_damaged
from mergepipe_pipeline.packs.index import INDEX
from mergepipe_pipeline.packs.store import open_pack
from mergepipe_pipeline.recipe.structure import ParsedRecipe
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import packed_family, write_family

RECIPE = """
merge_method: task_arithmetic
base_model: base
models: [{model: e0}, {model: e1}]
parameters: {weight: 0.5}
"""
OTHER = f"0{CODEC_VERSION}"


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
    name = digest_json([OTHER, TIERS, sorted(open_pack(root).contents.values())])
    final = root.with_name(name) if is_renamed else root
    index.unlink()
    if is_renamed:
        root.rename(final)
    for path in [p for p in final.glob("*.parquet") if p.name.startswith(("chunks", "sums"))]:
        assert path.stat().st_size  # other columns and seals: nothing may depend on these
        path.write_bytes(b"of another form")
    write_sealed(final, "index", encode(table, {**meta, "codec": OTHER}))
    return final


def older(warehouse: Warehouse, name: str, *, is_renamed: bool = True) -> Path:
    """The pack of an expert, of another version of the codec; or of the files beside frames."""
    root = warehouse.packs.path(pack(warehouse, [name])[0].pack_id)
    return of_other_codec(root, is_renamed=is_renamed)


@pytest.mark.parametrize("extra", ["", "budget: 40%\n"])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_merge_goes_on_from_the_original(
    files: Path, tmp_path: Path, extra: str, is_renamed: bool
) -> None:
    warehouse, without = (packed_family(tmp_path / name, files) for name in ("a", "b"))
    older(warehouse, "e0", is_renamed=is_renamed)
    shutil.rmtree(without.packs.path(pack(without, ["e0"])[0].pack_id))
    found = merge(warehouse, recipe(extra)).outcome
    wanted = merge(without, recipe(extra)).outcome
    assert found.snapshot.snapshot_id == wanted.snapshot.snapshot_id
    assert pack(warehouse, ["e0"])[0].fresh


def test_the_command_that_packs_writes_it_again_and_takes_nothing_from_it(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    same = older(warehouse, "e1", is_renamed=False)
    made, again = pack(warehouse, ["e0", "e1"])
    assert (made.fresh, made.taken_over, again.fresh) == (True, 0, True)
    assert made.pack_id != root.name
    assert again.pack_id == same.name


def test_whoever_opens_it_is_told_what_wrote_it_and_that_nothing_is_wrong(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    with pytest.raises(PackVersionError, match=r"another version .* nothing is wrong") as refused:
        warehouse.packs.open(root.name)
    assert refused.value.found == f"version {OTHER}"
    assert "mergepipe pack" in str(refused.value.next_step)


def test_a_plan_that_names_it_says_to_run_again_and_sets_it_aside(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    plan = make_plan(warehouse, recipe("budget: 12.5%\n"))
    root = older(warehouse, "e0", is_renamed=False)
    with pytest.raises(PackVersionError, match="set aside") as refused:
        list(run_layers(warehouse, plan))
    assert "`mergepipe pack e0`" in str(refused.value.next_step)
    assert not root.exists()


def test_verify_and_ls_tell_of_it_and_gc_removes_it(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    (finding,) = verify_all(warehouse).findings
    assert (finding.file, finding.is_derivable) == (str(root), True)
    assert [row["name"] for row in ls(warehouse).damaged] == [root.name]
    assert str(root) in collect(warehouse, older_than_s=0).paths
    assert not root.exists()
    assert len(warehouse.packs.ids()) == 1


def test_a_standing_recipe_sets_it_aside_so_that_the_expert_is_packed_again(
    files: Path, tmp_path: Path
) -> None:
    warehouse = packed_family(tmp_path, files)
    root = older(warehouse, "e0")
    with pytest.raises(PackVersionError, match=r"written by another version .* set aside"):
        refuse_damaged(warehouse, {"e0": [root.name]})
    assert not root.exists()


def test_an_index_without_a_version_is_damaged(files: Path, tmp_path: Path) -> None:
    warehouse = packed_family(tmp_path, files)
    root = warehouse.packs.path(pack(warehouse, ["e0"])[0].pack_id)
    (index,) = find_sealed(root, "index")
    index.unlink()
    write_sealed(root, "index", encode(pa.table({"x": [1]}), {}))
    (finding,) = verify_all(warehouse, ["structure"]).findings
    assert finding.file == str(root)
