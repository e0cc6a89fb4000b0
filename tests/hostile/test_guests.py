"""Verbs that copy a checkpoint take its model's files: no private file that a link leads to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.push_pack import push_pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import write_family
from tests.remote.writing.watched_s3 import watched_s3

KEY = b"-----BEGIN PRIVATE KEY----- of the user"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private file outside of every model."""
    path = tmp_path / "ssh" / "id_x"
    path.parent.mkdir()
    path.write_bytes(KEY)
    return path


@pytest.fixture
def family(tmp_path: Path) -> Path:
    write_family(tmp_path / "family")
    return tmp_path / "family"


def has_key(folder: Path) -> bool:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return any(KEY in p.read_bytes() for p in files)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tokenizer.json", lambda model, key: model.symlink_to(key)),
        ("config.json", lambda model, key: model.symlink_to(key)),
        ("README.md", lambda model, key: model.symlink_to(key)),
        ("additional_chat_templates", lambda model, key: model.symlink_to(key.parent)),
        ("vocab.json", lambda model, key: os.mkfifo(model)),
    ],
)
def test_a_file_of_a_model_that_leads_elsewhere_does_not_land(
    home: Warehouse,
    family: Path,
    key: Path,
    name: str,
    place: Callable[[Path, Path], None],
    link: bool,
) -> None:
    (key.parent / "x.jinja").write_bytes(KEY)
    (family / "e0" / name).unlink(missing_ok=True)
    place(family / "e0" / name, key)
    with pytest.raises(CheckpointError, match=r"A link leaves its checkpoint|no regular file"):
        land(home, str(family / "e0"), link=link)
    assert list(home.inbox.iterdir()) == []
    assert not has_key(home.root)


@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_part_of_a_model_is_left_out_by_name_and_links_inside_are_files(
    home: Warehouse, family: Path, key: Path, link: bool
) -> None:
    folder = family / "e0"
    (folder / "id").symlink_to(key)
    (folder / "ssh").symlink_to(key.parent)
    os.mkfifo(folder / "pipe")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "real.json").write_text("{}")
    (folder / "vocab.json").symlink_to("real.json")
    (folder / "tokenizer.json").hardlink_to(folder / "real.json")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    done = land(home, str(folder), link=link)
    assert done.left_out == ("id", "modeling.py", "pipe", "real.json", "ssh")
    landed = sorted(p.name for p in Path(done.path).iterdir())
    weights = [p.name for p in folder.glob("*.safetensors")]
    assert landed == sorted(["README.md", "config.json", "tokenizer.json", "vocab.json", *weights])
    assert all(p.is_file() and not p.is_symlink() for p in Path(done.path).iterdir())
    assert not has_key(home.root)


def test_a_pack_takes_no_private_file_along_neither_to_cold_storage_nor_to_a_bucket(
    home: Warehouse,
    family: Path,
    key: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("base", "e0"):
        register(home, family / name, name, None if name == "base" else "base")
    (packed,) = pack(home, ["e0"])
    (family / "e0" / "notes").symlink_to(key)
    (family / "e0" / ".env").write_bytes(KEY)
    with watched_s3() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        s3.make("guests")
        push_pack(home, "e0", "s3://guests/x")
        sent = [bytes(obstore.get(s3.store("guests"), k).bytes()) for k in s3.keys("guests")]
    assert sent
    assert not any(KEY in data for data in sent)
    move_to_cold(home, packed, tmp_path / "cold")
    assert (family / "e0" / "notes").is_symlink()
    assert not has_key(tmp_path / "cold")
    assert not has_key(home.root)
