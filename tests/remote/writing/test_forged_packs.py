"""Whoever pushes a pack is not believed: of a forged one nothing stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import obstore
import pytest

from mergepipe_pipeline.digest import seal, sha256_hex, unseal
from mergepipe_pipeline.domain.pack import TIERS, PackedTensor, Tier
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.packs.index import frames_path, pack_id_of, write_index
from mergepipe_pipeline.packs.replaced import Replaced
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.packs.travelling import TravellingFile, from_bytes, to_bytes
from mergepipe_pipeline.verbs.pack import pack as make_pack
from mergepipe_pipeline.verbs.pull_pack import pull_packs
from mergepipe_pipeline.verbs.push_pack import push_pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.torture.packed import Forger, PackParts
from tests.packs.families import packed_family, write_family
from tests.remote.writing.watched_s3 import WatchedS3

Tensors = dict[str, PackedTensor]


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
    """The pack of e0 at an address, whose files may be changed."""

    def __init__(self, here: Warehouse, s3: WatchedS3, bucket: str) -> None:
        self.address = f"s3://{bucket}/x"
        push_pack(here, "e0", self.address)
        self._store = s3.store(bucket)
        keys = [k for k in s3.keys(bucket) if k.endswith("/expert.json")]
        self._folder = keys[0].removesuffix("expert.json")
        told = from_bytes(self.read("expert.json"), "")
        self.record, self.files = told.record, {f.name: self.read(f.name) for f in told.files}

    def read(self, name: str) -> bytes:
        return bytes(obstore.get(self._store, f"{self._folder}{name}").bytes())

    def push(self, record: Replaced, files: dict[str, bytes]) -> None:
        """Put other files there, and say that they belong to it."""
        obstore.delete(self._store, f"{self._folder}expert.json")
        self._folder = f"x/packs/{record.pack_id}/"
        told = [TravellingFile(n, len(data), sha256_hex(data)) for n, data in files.items()]
        for name, data in {**files, "expert.json": to_bytes(record, told)}.items():
            obstore.put(self._store, f"{self._folder}{name}", data)

    def push_files(self, pack_id: str, files: dict[str, bytes]) -> None:
        """Put these files there, EXPERT among them."""
        obstore.delete(self._store, f"{self._folder}expert.json")
        for name, data in files.items():
            obstore.put(self._store, f"x/packs/{pack_id}/{name}", data)


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
    assert (there.packs.ids(), there.replaced.ids()) == ([], [])
    return str(caught.value)


def packed(here: Warehouse, name: str) -> tuple[Pack, Tensors]:
    """The pack of an expert, and its tensors with their arrays."""
    digests = here.catalog.digests(here.catalog.get(name).checkpoint.checkpoint_id) or {}
    (found,) = (p for p in map(here.packs.open, here.packs.ids()) if p.holds(digests))
    return found, dict(found.tensors)


def files_of(
    folder: Path, tensors: Tensors, roots: dict[Tier, Path]
) -> tuple[str, dict[str, bytes]]:
    """The id and the files of a pack that was put together; each tier's frames are of a root."""
    tiers = tuple(roots)
    pack_id = pack_id_of([t.content for t in tensors.values()], tiers)
    root = folder / "packs" / pack_id  # which seals cover
    root.mkdir(parents=True)
    for tier, other in roots.items():
        shutil.copy(frames_path(other, tier), root)
    write_index(root, root, tiers, list(tensors.values()))
    return pack_id, {p.name: p.read_bytes() for p in root.iterdir()}


def test_a_pack_that_claims_the_contents_of_another_expert_is_refused(
    here: Warehouse, there: Warehouse, pushed: Pushed, tmp_path: Path
) -> None:
    pack, mine = packed(here, "e0")
    _, theirs = packed(here, "e1")
    forged = {n: replace(t, digest=theirs[n].digest) for n, t in mine.items()}
    frames = dict.fromkeys(TIERS, pack.root)
    pack_id, files = files_of(tmp_path / "forged", forged, frames)
    rests = {n: data for n, data in pushed.files.items() if n.endswith(".rest")}
    pushed.push(replace(pushed.record, pack_id=pack_id), {**files, **rests})
    assert "A pack does not hold what it says" in refused(there, pushed)


