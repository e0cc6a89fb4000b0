"""What mergekit's command may be asked of its output, asked of ours."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.snapshots.find import read_manifest
from mergepipe_pipeline.snapshots.model_folder import RECIPE_FILE
from mergepipe_pipeline.verbs.merge import merge
from mergepipe_pipeline.verbs.replay import replay
from mergepipe_pipeline.warehouse import Warehouse
from tests.parity.peer import read_model
from tests.resolution.test_vocabulary import EMBEDDING, HEAD, ROWS, recipe, write
from tests.support.architectures import Tensors

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("mergekit_is_here")]


def by_mergekit(text: str, out: Path, **options: Any) -> Tensors:
    """mergekit's result with options of its command."""
    import yaml

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge
        from mergekit.options import MergeOptions

        config = MergeConfiguration.model_validate(yaml.safe_load(text))
        run_merge(config, str(out), MergeOptions(quiet=True, write_model_card=False, **options))
    return read_model(out)


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_truncated_vocabularies_are_the_shortest_as_in_mergekit_and_so_says_the_config(
    home: Warehouse, tmp_path: Path, method: str
) -> None:
    base = write(tmp_path / "base", 0)
    expert = write(tmp_path / "expert", 2, ROWS - 30, base=base)
    text = recipe(method, base, [base, expert])
    (tmp_path / "r.yml").write_text(text)
    theirs = by_mergekit(text, tmp_path / "theirs", unsafe_truncate_embeddings=True)
    outcome = merge(home, tmp_path / "r.yml", truncates=True).outcome
    ours = read_model(Path(outcome.snapshot.path))
    assert ours[EMBEDDING].shape[0] == ROWS - 30
    assert any("rows are used" in w for w in outcome.plan.warnings)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=1e-3, msg=name)
    config = json.loads((Path(outcome.snapshot.path) / "config.json").read_text())
    assert config["vocab_size"] == ROWS - 30
    assert HEAD in ours or HEAD not in theirs
    assert replay(home, outcome.snapshot.snapshot_id).layers > 0


def test_a_result_has_no_tokenizer_where_nobody_wants_one(home: Warehouse, tmp_path: Path) -> None:
    base = write(tmp_path / "base", 0)
    expert = write(tmp_path / "expert", 2, base=base)
    (tmp_path / "r.yml").write_text(recipe("linear", base, [expert, base]))
    (base / "tokenizer.json").write_text("{}")
    found = []
    for wanted in (True, False):
        snapshot = merge(home, tmp_path / "r.yml", copies_tokenizer=wanted).outcome.snapshot
        assert (Path(snapshot.path) / "tokenizer.json").exists() is wanted
        assert (Path(snapshot.path) / "config.json").exists()
        found.append(snapshot.snapshot_id)
        assert replay(home, snapshot.snapshot_id).layers > 0
    assert len(set(found)) == 2


@pytest.mark.parametrize(("size", "n_files"), [("none", 1), ("40KB", 5), ("1GB", 1)])
def test_weights_are_written_in_files_of_a_size(tmp_path: Path, size: str, n_files: int) -> None:
    base, expert = write(tmp_path / "base", 0), write(tmp_path / "expert", 2)
    (tmp_path / "r.yml").write_text(recipe("linear", base, [expert, base]))
    folders = {}
    for name, more in {"layers": [], "sized": ["--shard-size", size]}.items():
        folders[name] = tmp_path / name
        arguments = ["--home", str(tmp_path / "home"), "merge", str(tmp_path / "r.yml"), *more]
        ended = CliRunner().invoke(main, [*arguments, "--out", str(folders[name])])
        assert ended.exit_code == 0, ended.output
    ours, theirs = read_model(folders["sized"]), read_model(folders["layers"])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    files = list(folders["sized"].glob("*.safetensors"))
    assert (len(files) == 1) is (n_files == 1)
    index = folders["sized"] / "model.safetensors.index.json"
    assert index.exists() is (n_files > 1)
    if n_files > 1:
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map.keys() == ours.keys()
        assert {f.name for f in files} == set(weight_map.values())
        assert all(f.stat().st_size < 45_000 or len(load_file(f)) == 1 for f in files)
    again = CliRunner().invoke(main, [*arguments, "--out", str(folders["sized"])])
    assert again.exit_code != 0
    assert "holds a result already" in again.output
    named = folders["sized"].rename(tmp_path / read_manifest(folders["sized"]).snapshot_id)
    (named / RECIPE_FILE).unlink()  # beside the snapshot's files
    verify_snapshot(named, lambda _: None)


@pytest.mark.parametrize("size", ["0", "many", "5XB"])
def test_a_size_that_is_none_is_refused_before_anything_is_read(tmp_path: Path, size: str) -> None:
    arguments = ["--home", str(tmp_path / "home"), "merge", "r.yml", "--shard-size", size]
    ended = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "out")])
    assert ended.exit_code == 2
    assert "is no size" in ended.output
    assert not list(tmp_path.iterdir())
