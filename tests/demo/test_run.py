"""The demo never touches a warehouse that is not its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.demo.demo_run import run_demo
from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.warehouse import Warehouse


@pytest.mark.parametrize("where", ["inbox/mine/model.safetensors", "snapshots/abc/manifest.json"])
def test_a_warehouse_in_use_is_refused_and_left_as_it_is(home: Warehouse, where: str) -> None:
    precious: Path = home.root / where
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"precious")
    with pytest.raises(MergePipeError, match="needs a warehouse of its own"):
        run_demo(home, print)
    assert precious.read_bytes() == b"precious"


def test_a_demo_without_its_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("demo_run", "family", "skills"):
        monkeypatch.delitem(sys.modules, f"mergepipe_pipeline.demo.{name}", raising=False)
    result = CliRunner().invoke(main, ["demo", "--home", str(tmp_path / "w")])
    assert result.exit_code == MergePipeError.exit_code
    assert "no module transformers" in result.stderr
    assert "mergepipe-pipeline[demo]" in result.stderr
