"""What is beside the weights is published only if it belongs to the model, and as it was read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mergepipe_pipeline.errors import CheckpointError, RecipeError
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.execution.stages import plan_in_stages
from mergepipe_pipeline.resolution.recipe_text import load_recipe, parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.hostile.corpus import CONFIG, SIDE, TEXTS

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"
MADE = {CONFIG, "README.md", "model.safetensors.index.json"}


@pytest.fixture
def base(tmp_path: Path, family: Path) -> Path:
    """A base with side files, and others that are nobody's business."""
    base = tmp_path / "base"
    shutil.copytree(family / "base", base)
    for name, data in SIDE.items():
        (base / name).write_bytes(data)
    (base / "tokenizer.json.bak").write_bytes(SECRET)
    (base / "vocab-secret").write_bytes(SECRET)
    (base / os.fsdecode(b"tokenizer\xff.json")).write_bytes(SECRET)
    return base


@pytest.fixture
def text(base: Path, family: Path, recipe_text: Callable[..., str]) -> str:
    return recipe_text("linear", "", experts=1).replace(str(family / "base"), str(base))


def test_a_snapshot_has_the_known_side_files_bit_for_bit_and_no_other(
    home: Warehouse, base: Path, text: str
) -> None:
    snapshot = run_plan(home, plan_in_stages(home, parse(text, name="t", where="t"))).snapshot
    manifest = json.loads((Path(snapshot.path) / "manifest.json").read_bytes())
    found = {side["file"]: side for side in manifest["side_files"]}
    assert found.keys() == MADE | SIDE.keys()
    for name, side in found.items():
        data = (Path(snapshot.path) / name).read_bytes()
        assert (side["sha256"], side["nbytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
        assert name in MADE or data == SIDE[name]
    files = [p for p in Path(snapshot.path).iterdir() if p.name not in MADE]
    assert not any(SECRET in p.read_bytes() for p in files)


@pytest.mark.parametrize("name", [CONFIG, "tokenizer.json", "spiece.model"])
def test_a_side_file_that_becomes_a_link_after_planning_is_not_published(
    home: Warehouse, base: Path, text: str, name: str
) -> None:
    plan = plan_in_stages(home, parse(text, name="t", where="t"))
    (base.parent / "id_rsa").write_bytes(SECRET)
    (base / name).unlink()
    (base / name).symlink_to("../id_rsa")
    with pytest.raises(CheckpointError, match=rf"link leaves its checkpoint.*{name}.*id_rsa"):
        run_plan(home, plan)
    assert list(home.snapshots.iterdir()) == list(home.staging.iterdir()) == []


@pytest.mark.parametrize("config", ["[]", '{"x": "\\ud800"}', '{"text_config": 5}'])
def test_a_config_that_is_replaced_after_planning_is_refused(
    home: Warehouse, base: Path, text: str, config: str
) -> None:
    (base / CONFIG).write_text('{"text_config": {"vocab_size": 1}}')
    plan = plan_in_stages(home, parse(text, name="t", where="t"))
    assert plan.side.config[0][0] == "text_config.vocab_size"
    (base / CONFIG).write_text(config)
    with pytest.raises(CheckpointError, match=r"config.*config\.json"):
        run_plan(home, plan)
    assert list(home.snapshots.iterdir()) == list(home.staging.iterdir()) == []


@pytest.mark.parametrize("extra", ["tokenizer_source: union", "chat_template: chatml"])
@pytest.mark.parametrize("what", TEXTS)
def test_a_hostile_tokenizer_is_refused_by_check_where_it_is_used(
    home: Warehouse, base: Path, text: str, what: str, extra: str
) -> None:
    (base / "tokenizer_config.json").write_bytes(TEXTS[what].replace(b"%s", b""))
    raw = parse(f"{text}\n{extra}\n", name="t", where="t")
    with pytest.raises(CheckpointError, match=r"tokenizer file cannot.*tokenizer_config\.json"):
        resolve(home, raw)


def test_a_recipe_that_is_no_regular_file_or_is_endless_is_refused(
    tmp_path: Path, home: Warehouse
) -> None:
    os.mkfifo(tmp_path / "fifo.yml")
    (tmp_path / "large.yml").touch()
    os.truncate(tmp_path / "large.yml", 1 << 40)
    (tmp_path / "loop.yml").symlink_to("loop.yml")
    for name in ("fifo.yml", "large.yml", "loop.yml", "gone.yml", ".", "/dev/zero", "x" * 5000):
        with pytest.raises(RecipeError, match="cannot be read"):
            load_recipe(tmp_path / name, home)


def test_a_recipe_may_be_a_link_and_its_name_may_be_no_text(
    tmp_path: Path, text: str, home: Warehouse
) -> None:
    (tmp_path / "r.yml").write_text(text)
    (tmp_path / "link.yml").symlink_to("r.yml")
    assert load_recipe(tmp_path / "link.yml", home).name == "link"
    (tmp_path / os.fsdecode(b"\xff.yml")).write_text(text)
    with pytest.raises(RecipeError, match="name cannot be its ref") as caught:
        load_recipe(tmp_path / os.fsdecode(b"\xff.yml"), home)
    assert str(caught.value).encode()