def test_lossy_levels_that_are_another_experts_are_refused(
    here: Warehouse, there: Warehouse, pushed: Pushed, tmp_path: Path
) -> None:
    (pack, mine), (other, theirs) = packed(here, "e0"), packed(here, "e1")
    n = TIERS.index("X20")
    forged: Tensors = {}
    for name, t in mine.items():
        o = theirs[name]
        forged[name] = replace(
            t,
            unit=o.unit,
            nbytes=np.concatenate([o.nbytes[:n], t.nbytes[n:]]),
            checksums=np.concatenate([o.checksums[:n], t.checksums[n:]]),
            start_byte=np.concatenate([o.start_byte[:n], t.start_byte[n:]]),
        )
    frames = {tier: (other if i < n else pack).root for i, tier in enumerate(TIERS)}
    pack_id, files = files_of(tmp_path / "forged", forged, frames)
    assert pack_id == pushed.record.pack_id
    rests = {n: data for n, data in pushed.files.items() if n.endswith(".rest")}
    pushed.push(pushed.record, {**files, **rests})
    assert "A pack does not hold what it says" in refused(there, pushed)


def test_residuals_that_promise_too_much_are_refused(
    here: Warehouse, there: Warehouse, pushed: Pushed, tmp_path: Path
) -> None:
    pack, mine = packed(here, "e0")
    forged = {n: replace(t, residual_sq=t.residual_sq / np.float32(2)) for n, t in mine.items()}
    frames = dict.fromkeys(TIERS, pack.root)
    _, files = files_of(tmp_path / "forged", forged, frames)
    rests = {n: data for n, data in pushed.files.items() if n.endswith(".rest")}
    pushed.push(pushed.record, {**files, **rests})
    assert "the residuals of its levels" in refused(there, pushed)


def test_what_is_sent_beside_a_pack_gets_no_place_in_the_catalog(
    there: Warehouse, pushed: Pushed
) -> None:
    version = {"base": "base", "checkpoint_id": pushed.record.checkpoint_id, "root": "/x"}
    extra = {
        "facts/names/e1/00000002.json": seal({**version, "version_of": "e1/2"}),
        "facts/anything/junk.bin": b"junk",
    }
    pushed.push(pushed.record, {**pushed.files, **extra})
    before = there.catalog.get("e1").version
    (came,) = pull_packs(there, pushed.address)
    assert came.fresh
    assert there.catalog.get("e1").version == before
    assert not list(there.catalog_dir.rglob("junk.bin"))


def _first(change: Callable[[Any], Any]) -> Callable[[Replaced], Replaced]:
    """Change the first file of a record that has tensors."""

    def changed(record: Replaced) -> Replaced:
        at = next(i for i, f in enumerate(record.files) if f.tensors)
        files = list(record.files)
        files[at] = change(files[at])
        return replace(record, files=tuple(files))

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, name="not a name!"),
        lambda r: replace(r, files=()),
        lambda r: replace(r, checkpoint_id="0" * 24),
        lambda r: replace(r, files=(*r.files, replace(r.files[0], path=f"{r.files[0].path}/x"))),
        _first(lambda f: replace(f, tensors=(("nope", *f.tensors[0][1:]), *f.tensors[1:]))),
        _first(lambda f: replace(f, tensors=(f.tensors[0], *f.tensors))),
        _first(lambda f: replace(f, nbytes=f.nbytes // 2)),
        _first(lambda f: replace(f, tensors=((f.tensors[0][0], -8, f.tensors[0][2]),))),
    ],
)
def test_a_record_that_does_not_fit_to_its_pack_is_refused_and_leaves_nothing(
    there: Warehouse, pushed: Pushed, change: Callable[[Replaced], Replaced]
) -> None:
    pushed.push(change(pushed.record), pushed.files)
    assert json.dumps(refused(there, pushed, MergePipeError))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("record", "base"), ["base"]),
        (("record", "checkpoint_id"), "../../x"),
        (("record", "files", 0, "mode"), "x"),
        (("record", "files", 0, "mode"), 0o4755),
        (("record", "files", 0, "mtime_ns"), 1 << 70),
        (("record", "files", 0, "nbytes"), None),
        (("record", "files", 0, "rest_sha256"), ""),
        (("record", "files", 0, "sha256"), 5),
        (("record", "files", 0, "tensors"), [["a", 1.5, 1]]),
        (("record", "folders", 0, "path"), "a//b"),
        (("record", "pack_id"), ".."),
        (("files", 0, "nbytes"), True),
        (("files", 0, "name"), "index.exe"),
    ],
)
def test_every_value_of_what_describes_a_pack_has_a_type_and_a_form(
    there: Warehouse, pushed: Pushed, place: tuple[Any, ...], value: object
) -> None:
    told = unseal(pushed.read("expert.json"), "")
    holder = told
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    pushed.push_files(pushed.record.pack_id, {**pushed.files, "expert.json": seal(told)})
    assert "The file that describes a pack" in refused(there, pushed)


