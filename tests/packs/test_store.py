"""A pack is found by its contents, and never used when it is not what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TAIL_LENGTH, TIERS, PackedTensor
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.index import (
    SUMMED_CHUNKS,
    SUMMED_ELEMS,
    frames_path,
    pack_id_of,
    write_index,
)
from mergepipe_pipeline.packs.store import PackStore
from mergepipe_pipeline.storage.atomic import publish_dir

HOWS = ("flip", "cut", "gone")


def packed(name: str, chunks: int, seed: int, start: np.ndarray) -> PackedTensor:
    """A tensor with arbitrary arrays; what they say fits the files that `write` makes."""
    rng = np.random.default_rng(seed)
    return PackedTensor(
        name,
        name,
        "BF16",
        (chunks << 16,),
        f"{seed:064x}",
        "b" * 64,
        0.5,
        f"{seed:016x}",
        7,
        rng.integers(0, 1000, (len(TIERS), chunks), np.uint32),
        rng.integers(0, 1 << 63, (len(TIERS), chunks), np.uint64),
        rng.random((len(TIERS), chunks), np.float32),
        start,
        rng.random((seed % 2 * TIERS.index("X20"), TAIL_LENGTH), np.float32),
    )


def some(*sizes: int) -> list[PackedTensor]:
    """Tensors of so many chunks, one after the other in the files."""
    found: list[PackedTensor] = []
    at = np.zeros(len(TIERS), np.int64)
    for number, chunks in enumerate(sizes):
        found.append(packed(f"t{number}", chunks, number, at.copy()))
        at += found[-1].nbytes.sum(axis=1, dtype=np.int64)
    return found


def write(store: PackStore, of: Sequence[PackedTensor], tmp: Path) -> str:
    """Write a pack of zeros as frames; its id."""
    pack_id = pack_id_of([t.content for t in of])
    staged = tmp / "staged"
    staged.mkdir()
    for number, tier in enumerate(TIERS):
        nbytes = sum(int(t.nbytes[number].sum()) for t in of)
        frames_path(staged, tier).write_bytes(bytes(nbytes))
    write_index(staged, store.path(pack_id), of)
    publish_dir(staged, store.path(pack_id))
    return pack_id


def test_a_pack_is_found_by_its_contents_and_tells_what_was_written(tmp_path: Path) -> None:
    store, of = PackStore(tmp_path / "packs"), some(3, 1, 40000, 2)
    pack_id = write(store, of, tmp_path)
    pack = store.find(pack_id)
    assert pack is not None
    found_again = store.of([t.content for t in reversed(of)])
    assert found_again is not None
    assert found_again.source == pack.source
    assert store.of([]) is None
    assert store.ids() == [pack_id]
    assert pack.nbytes == sum(int(t.nbytes.sum()) for t in of)
    assert list(pack.contents.values()) == [t.content for t in of]
    for tensor, (row, nbytes, residual_sq) in zip(of, pack.sizes(CHUNK_ELEMS), strict=True):
        found = pack.tensors[tensor.name]
        assert (found.content, found.unit, found.threshold_bits) == (tensor.content, 0.5, 7)
        assert row.factors == found.factors == tensor.factors
        assert list(row.start_byte) == found.start_byte.tolist() == tensor.start_byte.tolist()
        for array in ("nbytes", "checksums", "residual_sq"):
            assert np.array_equal(getattr(found, array), getattr(tensor, array))
        assert np.array_equal(nbytes, tensor.nbytes)
        assert np.array_equal(residual_sq, tensor.residual_sq)


@pytest.mark.parametrize("n", [1, 2, SUMMED_CHUNKS, 3 * SUMMED_CHUNKS])
def test_sizes_of_blocks_are_sums_of_those_of_chunks(tmp_path: Path, n: int) -> None:
    store, of = PackStore(tmp_path / "packs"), some(1, SUMMED_CHUNKS, 70)
    found = list(store.open(write(store, of, tmp_path)).sizes(n * CHUNK_ELEMS))
    for tensor, (_, nbytes, left) in zip(of, found, strict=True):
        starts = np.arange(0, tensor.nbytes.shape[1], n)
        assert np.array_equal(nbytes, np.add.reduceat(tensor.nbytes, starts, axis=1))
        exactly = np.add.reduceat(tensor.residual_sq.astype(np.float64), starts, axis=1)
        assert (exactly <= left).all()
        assert (left <= exactly * (1 + 1e-6)).all()


def test_contents_determine_the_id_and_nothing_else_does() -> None:
    one, two = (t.content for t in some(1, 2))
    ids = {
        pack_id_of([one, two]),
        pack_id_of([one]),
        pack_id_of([one, two._replace(base_digest="c" * 64)]),
        pack_id_of([one, two._replace(digest="c" * 64)]),
        pack_id_of([one, two._replace(dtype="F16")]),
    }
    assert len(ids) == 5
    assert pack_id_of([one, two]) == pack_id_of([two, one])


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *((file, how) for file in ("index", "chunks", "sums") for how in HOWS),
        ("L2.frames", "cut"),  # a frame that is flipped is found when it is read
        ("L2.frames", "gone"),
    ],
)
def test_what_is_not_as_it_was_written_is_named_and_never_used(
    tmp_path: Path, file: str, how: str
) -> None:
    store, of = PackStore(tmp_path / "packs"), some(3, 2)
    pack_id = write(store, of, tmp_path)
    (path,) = store.path(pack_id).glob(f"{file}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if how != "gone":
        path.write_bytes(data if how == "flip" else data[:-1])
    with pytest.raises(CorruptionError) as caught:
        _read_all(store, pack_id)
    assert file in str(caught.value) or pack_id in str(caught.value)


def _fewer(of: PackedTensor, field: str) -> PackedTensor:
    return replace(of, **{field: getattr(of, field)[:, :-1].copy()})


@pytest.mark.parametrize(
    "lie",
    [
        *(partial(_fewer, field=f) for f in ("nbytes", "checksums", "residual_sq")),
        lambda of: replace(of, start_byte=of.start_byte - 4096),
        lambda of: replace(of, start_byte=of.start_byte[:2]),
        lambda of: replace(of, residual_sq=-of.residual_sq),
        lambda of: replace(of, name="another"),
    ],
)
def test_a_sealed_index_whose_arrays_do_not_fit_its_tensors_is_refused(
    tmp_path: Path, lie: Callable[[PackedTensor], PackedTensor]
) -> None:
    """Compiled code reads and writes memory by these arrays; whoever sells a pack can seal it."""
    store, of = PackStore(tmp_path / "packs"), some(3, 2, 40)
    pack_id = write(store, of, tmp_path)
    root = store.path(pack_id)
    sealed = [path for stem in ("chunks", "sums") for path in root.glob(f"{stem}.*")]
    for path in (*sealed, *root.glob("index.*")):
        path.unlink()
    write_index(root, root, [of[0], lie(of[1]), of[2]])
    with pytest.raises(CorruptionError, match="A pack was changed after it was written"):
        _read_all(store, pack_id)


def _read_all(store: PackStore, pack_id: str) -> None:
    pack = store.open(pack_id)
    list(pack.tensors.values())
    list(pack.sizes(SUMMED_ELEMS))


def test_a_pack_under_another_id_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, of = PackStore(tmp_path / "packs"), some(3)
    pack_id = write(store, of, tmp_path)
    other = pack_id[::-1]
    store.path(pack_id).rename(store.path(other))
    assert (store.find(other), store.find(other), store.find(pack_id)) == (None, None, None)
    assert len(caplog.records) == 1
