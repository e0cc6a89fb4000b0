"""A place where no export can be is refused before any work, and nothing is made there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.snapshots.export import check_out


@pytest.fixture
def warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A warehouse beside links, files and a pipe; the current folder is `here`."""
    for name in ("here", "empty", "piped", "outer/w/objects"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "way").symlink_to("outer/w")
    os.mkfifo(tmp_path / "piped" / "manifest.json")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "outer"))
    return tmp_path / "outer" / "w"


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("", "an empty name"),
        ("s3://bucket/model", "an address: `mergepipe push`"),
        (Path("https://host/model"), "an address: `mergepipe push`"),
        (".", "the current folder"),
        ("../here", "the current folder"),
        ("~", "the warehouse at"),
        ("~/w", "the warehouse at"),
        ("~/w/objects/out", "the warehouse at"),
        ("../way/out", "the warehouse at"),
        ("..", "the warehouse at"),
        ("/", "the warehouse at"),
        ("~no-such-user", "home directory"),
        ("../link", "a link"),
        ("../dangling", "a link"),
        ("../loop", "a link"),
        ("../loop/out", "loop"),
        ("../file", "Something else is in the output folder's place"),
        ("../file/out", "Not a directory"),
        ("../piped", "other files"),
        ("n" * 250, "File name too long"),
        (f"deep/{'n' * 300}/out", "File name too long"),
        ("n/" * 2030, "File name too long"),
        ("/proc/out", "The output folder cannot be there"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    warehouse: Path, tmp_path: Path, out: str | Path, told: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MergePipeError) as caught:
        check_out(out, warehouse)
    assert told in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("out", "place"),
    [
        ("new", "here/new"),
        ("../empty", "empty"),
        ("~/new", "outer/new"),
        ("a/b/../c", "here/a/c"),
        ("n" * 200, "here/" + "n" * 200),
        ("../link/out", "empty/out"),
    ],
)
def test_a_place_that_can_be_is_absolute_and_nothing_is_made(
    warehouse: Path, tmp_path: Path, out: str, place: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert check_out(out, warehouse) == tmp_path / place
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("out", ["", ".", "{w}/x", "n" * 250, "~no-such-user"])
def test_a_merge_says_so_before_it_does_anything(
    tmp_path: Path, recipe_text: Callable[..., str], out: str
) -> None:
    recipe, home = tmp_path / "r.yml", tmp_path / "w"
    recipe.write_text(recipe_text(experts=1))
    words = ["merge", str(recipe), "--home", str(home), "--out", out.format(w=home)]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, "The output folder cannot be there" in result.stderr) == (10, True)
    assert not home.exists()
