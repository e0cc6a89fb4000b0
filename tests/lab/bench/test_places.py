"""Where benches write when nobody says where."""

from __future__ import annotations

import argparse
import importlib
import subprocess
from pathlib import Path

import pytest

from tests.lab.bench import FOLDER

HERE = Path(__file__).parent
BENCHES = sorted({p.stem for p in HERE.glob("bench_*.py")} | {"family"})


class _ParsedError(Exception):
    pass


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_writes_under_the_one_folder_that_git_ignores(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers: list[argparse.ArgumentParser] = []

    def caught(self: argparse.ArgumentParser) -> None:
        parsers.append(self)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", caught)
    with pytest.raises(_ParsedError):
        importlib.import_module(f"tests.lab.bench.{name}").main()
    places = [a.default for a in parsers[0]._actions if a.dest in ("home", "families", "out")]
    assert any(places)
    assert all(Path(p).is_relative_to(FOLDER) for p in places if p)


def test_git_tracks_nothing_in_that_folder_and_ignores_it() -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE.parents[2]), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    if not (HERE.parents[2] / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = git("ls-files").splitlines()
    assert [f for f in tracked if f.startswith(("bench", "warehouse/", "demo-warehouse"))] == []
    assert git("check-ignore", f"{FOLDER}/anything")
