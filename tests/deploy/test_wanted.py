"""What a recipe wants changes with all that goes into its result, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.deploy.recipe_files import recipe_files
from mergepipe_pipeline.deploy.standing import Standing, wanted
from mergepipe_pipeline.verbs.deploy import due
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.replace import move_to_cold
from mergepipe_pipeline.warehouse import Warehouse


@pytest.fixture
def standing(home: Warehouse, family: Path) -> Warehouse:
    """A recipe of a base and an expert in the inbox."""
    for name, source in (("base", "base"), ("expert", "expert_00")):
        shutil.copytree(family / source, home.inbox / name)
        index_arrival(home, name)
    home.recipe_path("r").write_text(
        "merge_method: task_arithmetic\nbase_model: base\n"
        "models: [{model: expert, parameters: {weight: 1}}]\n"
    )
    return home


def _wanted(home: Warehouse, changed: str = "") -> str:
    """What the recipe wants, after an input that changed was indexed."""
    if changed:
        index_arrival(home, changed)
    (file,) = recipe_files(home)
    found = wanted(home, file)
    assert found is not None
    return found


def _add_to_config(folder: Path, **values: float) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


def test_the_bases_config_and_tokenizer_are_wanted_and_those_of_an_expert_are_not(
    standing: Warehouse,
) -> None:
    before = _wanted(standing)
    _add_to_config(standing.inbox / "expert", rope_theta=77777.0)
    assert _wanted(standing, "expert") == before
    _add_to_config(standing.inbox / "base", rope_theta=77777.0)
    after = _wanted(standing, "base")
    assert after != before
    (standing.inbox / "base" / "tokenizer.json").unlink()
    assert _wanted(standing, "base") not in (before, after)


def test_an_experts_tokenizer_is_wanted_where_one_is_made_of_all(standing: Warehouse) -> None:
    with standing.recipe_path("r").open("a") as file:
        file.write("tokenizer_source: union\n")
    before = _wanted(standing)
    _add_to_config(standing.inbox / "expert", rope_theta=77777.0)
    assert _wanted(standing, "expert") != before


def test_equal_bytes_under_another_dtype_are_wanted_anew(standing: Warehouse) -> None:
    before = _wanted(standing)
    (file,) = (standing.inbox / "expert").glob("*.safetensors")
    values = {name: t.view(torch.float16) for name, t in load_file(file).items()}
    save_file(values, file, metadata={"format": "pt"})
    assert _wanted(standing, "expert") != before


def test_files_that_are_touched_are_wanted_as_before(standing: Warehouse) -> None:
    before = _wanted(standing)
    for path in (standing.inbox / "base").iterdir():
        os.utime(path, (1, 1))
    assert _wanted(standing, "base") == before


def test_the_base_of_the_last_stage_gives_the_config_that_is_wanted(
    standing: Warehouse, family: Path
) -> None:
    shutil.copytree(family / "base", standing.inbox / "base2")
    index_arrival(standing, "base2")
    first = standing.recipe_path("r").read_text()
    standing.recipe_path("r").write_text(
        f"name: first\n{first}---\nmerge_method: linear\nbase_model: base2\n"
        "models: [{model: first, parameters: {weight: 1}}]\n"
    )
    before = _wanted(standing)
    _add_to_config(standing.inbox / "base", rope_theta=77777.0)
    assert _wanted(standing, "base") == before
    _add_to_config(standing.inbox / "base2", rope_theta=77777.0)
    assert _wanted(standing, "base2") != before


def test_moving_an_expert_to_cold_storage_wants_nothing_new(
    standing: Warehouse, tmp_path: Path
) -> None:
    with standing.recipe_path("r").open("a") as file:
        file.write("tokenizer_source: union\n")
    before = _wanted(standing)
    (packed,) = pack(standing, ["expert"], base="base")
    move_to_cold(standing, packed, tmp_path / "cold")
    assert not list((standing.inbox / "expert").glob("*.safetensors"))
    assert _wanted(standing) == before


def test_a_recipe_waits_for_what_lies_in_the_inbox_and_asks_for_what_does_not(
    home: Warehouse, family: Path
) -> None:
    models = "".join(f"- {{model: {n}, parameters: {{weight: 1}}}}\n" for n in ("a", "b"))
    home.recipe_path("r").write_text(f"merge_method: linear\nmodels:\n{models}")

    def where() -> Standing:
        (file,) = recipe_files(home)
        found = due(home, file)
        assert isinstance(found, Standing)
        return found

    assert where().why == "a, b are not registered yet."
    shutil.copytree(family / "base", home.inbox / "a")
    assert where().why == "b is not registered yet."
    assert "copy to inbox" in where().then
    shutil.copytree(family / "expert_00", home.inbox / "b")
    assert (where().state, where().why) == (
        "waiting",
        "it waits for the index of what lies in the inbox: a, b",
    )
    index_arrival(home, "a")
    assert where().why == "it waits for the index of what lies in the inbox: b"
    (home.inbox / "b" / "model.safetensors").write_bytes(b"")
    assert where().state == "cannot be used"
