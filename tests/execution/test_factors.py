"""Experts whose deltas have few directions: packs keep these, and merges of them are as planned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

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
)
from mergepipe_pipeline.domain.plan import MergePlan
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import run_plan
from mergepipe_pipeline.packs.elements import PackedElements, PackReader
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.verbs.explain import level_shares
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.lab.bench.bench_budget import distance
from tests.support.stored import Stored, decode, encode, write

SHAPES = {"a.weight": (400, 410), "b.weight": (3, 96, 130), "norm.weight": (400,)}
WINDOWS = EngineOptions(threads=1, window_elems=70_001)


def tensors(dtype: str, seed: int | None = None) -> dict[str, Stored]:
    """A base, and by a seed an expert: a few directions of δ, and noise of half their size."""
    base_rng, rng = np.random.default_rng(0), np.random.default_rng(seed)
    found = {}
    for name, shape in SHAPES.items():
        values = 0.02 * base_rng.standard_normal(shape)
        if seed is not None:
            noise = 5e-4 * rng.standard_normal(shape)
            if len(shape) > 1:
                left = rng.standard_normal((*shape[:-1], 3)) * [3, 2, 1]
                right = rng.standard_normal((*shape[:-2], 3, shape[-1]))
                noise += 3e-4 * left @ right
            values = values + noise
        found[f"model.layers.0.{name}"] = encode(values, dtype)
    return found


def family(tmp: Path, dtype: str = "BF16", experts: int = 3) -> Warehouse:
    """A warehouse that has packed experts `e0` … of a base."""
    warehouse = Warehouse.at(tmp / "home").ensure()
    for number in range(-1, experts):
        name, seed = ("base", None) if number < 0 else (f"e{number}", number + 1)
        (tmp / name).mkdir(parents=True)
        write(tmp / name, name, tensors(dtype, seed))
        register(warehouse, tmp / name, name, None if number < 0 else "base")
    pack(warehouse, [f"e{number}" for number in range(experts)])
    return warehouse


def planned(
    warehouse: Warehouse, tmp: Path, budget: str | None, method: str = "task_arithmetic"
) -> MergePlan:
    own = "parameters: {weight: 0.5, density: 0.4}"
    rows = "".join(f"- {{model: {tmp / f'e{n}'}, {own}}}\n" for n in range(3))
    head = f"merge_method: {method}\nbase_model: {tmp / 'base'}\ndtype: float32\n"
    text = f"{head}models:\n{rows}"
    return make_plan(warehouse, parse(text, name="r", where="r"), budget=budget)


def only_pack(warehouse: Warehouse, number: int = 0) -> Pack:
    return warehouse.packs.open(warehouse.packs.ids()[number])


def decoded(found: Pack, name: str, level: Level, base: Stored) -> np.ndarray:
    """δ̂ of a tensor at an approximate level, as windows of odd lengths read it."""
    tensor, values = found.tensors[name], decode(base)
    numel = values.size
    rows = [TIERS.index(t) for t in FACTORED if t in TIERS[: TIERS.index(level) + 1]]
    nbytes = int(tensor.nbytes[rows, 0].sum())
    given = PackedRange(0, numel, level, 0, False)
    packed = PackedInput(0, name, tensor.unit, tensor.factors, nbytes, (given,))
    tally, out = Tally(), np.zeros(numel, np.float32)
    with PackReader(found.source, tally) as reader:
        elements = PackedElements(reader, packed, tensor.digest, lambda a, b, into: None)
        for start in range(0, numel, 70_001):
            for part in elements.fetch(start, min(numel, start + 70_001), PageBuffer()):
                part.delta(out[part.start_elem : part.stop_elem])
    tiers = slice(len(FACTORED), TIERS.index(level) + 1)
    assert tally.nbytes == nbytes + int(tensor.nbytes[tiers].sum())
    return out


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_level_leaves_what_it_says_and_less_than_the_one_before(
    tmp_path: Path, dtype: str
) -> None:
    found = only_pack(family(tmp_path, dtype, experts=1))
    base, expert = tensors(dtype), tensors(dtype, 1)
    for name, tensor in found.tensors.items():
        assert bool(tensor.factors) == ("norm" not in name)
        if not tensor.factors:
            continue
        delta, before = (decode(expert[name]) - decode(base[name])).reshape(-1), np.inf
        for level in (*FACTORED, *STEPPED):
            near = decoded(found, name, level, base[name])
            left = float(np.square(delta.astype(np.float64) - near).sum())
            stated = float(tensor.residual_sq[TIERS.index(level)].astype(np.float64).sum())
            assert left <= stated <= left * (1 + 1e-5)
            assert left <= before * (1 + 1e-3)
            before = left
        assert before < 0.02 * float(np.square(delta).sum())


def test_a_tail_tells_how_long_a_level_is_and_where_its_magnitudes_lie(tmp_path: Path) -> None:
    found, base = only_pack(family(tmp_path, experts=1)), tensors("BF16")
    name = "model.layers.0.a.weight"
    for number, level in enumerate((*FACTORED, *STEPPED)):
        size = np.abs(decoded(found, name, level, base[name]).astype(np.float64))
        rms, *magnitudes = found.tensors[name].tails[number]
        assert rms == pytest.approx(np.sqrt(np.square(size).mean()), rel=0.03)
        above = [np.square(size[size > x]).sum() / np.square(size).sum() for x in magnitudes]
        assert np.allclose(above, np.linspace(0, 1, len(magnitudes)), atol=0.06)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("method", ["linear", "ties"])
def test_an_exact_merge_reads_directions_and_gives_the_bits_of_the_originals(
    tmp_path: Path, method: str, dtype: str
) -> None:
    warehouse = family(tmp_path, dtype)
    plan = planned(warehouse, tmp_path, None, method)
    read = {share.level: share.nbytes for share in level_shares(plan)}
    assert {"R2", "X"} <= read.keys()
    assert sum(read.values()) == plan.estimates.expert_bytes_planned
    assert plan.estimates.error_bound == 0
    first = run_plan(warehouse, plan, options=WINDOWS)
    assert first.realised.expert_bytes_read == plan.estimates.expert_bytes_planned
    alone = make_plan(warehouse, parse(plan.recipe_text, name="r", where="r"), no_packs=True)
    assert not alone.packs
    assert alone.plan_id == plan.plan_id
    again = run_plan(warehouse, alone, fresh=True)
    assert again.snapshot.snapshot_id == first.snapshot.snapshot_id


def test_exact_levels_take_all_directions_and_leave_approximate_ones_of_a_tensor_theirs(
    tmp_path: Path,
) -> None:
    found = only_pack(family(tmp_path, experts=1))
    name, at = "model.layers.0.a.weight", 2 * CHUNK_ELEMS
    base, expert, tensor = tensors("BF16")[name], tensors("BF16", 1)[name], found.tensors[name]
    near = decoded(found, name, "R0", base)
    numel, rungs = near.size, [TIERS.index(tier) for tier in FACTORED]
    ranges = (PackedRange(0, at, "R0", 0, False), PackedRange(at, numel, "X", 0, True))
    factor_nbytes = int(tensor.nbytes[rungs, 0].sum())
    packed = PackedInput(0, name, tensor.unit, tensor.factors, factor_nbytes, ranges)
    assert (packed.near_tiers, packed.factor_tiers) == (("R0",), FACTORED)

    def read_base(start: int, stop: int, into: memoryview) -> None:
        into[:] = base[2][2 * start : 2 * stop]

    with PackReader(found.source, tally := Tally()) as reader:
        elements = PackedElements(reader, packed, tensor.digest, read_base)
        some, rest = elements.fetch(0, numel, PageBuffer())
        delta, bits = np.zeros(at, np.float32), bytearray(2 * (numel - at))
        some.delta(delta)
        rest.fill(memoryview(bits), memoryview(base[2])[2 * at :])
    assert np.array_equal(delta, near[:at])
    assert bytes(bits) == expert[2][2 * at :]
    assert tally.nbytes == factor_nbytes + int(tensor.nbytes[TIERS.index("X"), 2:].sum())


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear"])
@pytest.mark.parametrize("budget", ["0.6%", "2%", "9%"])
def test_a_small_budget_reads_directions_and_gives_the_same_bits_in_any_windows(
    tmp_path: Path, method: str, budget: str
) -> None:
    warehouse = family(tmp_path)
    plan = planned(warehouse, tmp_path, budget, method)
    levels = {share.level: share.nbytes for share in level_shares(plan)}
    assert levels.keys() & {*FACTORED}
    assert sum(levels.values()) == plan.estimates.expert_bytes_planned
    assert plan.estimates.expert_bytes_planned <= (plan.estimates.budget_bytes or 0)
    first = run_plan(warehouse, plan)
    assert first.realised.expert_bytes_read == plan.estimates.expert_bytes_planned
    full = run_plan(warehouse, planned(warehouse, tmp_path, None, method))
    error = distance(Path(first.snapshot.path), Path(full.snapshot.path))
    bound, told = plan.estimates.error_bound, plan.estimates.predicted_error
    assert bound is None or error <= bound
    assert told is not None
    assert 0.8 * error < told < 1.25 * error
    again = run_plan(warehouse, plan, options=WINDOWS, fresh=True)
    assert again.snapshot.snapshot_id == first.snapshot.snapshot_id


def test_what_a_vote_keeps_of_directions_is_as_long_as_the_plan_says(tmp_path: Path) -> None:
    warehouse = family(tmp_path, experts=1)
    own = "parameters: {weight: 1.0, density: 0.3}"
    text = f"merge_method: ties\nbase_model: {tmp_path / 'base'}\ndtype: float32\n"
    raw = parse(f"{text}models:\n- {{model: {tmp_path / 'e0'}, {own}}}\n", name="r", where="r")
    name, found = "model.layers.0.a.weight", only_pack(warehouse).tensors
    base, delta = decode(tensors("BF16")[name]), decode(tensors("BF16", 1)[name])
    delta = delta.reshape(-1) - base.reshape(-1)
    updates = {}
    for budget in (None, "1.5%"):
        plan = make_plan(warehouse, raw, budget=budget)
        root = Path(run_plan(warehouse, plan).snapshot.path)
        (merged,) = [load_file(f)[name] for f in root.glob("*.safetensors") if name in load_file(f)]
        updates[budget] = merged.reshape(-1) - base.reshape(-1)
    expert = next(t for layer in plan.layers for t in layer.tasks if t.name == name).experts[0]
    assert expert.packed
    assert expert.trim
    (given,) = expert.packed.ranges
    near = decoded(only_pack(warehouse), name, given.level, tensors("BF16")[name])
    longer = np.float32(given.length) * near
    kept = np.abs(longer) > expert.trim.threshold
    assert np.allclose(updates["1.5%"], np.where(kept, longer, 0), atol=1e-7)
    left = found[name].residual_sq[TIERS.index(given.level)].sum()
    share = 0.68 + 0.3 * (1 - left / np.square(delta).sum())
    ratio = np.linalg.norm(updates["1.5%"]) / np.linalg.norm(updates[None])
    assert given.length != 1
    assert ratio == pytest.approx(share, rel=0.03)


def test_factors_do_not_depend_on_threads_and_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for n_threads in (1, 4):
        monkeypatch.setattr(threads, "analysis", lambda n=n_threads: n)
        warehouse = family(tmp_path / str(n_threads), experts=1)
        root = only_pack(warehouse).root
        files.append({p.name: p.read_bytes() for p in root.iterdir()})
    assert files[0] == files[1]
    folder = tmp_path / "4"
    changed = tensors("BF16", 1) | {"model.layers.0.norm.weight": encode(np.ones(400), "BF16")}
    write(folder / "e0", "e0", changed)
    (made,) = pack(warehouse, ["e0"])
    assert made.taken_over == 2
    known = warehouse.packs.open(made.pack_id)
    assert known.tensors["model.layers.0.a.weight"].factors
    for tier in FACTORED:
        assert frames_path(known.root, tier).read_bytes() == files[0][f"{tier}.frames"]


def test_a_damaged_rung_is_named_and_is_no_part_of_another_pack(tmp_path: Path) -> None:
    warehouse = family(tmp_path)
    plan = planned(warehouse, tmp_path, "2%")
    path = frames_path(only_pack(warehouse).root, "R0")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    name, base = "model.layers.0.a.weight", tensors("BF16")["model.layers.0.a.weight"]
    with pytest.raises(CorruptionError, match=r"R0\.frames, tensor model\.layers\.0\.a\.weight"):
        decoded(only_pack(warehouse), name, "R1", base)
    roots = [source.root for source in plan.packs]
    number = roots.index(str(path.parent))
    norm = {"model.layers.0.norm.weight": encode(np.ones(400), "BF16")}
    write(tmp_path / f"e{number}", f"e{number}", tensors("BF16", number + 1) | norm)
    (made,) = pack(warehouse, [f"e{number}"])
    assert made.pack_id != path.parent.name
    whole = decoded(warehouse.packs.open(made.pack_id), name, "L3", base)
    delta = (decode(tensors("BF16", number + 1)[name]) - decode(base)).reshape(-1)
    assert np.linalg.norm(whole - delta) < 0.15 * np.linalg.norm(delta)
