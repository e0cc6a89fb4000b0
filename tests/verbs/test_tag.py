"""Tags of names: whom they are refused, what shows them, and what becomes of damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.ls import ls
from mergepipe_pipeline.verbs.register import register, tag
from mergepipe_pipeline.verbs.repair import set_aside
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse


def test_a_name_keeps_its_tags_over_versions_and_shows_them(home: Warehouse, family: Path) -> None:
    register(home, family / "expert_00", "math")
    tag(home, "math", add=["prod", "old"])
    register(home, family / "expert_01", "math")
    told = CliRunner().invoke(main, ["tag", "math", "--remove", "old", "--home", str(home.root)])
    assert told.output == "math: prod\n"
    (row,) = ls(home).checkpoints
    assert (row["version"], row["tags"]) == (2, ["prod"])


def test_what_lands_has_its_tags_before_it_is_seen(home: Warehouse, family: Path) -> None:
    land(home, str(family / "expert_00"), "math", tags=["prod"])
    assert tag(home, "math") == {"prod"}
    with pytest.raises(MergePipeError, match="Not a tag"):
        land(home, str(family / "expert_00"), "code", tags=["a b"])
    assert not (home.inbox / "code").exists()


def test_an_unknown_name_has_no_tags_and_damaged_ones_are_found_and_set_aside(
    home: Warehouse, family: Path
) -> None:
    register(home, family / "expert_00", "math")
    with pytest.raises(NotFoundError, match="math"):
        tag(home, "maht", add=["prod"])
    tag(home, "math", add=["prod"])
    tag(home, "math", add=["new"])
    assert verify_all(home).ok
    file = home.catalog_dir / "tags" / "math" / "00000002.json"
    file.write_bytes(file.read_bytes().replace(b"new", b"odd"))
    assert not verify_all(home).ok
    (done,) = set_aside(home)
    assert done == "tags of math: version 2 damaged, set aside; version 1 counts: prod"
    assert tag(home, "math") == {"prod"}
