"""The command `calibrate`, and `sql` as it introduces itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.catalog.views import VIEWS
from mergepipe_pipeline.cli.main import main

pytestmark = pytest.mark.usefixtures("durable_writes")


def run(home: Path, *words: str) -> str:
    result = CliRunner().invoke(main, [*words, "--home", str(home)])
    if "stays in the page cache" in result.output:
        pytest.skip("this file system keeps files in memory")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_calibrate_prints_the_profile_for_people_and_machines(tmp_path: Path) -> None:
    text = run(tmp_path, "calibrate", "--storage-only", "--size", "8")
    assert "as long as reading" in text
    assert "scattered" in text
    told = json.loads(run(tmp_path, "calibrate", "--storage-only", "--size", "8", "--json"))
    assert told["where"] == str(tmp_path)
    assert told["seek_nbytes"] == round(told["seek_s"] * told["read_bytes_per_s"])
    assert told["observations"][-1] == {
        "seeks": 1,
        "nbytes": 4 << 20,
        "seconds": told["observations"][-1]["seconds"],
    }


def test_sql_without_a_query_tells_every_view_and_column(tmp_path: Path) -> None:
    text = run(tmp_path, "sql")
    told = json.loads(run(tmp_path, "sql", "--json"))
    assert set(told) == set(VIEWS)
    for name, view in VIEWS.items():
        assert f"{name}: {view.what}" in text
        assert told[name]["columns"] == dict(view.columns)
        assert all(meaning in text for meaning in view.columns.values())
