"""Whoever pushes a pack is not believed: of a forged one nothing stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest

from mergepipe_pipeline.digest import seal, sha256_hex, unseal
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.packs.portable import PortableFile, PortablePack
from mergepipe_pipeline.verbs.pull_pack import pull_packs
from mergepipe_pipeline.verbs.push_pack import push_pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.families import packed_family, write_family
from tests.remote.writing.watched_s3 import WatchedS3

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """The machine where experts e0 and e1 were packed."""
    folder = tmp_path_factory.mktemp("here")
    write_family(folder / "family")
    return packed_family(folder, folder / "family")


@pytest.fixture
def there(here: Warehouse, tmp_path: Path) -> Warehouse:
    """Another machine, which has the base and an expert of its own."""
    warehouse = Warehouse.at(tmp_path / "there").ensure()
    for name in ("base", "e1"):
        shutil.copytree(here.root.parent / name, tmp_path / name)
        register(warehouse, tmp_path / name, name, None if name == "base" else "base")
    return warehouse


class Pushed:
    """The pack of an expert at an address, whose files may be changed."""

    def __init__(self, here: Warehouse, s3: WatchedS3, bucket: str, name: str = "e0") -> None:
        self.address = f"s3://{bucket}/{name}"
        push_pack(here, name, self.address)
        self._store = s3.store(bucket)
        key = next(k for k in s3.keys(bucket) if k.startswith(name) and k.endswith("/expert.json"))
        self._folder = key.removesuffix("expert.json")
        self.claim = self.read("expert.json")
        self.known = PortablePack.from_bytes(self.claim, "")
        self.expert = self.known.expert
        self.files = {f.name: self.read(f.name) for f in self.known.files}

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self._store, f"{self._folder}{name}").bytes())

    def push(self, expert: OfflineExpert, files: Files) -> None:
        """Put other files there, and say that they belong to it."""
        told = tuple(
            PortableFile(name=n, nbytes=len(data), sha256=sha256_hex(data))
            for n, data in files.items()
        )
        claim = replace(self.known, expert=expert, files=told).to_bytes()
        self.put({**files, "expert.json": claim})

    def put(self, files: Files) -> None:
        """Put these files there, EXPERT among them."""
        for name, data in files.items():
            obstore.put(self._store, f"{self._folder}{name}", data)


@pytest.fixture
def pushed(here: Warehouse, s3: WatchedS3, bucket: str) -> Pushed:
    return Pushed(here, s3, bucket)


def refused(there: Warehouse, pushed: Pushed, kind: type[MergePipeError] = CorruptionError) -> str:
    """What is said of a pack that is not taken; nothing of it is there."""
    before = set(there.root.rglob("*"))
    with pytest.raises(kind) as caught:
        pull_packs(there, pushed.address)
    base_id = there.catalog.get("base").checkpoint.checkpoint_id  # whose digests are taken
    added = [p for p in set(there.root.rglob("*")) - before if p.is_file()]
    assert all(base_id in str(p) or "leases" in p.parts for p in added)
    assert there.catalog.names() == ["base", "e1"]
    assert (there.packs.ids(), there.offline.ids()) == ([], [])
    return str(caught.value)


def test_a_pack_of_another_version_keeps_no_other_at_the_address_from_being_taken(
    here: Warehouse, s3: WatchedS3, bucket: str, tmp_path: Path
) -> None:
    to, store = f"s3://{bucket}/experts", s3.store(bucket)
    for name in ("e0", "e1"):
        push_pack(here, name, to)
    for key in (k for k in s3.keys(bucket) if k.endswith("/expert.json")):
        told = bytes(obstore.get(store, key).bytes())
        if PortablePack.from_bytes(told, key).expert.name == "e0":
            obstore.put(store, key, seal({**unseal(told, ""), "format": "mergepipe-portable/2"}))
    home = Warehouse.at(tmp_path / "home").ensure()
    shutil.copytree(here.root.parent / "base", tmp_path / "base")
    register(home, tmp_path / "base", "base")
    for names in (["e0"], []):
        with pytest.raises(CorruptionError, match="push it again"):
            pull_packs(home, to, names)
    assert home.catalog.names() == ["base", "e1"]
    assert [(p.name, p.fresh) for p in pull_packs(home, to, ["e1"])] == [("e1", False)]


@pytest.mark.parametrize("of", ["frames", "leftover", "both"])
def test_weights_of_another_expert_are_refused(
    here: Warehouse, there: Warehouse, pushed: Pushed, s3: WatchedS3, bucket: str, of: str
) -> None:
    other = Pushed(here, s3, bucket, "e1")
    kinds = ("frames", "chunks", "leftover") if of == "both" else (of, "chunks")
    names = [n for n in pushed.files if n.endswith(kinds)]
    if of == "leftover":
        names.remove("chunks")
    pushed.push(pushed.expert, {**pushed.files, **{n: other.files[n] for n in names}})
    assert refused(there, pushed)


def test_frames_that_cannot_be_decoded_are_refused(there: Warehouse, pushed: Pushed) -> None:
    frames = pushed.files["X.frames"]
    pushed.push(pushed.expert, {**pushed.files, "X.frames": bytes(len(frames))})
    assert "frame" in refused(there, pushed)


@pytest.mark.parametrize("share", [0, 0.5])
def test_places_of_frames_that_do_not_fill_their_files_are_refused(
    there: Warehouse, pushed: Pushed, share: float
) -> None:
    chunks = pushed.files["chunks"]
    n = int(share * len(chunks))
    pushed.push(pushed.expert, {**pushed.files, "chunks": bytes(n) + chunks[n:][: len(chunks) - 1]})
    assert "does not fit the pack" in refused(there, pushed)


@pytest.mark.parametrize("name", ["beside/x.py", "beside/other.safetensors", "junk.bin"])
def test_what_goes_with_no_model_is_refused(there: Warehouse, pushed: Pushed, name: str) -> None:
    pushed.push(pushed.expert, {**pushed.files, name: b"junk"})
    assert refused(there, pushed, MergePipeError)


def _first(change: Callable[[Any], Any]) -> Callable[[OfflineExpert], OfflineExpert]:
    """Change the first weight file of a record."""

    def changed(expert: OfflineExpert) -> OfflineExpert:
        return replace(expert, files=(change(expert.files[0]), *expert.files[1:]))

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda e: replace(e, name="not a name!"),
        lambda e: replace(e, files=()),
        lambda e: replace(e, checkpoint_id="0" * 24),
        lambda e: replace(e, files=(*e.files, replace(e.files[0], path=f"{e.files[0].path}/x"))),
        _first(lambda f: replace(f, tensors=(("nope", *f.tensors[0][1:]), *f.tensors[1:]))),
        _first(lambda f: replace(f, tensors=(f.tensors[0], *f.tensors))),
        _first(lambda f: replace(f, nbytes=f.nbytes // 2)),
        _first(lambda f: replace(f, tensors=((f.tensors[0][0], -8, f.tensors[0][2]),))),
        _first(lambda f: replace(f, path="config.json")),
    ],
)
def test_a_record_that_does_not_fit_to_its_pack_is_refused_and_leaves_nothing(
    there: Warehouse, pushed: Pushed, change: Callable[[OfflineExpert], OfflineExpert]
) -> None:
    pushed.push(change(pushed.expert), pushed.files)
    assert refused(there, pushed, MergePipeError)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("expert", "base"), ["base"]),
        (("expert", "checkpoint_id"), "../../x"),
        (("expert", "root"), "/etc"),
        (("expert", "files", 0, "mtime_ns"), 1 << 70),
        (("expert", "files", 0, "nbytes"), None),
        (("expert", "files", 0, "leftover_sha256"), ""),
        (("expert", "files", 0, "path"), "../x"),
        (("expert", "files", 0, "sha256"), 5),
        (("expert", "files", 0, "tensors"), [["a", 1.5, 1]]),
        (("expert", "pack_id"), ".."),
        (("tensors", 0, "dtype"), "I64"),
        (("units", 0), 1e300),
        (("tensors", 0, "shape"), [1 << 60]),
        (("files", 0, "nbytes"), True),
        (("files", 0, "name"), "index.exe"),
    ],
)
def test_every_value_of_what_describes_a_pack_has_a_type_and_a_form(
    there: Warehouse, pushed: Pushed, place: tuple[Any, ...], value: object
) -> None:
    told = unseal(pushed.claim, "")
    holder = told
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    pushed.put({"expert.json": seal(told)})
    assert "The file that describes a pack" in refused(there, pushed)


def test_an_expert_that_is_offline_here_is_not_taken_over_by_another_name(
    there: Warehouse, pushed: Pushed
) -> None:
    pull_packs(there, pushed.address)
    known = there.offline.find(pushed.expert.checkpoint_id)
    pushed.push(replace(pushed.expert, name="beta"), pushed.files)
    with pytest.raises(MergePipeError, match="is here under another name"):
        pull_packs(there, pushed.address)
    assert there.offline.find(pushed.expert.checkpoint_id) == known
    assert there.catalog.names() == ["base", "e0", "e1"]
