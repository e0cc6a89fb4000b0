"""What `pack` writes is the expert: decoded from the files, every stored bit is there again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mergepipe_pipeline.checkpoints.reader import Tally
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.domain.pack import (
    CHUNK_ELEMS,
    FACTORED,
    STEPPED,
    TIERS,
    Level,
    PackedInput,
    PackedRange,
    PackedTensor,
    Tier,
)
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.codec import BITS_OF, decode_bits
from mergepipe_pipeline.packs.elements import PackedElements, PackReader
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.gc import collect
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.packs.approximate import decode_approximate, quantised_at
from tests.packs.models import base_tensors, expert_tensors, warehouse_of
from tests.support.stored import Stored, decode, encode, write


def decoded(warehouse: Warehouse, pack_id: str) -> dict[str, bytes]:
    """The stored bytes of all tensors of a pack without factors, from tier X."""
    known, base, out = warehouse.packs.open(pack_id), base_tensors(), {}
    with FrameFiles(known.root) as files:
        for name, tensor in known.tensors.items():
            bits = np.frombuffer(base[name][2], BITS_OF[tensor.dtype])
            found = np.empty_like(bits)
            frames = files.read(tensor, ["X"], 0, tensor.nbytes.shape[1])
            decode_bits(frames, bits, found)
            out[name] = found.tobytes()
    return out


#: Of one chunk, a stack, and more than one chunk.
DIRECTED = {"a": (96, 80), "b": (3, 64, 48), "c": (400, 400)}


def directed(dtype: str, *, is_expert: bool) -> dict[str, Stored]:
    """Tensors of a base, or of an expert whose δ has two directions and noise."""
    rng, found = np.random.default_rng(4), {}
    for name, shape in DIRECTED.items():
        values, noise = 0.02 * rng.standard_normal(shape), 5e-4 * rng.standard_normal(shape)
        left = rng.standard_normal((*shape[:-1], 2))
        near = left @ rng.standard_normal((*shape[:-2], 2, shape[-1]))
        found[name] = encode(values + (noise + 1e-3 * near if is_expert else 0), dtype)
    return {**found, "norm": encode(np.ones(50), dtype)}


def directed_warehouse(tmp: Path, dtype: str) -> Warehouse:
    warehouse = Warehouse.at(tmp / "home").ensure()
    for name in ("base", "e0"):
        (tmp / name).mkdir(parents=True)
        write(tmp / name, name, directed(dtype, is_expert=name == "e0"))
        register(warehouse, tmp / name, name, None if name == "base" else "base")
    return warehouse


def read_at(known: Pack, tensor: PackedTensor, level: Level, base: Stored) -> bytes:
    """What a merge gets of a tensor at a level, in two windows: stored bytes, or δ̂."""
    numel, size = decode(base).size, len(base[2]) // decode(base).size
    of = PackedRange(0, numel, level, 0, level == "X")
    packed = PackedInput(0, tensor.name, tensor.unit, tensor.factors, 0, (of,))
    out = bytearray(numel * (size if of.gives_bits else 4))

    def read_base(start: int, stop: int, into: memoryview) -> None:
        into[:] = base[2][size * start : size * stop]

    with PackReader(known.source, Tally()) as reader:
        elements = PackedElements(reader, packed, tensor.digest, read_base)
        for window in ((0, numel // 3), (numel // 3, numel)):
            for part in elements.fetch(*window, PageBuffer()):
                a, b = part.start_elem, part.stop_elem
                if part.gives_bits:
                    some = slice(size * a, size * b)
                    part.fill(memoryview(out)[some], memoryview(base[2])[some])
                else:
                    part.delta(np.frombuffer(out, np.float32)[a:b])
    return bytes(out)


def assert_right(known: Pack, dtype: str) -> None:
    """Every level of a pack of `directed` gives what it says, and the exact one all bits."""
    base, expert = (directed(dtype, is_expert=which) for which in (False, True))
    for name, tensor in known.tensors.items():
        assert bool(tensor.factors) == (name in DIRECTED)
        delta, left = decode(expert[name]).astype(np.float64) - decode(base[name]), {}
        for level in (*FACTORED, *STEPPED) if tensor.factors else STEPPED:
            found = np.frombuffer(read_at(known, tensor, level, base[name]), np.float32)
            left[level] = float(np.square(delta - found).sum())
            stated = float(tensor.residual_sq[TIERS.index(level)].sum(dtype=np.float64))
            # Packs have δ in float32, which is rounded where elements are.
            assert left[level] <= stated * (1 + 1e-6)
            assert stated <= left[level] * (1 + 1e-5)
        assert read_at(known, tensor, "X", base[name]) == expert[name][2]
        if tensor.factors:
            assert left["R0"] >= left["R1"] >= left["R2"] > left["L3"]
            assert left["R2"] < 0.35 * np.square(delta).sum()


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_levels_of_deltas_of_few_directions_leave_what_they_say(tmp_path: Path, dtype: str) -> None:
    warehouse = directed_warehouse(tmp_path, dtype)
    (made,) = pack(warehouse, ["e0"])
    assert_right(warehouse.packs.open(made.pack_id), dtype)


@pytest.mark.parametrize("tier", FACTORED)
def test_a_rung_that_is_damaged_in_an_older_pack_is_made_anew(tmp_path: Path, tier: Tier) -> None:
    changed = directed("BF16", is_expert=True) | {"norm": encode(np.full(50, 2), "BF16")}
    found = []
    for name in ("damaged", "fresh"):
        folder = tmp_path / name
        warehouse = directed_warehouse(folder, "BF16")
        if name == "damaged":
            (older,) = pack(warehouse, ["e0"])
            path = frames_path(warehouse.packs.path(older.pack_id), tier)
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        write(folder / "e0", "e0", changed)
        (made,) = pack(warehouse, ["e0"])
        root = warehouse.packs.path(made.pack_id)
        found.append({p.name: p.read_bytes() for p in root.iterdir()})
    assert found[0] == found[1]


def test_the_exact_tiers_hold_every_stored_bit_and_equal_tensors_take_no_byte(
    tmp_path: Path,
) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    expert = expert_tensors(base_tensors())
    found = decoded(warehouse, made.pack_id)
    assert found == {name: expert[name][2] for name in found}
    assert {n.rpartition("layers.")[2] for n in found} == {
        "0.a.weight",
        "0.b.weight",
        "0.c.weight",
        "1.equal.weight",
        "1.norm.weight",
    }
    assert made.fresh
    assert made.pays_back_after
    known = warehouse.packs.open(made.pack_id)
    assert not known.tensors["model.layers.1.equal.weight"].nbytes.any()
    assert made.tier_nbytes == {t: frames_path(known.root, t).stat().st_size for t in TIERS}


def test_lossy_levels_are_what_the_planner_takes_them_for(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    name = "model.layers.0.b.weight"
    known = warehouse.packs.open(made.pack_id)
    tensor = known.tensors[name]
    base = base_tensors()
    delta = decode(expert_tensors(base)[name]) - decode(base[name])
    first = np.ascontiguousarray(delta[:CHUNK_ELEMS])
    with FrameFiles(known.root) as files:
        read = files.read(tensor, TIERS[:3], 0, 1)
    frames = [read.frame(tier, 0) for tier in TIERS[:3]]
    found = np.empty_like(first)
    decode_approximate(frames, tensor.unit, found)
    assert np.array_equal(found, quantised_at("L2", first, tensor.unit, tensor.threshold_bits))


def test_a_pack_that_is_there_is_left_and_equal_tensors_are_taken_over(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    (again,) = pack(warehouse, ["e0"])
    assert (again.fresh, again.pack_id, again.seconds) == (False, made.pack_id, 0)
    base = base_tensors()
    changed = expert_tensors(base) | {
        name: tensor for name, tensor in expert_tensors(base, 5).items() if ".a." in name
    }
    write(tmp_path / "e0", "e0", changed)
    (other,) = pack(warehouse, ["e0"])
    assert other.pack_id != made.pack_id
    assert (other.tensors, other.taken_over) == (5, 4)
    assert (
        decoded(warehouse, other.pack_id)["model.layers.0.a.weight"]
        == (changed["model.layers.0.a.weight"][2])
    )


def test_the_files_do_not_depend_on_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for n_threads in (1, 5):
        monkeypatch.setattr(threads, "analysis", lambda n=n_threads: n)
        (tmp_path / f"{n_threads}").mkdir()
        warehouse = warehouse_of(tmp_path / f"{n_threads}")
        (made,) = pack(warehouse, ["e0"])
        root = warehouse.packs.path(made.pack_id)
        found.append({p.name: p.read_bytes() for p in root.iterdir()})
    assert found[0] == found[1]
    assert len(found[0]) == len(TIERS) + 3


def test_a_flipped_frame_is_named_by_file_tensor_and_chunk(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    (made,) = pack(warehouse, ["e0"])
    path = frames_path(warehouse.packs.path(made.pack_id), "X")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CorruptionError, match=r"X\.frames, tensor model\.layers\.0\.b\.weight, chunk 2"
    ):
        decoded(warehouse, made.pack_id)


def test_an_expert_that_changed_since_it_was_analysed_is_not_packed(tmp_path: Path) -> None:
    warehouse = warehouse_of(tmp_path)
    analyze(warehouse, ["e0"])
    file = next((tmp_path / "e0").glob("*.safetensors"))
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(CorruptionError, match="not those that were analysed"):
        pack(warehouse, ["e0"])
    assert warehouse.packs.ids() == []
    assert not list(warehouse.staging.iterdir())


def test_a_packing_that_is_killed_leaves_staging_and_never_half_a_pack(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.packs.killed", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    moments = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(moments) > 5
    packs = [n for _, n, _ in moments]
    assert (packs[0], packs[-1]) == (1, 2)  # of e1; then that of e0 has its name, too
    assert moments[-1][2] > 3
    warehouse = Warehouse.at(tmp_path / "home")
    assert verify_all(warehouse).ok
    collect(warehouse, older_than_s=0)
    assert not list(warehouse.staging.iterdir())
    assert len(warehouse.packs.ids()) == 2
