"""Every hostile folder is refused wherever it enters, at once, and its neighbours are not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.deploy.inbox import scan_inbox
from mergepipe_pipeline.warehouse import Warehouse
from tests.hostile.corpus import CORPUS, Build, write_adapter, write_full, write_sharded

#: Far above what an answer takes, far below a hang.
LIMIT_S = 5.0


@contextmanager
def at_once() -> Iterator[None]:
    """Fails what takes longer than the limit, also if it hangs in a system call."""

    def late(*_: object) -> None:
        pytest.fail(f"no answer after {LIMIT_S} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def inbox(home: Warehouse) -> Path:
    write_full(home.inbox / "good")
    return home.inbox


def recipe_of(home: Warehouse, folder: Path) -> Path:
    path = home.root.parent / "r.yml"
    path.write_text(
        f"merge_method: task_arithmetic\nbase_model: {home.inbox / 'good'}\n"
        f"models:\n  - model: {folder}\n    parameters: {{weight: 1.0}}\n"
    )
    return path


def written(home: Warehouse) -> list[Path]:
    return [p for f in home.root.iterdir() if f != home.inbox for p in f.iterdir()]


@pytest.mark.parametrize("write", [write_full, write_sharded, write_adapter])
def test_the_sound_folders_that_the_corpus_breaks_are_taken(
    home: Warehouse, inbox: Path, write: Callable[[Path], Path]
) -> None:
    write(inbox / "hostile")
    assert [x.waiting for x in scan_inbox(home, 0.0)] == [None, None]


@pytest.mark.parametrize(("name", "build"), CORPUS, ids=[name for name, _ in CORPUS])
def test_a_hostile_folder_is_refused_in_inbox_register_and_check(
    home: Warehouse, inbox: Path, name: str, build: Build
) -> None:
    build(inbox / "hostile")
    with at_once():
        good, hostile = scan_inbox(home, 0.0)
        assert (good.name, good.waiting, hostile.name) == ("good", None, "hostile")
        assert hostile.waiting
        for words in (
            ["register", inbox / "hostile"],
            ["check", recipe_of(home, inbox / "hostile")],
        ):
            result = CliRunner().invoke(main, [*map(str, words), "--home", str(home.root)])
            assert result.exit_code not in (0, 1, 2), result.output
            assert "Traceback" not in result.output
    assert written(home) == []


def test_the_corpus_is_large_and_its_names_are_its_own() -> None:
    assert len({name for name, _ in CORPUS}) == len(CORPUS) >= 60


@pytest.mark.parametrize(
    "path", ["loop", "x" * 5000, "x/" * 3000, "pipe", "b\udcff", "gone", "/dev/zero"]
)
def test_a_path_that_cannot_be_a_model_s_is_refused(
    home: Warehouse, inbox: Path, tmp_path: Path, path: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    recipe = recipe_of(home, tmp_path / (path if path.isascii() else "gone"))
    with at_once():
        for words in (["register", str(tmp_path / path)], ["check", str(recipe)]):
            result = CliRunner().invoke(main, [*words, "--home", str(home.root)])
            assert result.exit_code == 12, result.output
    assert written(home) == []