_MEASURED = """
import resource, sys
from mergepipe_pipeline.cli.main import program
try:
    program()
except SystemExit as end:
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, -1)]
    print(max(peaks) >> 10)
    sys.exit(end.code)
"""


def _peak_mib(there: Warehouse, address: str, exit_code: int) -> int:
    """The most memory of `pull-pack` from an address, its children's too."""
    args = ["pull-pack", address, "--home", str(there.root)]
    command = [sys.executable, "-c", _MEASURED, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stderr
    return int(done.stdout.split()[-1])


def test_a_small_table_that_unfolds_to_gigabytes_is_refused_in_little_memory(
    there: Warehouse, pushed: Pushed
) -> None:
    parts = PackParts.of({**pushed.files, "expert.json": pushed.read("expert.json")})
    pack_id, files = Forger(parts, Random(0)).files("bomb")
    assert sum(len(data) for name, data in files.items() if name.startswith("index")) < 100_000
    usual = _peak_mib(there, f"{pushed.address}/nothing", NotFoundError.exit_code)
    pushed.push_files(pack_id, files)
    assert _peak_mib(there, pushed.address, CorruptionError.exit_code) < usual + 300
    assert (there.packs.ids(), there.replaced.ids()) == ([], [])


def test_levels_without_their_tiers_are_refused_where_they_claim_to_be_good(
    here: Warehouse, there: Warehouse, pushed: Pushed, tmp_path: Path
) -> None:
    pack, mine = packed(here, "e0")
    n, exact = TIERS.index("X20"), TIERS[TIERS.index("X20") :]
    forged = {}
    for name, t in mine.items():
        nbytes, start = t.nbytes.copy(), t.start_byte.copy()
        nbytes[:n], start[:n] = 0, 0
        forged[name] = replace(t, nbytes=nbytes, start_byte=start)
    pack_id, files = files_of(tmp_path / "forged", forged, dict.fromkeys(exact, pack.root))
    rests = {n: data for n, data in pushed.files.items() if n.endswith(".rest")}
    pushed.push(replace(pushed.record, pack_id=pack_id), {**files, **rests})
    assert "the residuals of its levels" in refused(there, pushed)


def test_a_pack_of_exact_tiers_alone_is_taken(
    there: Warehouse, tmp_path: Path, s3: WatchedS3, bucket: str
) -> None:
    write_family(tmp_path / "family")
    other = Warehouse.at(tmp_path / "other").ensure()
    for name in ("base", "e0"):
        register(other, tmp_path / "family" / name, name, None if name == "base" else "base")
    make_pack(other, ["e0"], tiers=("X20", "X"))
    push_pack(other, "e0", f"s3://{bucket}/y")
    assert pull_packs(there, f"s3://{bucket}/y")[0].fresh


def test_an_expert_that_is_away_here_is_not_taken_over_by_another_name(
    here: Warehouse, there: Warehouse, pushed: Pushed
) -> None:
    pull_packs(there, pushed.address)
    record = there.replaced.find(pushed.record.checkpoint_id)
    pushed.push(replace(pushed.record, name="beta"), pushed.files)
    with pytest.raises(MergePipeError, match="is here under another name"):
        pull_packs(there, pushed.address)
    assert there.replaced.find(pushed.record.checkpoint_id) == record
    assert there.catalog.names() == ["base", "e0", "e1"]
