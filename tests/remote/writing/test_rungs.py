"""Directions alone travel: of them another machine makes an expert that is near to the first."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import obstore
import pytest
from safetensors import safe_open
from torch import Tensor

from mergepipe_pipeline.deploy.inbox import scan_inbox
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.pack import FACTORED, TIERS, Tier
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.packs.portable import PortableFile, PortablePack
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.pull_pack import pull_packs
from mergepipe_pipeline.verbs.push_pack import push_pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.test_offline import merged
from tests.remote.writing.watched_s3 import WatchedS3
from tests.support.stored import Stored, encode, write

DIRECTED = {
    "model.layers.0.a.weight": ("BF16", (320, 512)),
    "model.layers.0.b.weight": ("F16", (256, 320)),
    "model.layers.1.c.weight": ("F32", (4, 96, 128)),
}
NOISE, NORM = "model.layers.1.noise.weight", "model.layers.1.norm.weight"
#: The next number after 1 of each type.
NEXT = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}


def _tensors(rng: np.random.Generator, base: dict[str, np.ndarray]) -> dict[str, Stored]:
    """An expert of a base, with deltas of eight directions and noise, or of noise alone."""
    stored = {}
    for name, values in base.items():
        delta = 0.002 * rng.standard_normal(values.shape)
        if name in DIRECTED:
            *_, rows, columns = values.shape
            left = rng.standard_normal((*values.shape[:-2], rows, 8))
            delta = 0.2 * delta + 0.002 * left @ rng.standard_normal((8, columns))
        stored[name] = encode(values + delta, _dtype(name))
    return stored


def _dtype(name: str) -> str:
    return DIRECTED[name][0] if name in DIRECTED else "BF16"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Warehouse:
    """The machine where experts e0 and e1 were packed, e1 to be kept in cold storage."""
    folder, rng = tmp_path_factory.mktemp("here"), np.random.default_rng(0)
    shapes = {n: shape for n, (_, shape) in DIRECTED.items()} | {NOISE: (300, 500), NORM: (300,)}
    drawn = {name: 0.02 * rng.standard_normal(shape) for name, shape in shapes.items()}
    base = {name: encode(values, _dtype(name)) for name, values in drawn.items()}
    warehouse = Warehouse.at(folder / "home").ensure()
    for name in ("base", "e0", "e1"):
        (folder / name).mkdir()
        write(folder / name, name, base if name == "base" else _tensors(rng, drawn))
        (folder / name / "config.json").write_text('{"architectures": ["Toy"]}')
        register(warehouse, folder / name, name, None if name == "base" else "base")
    pack(warehouse, ["e0", "e1"])
    return warehouse


@pytest.fixture
def there(here: Warehouse, tmp_path: Path) -> Warehouse:
    """Another machine, which has the base."""
    warehouse = Warehouse.at(tmp_path / "there").ensure()
    shutil.copytree(here.root.parent / "base", tmp_path / "base")
    register(warehouse, tmp_path / "base", "base")
    return warehouse


def _read(folder: Path) -> dict[str, Tensor]:
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in sorted(opened.keys())}


@pytest.mark.parametrize("rung", FACTORED)
def test_what_is_made_of_directions_is_as_near_as_the_pack_says_for_some_hundredths_of_the_bytes(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str, rung: Tier
) -> None:
    to = f"s3://{bucket}/experts"
    push_pack(here, "e0", to)
    s3.clear()
    (came,) = pull_packs(there, to, ["e0"], rung=rung)
    got = {path.rpartition("/")[2] for method, path in s3.seen if method == "GET"}
    wanted = {f"{tier}.frames" for tier in FACTORED[: FACTORED.index(rung) + 1]}
    assert {name for name in got if name.endswith(".frames")} == wanted
    assert (came.name, came.base, came.fresh) == (f"e0-{rung}", "base", True)
    folder = Path(there.catalog.get(came.name).checkpoint.root)
    base, expert, near = (
        _read(f) for f in (*(here.root.parent / n for n in ("base", "e0")), folder)
    )
    packed = here.packs.open(came.pack_id).tensors
    for name, (dtype, _) in DIRECTED.items():
        b, e, n = (of[name].double() for of in (base, expert, near))
        said = float(packed[name].residual_sq[TIERS.index(rung)].sum()) ** 0.5
        rounding = NEXT[dtype] * float(b.norm())
        assert abs(float((e - n).norm()) - said) <= rounding + 1e-3 * said
        assert said < 0.95 * float((e - b).norm())
    assert near[NOISE].equal(base[NOISE])
    assert near[NORM].equal(expert[NORM])
    small = sum(f.stat().st_size for f in folder.iterdir()) / 10
    assert came.nbytes < small


def test_a_near_expert_has_a_name_and_contents_of_its_own_and_is_merged_as_any_other(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str
) -> None:
    to = f"s3://{bucket}/experts"
    for name in ("e0", "e1"):
        push_pack(here, name, to)
    assert [p.name for p in pull_packs(there, to, rung="R2")] == ["e0-R2", "e1-R2"]
    assert [p.fresh for p in pull_packs(there, to, rung="R2")] == [False, False]
    assert [p.name for p in pull_packs(there, to, ["e0"])] == ["e0"]
    ids = {there.catalog.get(name).checkpoint.checkpoint_id for name in ("e0", "e0-R2", "e1-R2")}
    assert len(ids) == 3
    recipe = "merge_method: ties\nbase_model: base\nmodels:\n"
    recipe += "".join(
        f"- {{model: {n}-R2, parameters: {{weight: 1, density: 0.5}}}}\n" for n in ("e0", "e1")
    )
    assert merged(there, recipe).snapshot.snapshot_id
    watched = {entry.name for entry in scan_inbox(there, 0.0)}
    assert watched <= {"e0", "e0-R2", "e1-R2"}, "a sensor takes it for no other expert"
    assert verify_all(there).ok


def test_an_expert_in_cold_storage_sends_what_it_sent_before(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str, tmp_path: Path
) -> None:
    pulled = []
    for number in range(2):
        to = f"s3://{bucket}/{number}"
        push_pack(here, "e1", to)
        (came,) = pull_packs(there, to, rung="R1")
        folder = Path(there.catalog.get(came.name).checkpoint.root)
        pulled.append(_read(folder))
        shutil.rmtree(folder)
        if not number:
            (packed,) = pack(here, ["e1"])
            move_to_cold(here, packed, tmp_path / "cold")
    assert pulled[0].keys() == pulled[1].keys()
    assert all(pulled[0][name].equal(pulled[1][name]) for name in pulled[0])


def test_a_name_that_another_checkpoint_has_is_not_taken(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str
) -> None:
    to = f"s3://{bucket}/experts"
    push_pack(here, "e0", to)
    register(there, here.root.parent / "e0", "e0-R0", "base")
    with pytest.raises(MergePipeError, match="Another checkpoint has the name"):
        pull_packs(there, to, rung="R0")
    pull_packs(there, to, rung="R1")
    (file,) = (there.inbox / "e0-R1").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(MergePipeError, match="Another checkpoint has the name"):
        pull_packs(there, to, rung="R1")
    assert there.catalog.root("e0-R0") == str(here.root.parent / "e0")


@pytest.mark.parametrize("name", ["R2.frames", "vectors", "units"])
def test_directions_that_do_not_fit_are_refused_and_leave_nothing(
    here: Warehouse, there: Warehouse, s3: WatchedS3, bucket: str, name: str
) -> None:
    to, store = f"s3://{bucket}/experts", s3.store(bucket)
    push_pack(here, "e0", to)
    key = next(k for k in s3.keys(bucket) if k.endswith("/expert.json"))
    folder = key.removesuffix("expert.json")
    portable = PortablePack.from_bytes(bytes(obstore.get(store, key).bytes()), "")
    files, units = list(portable.files), portable.units
    if name == "units":
        units = (2.0**-90, *units[1:])
    else:
        data = bytes(obstore.get(store, folder + name).bytes())
        data = data + b"1234" if name == "vectors" else data[:-4] + bytes(b ^ 85 for b in data[-4:])
        (at,) = (n for n, f in enumerate(files) if f.name == name)
        files[at] = PortableFile(name, len(data), sha256_hex(data))
        obstore.put(store, folder + name, data)
    forged = PortablePack(portable.expert, portable.tensors, units, tuple(files))
    obstore.put(store, key, forged.to_bytes())
    with pytest.raises(CorruptionError):
        pull_packs(there, to, rung="R2")
    assert there.catalog.names() == ["base"]
    assert not list(there.inbox.iterdir())
