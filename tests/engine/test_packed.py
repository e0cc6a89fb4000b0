"""A merge from packs: exact levels give what the originals give, others what δ̂ gives in torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mergepipe_pipeline.domain.outcome import LayerOutcome
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, Level
from mergepipe_pipeline.domain.plan import ExpertInput, MergePlan, TrimRule
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.engine.execute import LayerRunner
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.engine.window import to_bytes
from mergepipe_pipeline.errors import CorruptionError, DamagedPackError
from mergepipe_pipeline.operators import OPERATORS, Window
from mergepipe_pipeline.packs import together
from mergepipe_pipeline.packs.frame_files import Attempt, read_at_once
from mergepipe_pipeline.packs.index import frames_path
from tests.engine.packed import (
    NUMEL,
    Levels,
    PackedFamily,
    all_at,
    make_family,
    plan_from,
    write_pack,
)
from tests.engine.test_accelerator import MERGES, WEIGHTED, on
from tests.packs.approximate import quantised_at
from tests.support.stored import content_of

C = CHUNK_ELEMS
TWO = EngineOptions(threads=2)
#: As MERGES, of operators that are not among these.
OTHERS: dict[str, tuple[Params, Params, tuple[float, ...]]] = {
    "arcee_fusion": ((), (), (0.001,)),
    "breadcrumbs": ((), (("density", 0.6), ("gamma", 0.1)), ()),
    "nearswap": ((("t", 0.001),), (), ()),
    "nuslerp": ((), (), (1.0, 0.4, 0.7)),
    "passthrough": ((), (), ()),
    "ramplus_tl": ((), (), (0.5, 0.3, 0.2, 0.1)),
    "slerp": ((("t", 0.4),), (), (0.6, 0.7)),
}
#: How many experts they take, where it is not three, and facts of three where MERGES has more.
N_EXPERTS = {"arcee_fusion": 1, "nearswap": 1, "passthrough": 1, "slerp": 1, "nuslerp": 2}
FACTS = {
    "sce": (0.05, 100.0, 0.3, 0.3, 0.4),
    "multislerp": (1.0, 0.3, 0.2, 0.1),
    "karcher": (0.0, 0.3, 0.2, 0.1),
}
#: Every expert in another way: chunks from the pack, from the original, and at several levels.
MIXED: Sequence[Levels] = (
    [(0, C, "X"), (2 * C, NUMEL, "X")],
    [(0, 2 * C, "X")],
    [(C, NUMEL, "X")],
)
NEAR: Sequence[Levels] = (
    [(0, C, "L2"), (C, 2 * C, "X"), (2 * C, NUMEL, "L0")],
    [(0, 2 * C, "L1")],
    [(0, C, "X20"), (C, 2 * C, "L3"), (2 * C, NUMEL, "X20")],
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> PackedFamily:
    return make_family(tmp_path_factory.mktemp("family"))


def plan_for(
    family: PackedFamily, operator: str, levels: Sequence[Levels] = (), out_dtype: str = "BF16"
) -> MergePlan:
    """A merge with rules for every sparsifier, and an open factor where numbers are drawn."""
    method, own, facts = {**MERGES, **OTHERS}[operator]
    weighted = [(("weight", w), *own) if operator in WEIGHTED else own for w in (0.3, 0.7, -0.1)]
    n = N_EXPERTS.get(operator)
    plan = plan_from(family, operator, method, weighted, levels, out_dtype=out_dtype, n_experts=n)
    (task,) = plan.layers[0].tasks
    open_rule = TrimRule(int(np.float32(1e-3).view(np.uint32)), 0, 5, C)
    outliers = TrimRule(int(np.float32(3e-3).view(np.uint32)), 100)
    l1s = [
        float(np.abs(values - family.base).sum(dtype=np.float64))
        if operator.startswith("dare")
        else None
        for values in family.experts
    ]
    experts = tuple(
        replace(e, trim=open_rule, outliers=outliers, scale=1.7, l1=l1)
        for e, l1 in zip(task.experts, l1s, strict=False)
    )
    facts = FACTS.get(operator, facts)
    layer = replace(plan.layers[0], tasks=(replace(task, experts=experts, facts=facts),))
    return replace(plan, layers=(layer,))


def run(
    plan: MergePlan,
    folder: Path,
    options: EngineOptions = TWO,
    known: KnownSegments | None = None,
) -> tuple[bytes, LayerOutcome]:
    """The file of the plan's one layer, and what it cost."""
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    with LayerRunner(plan, options, known) as runner:
        result = runner.run(plan.layers[0], file)
    assert result.cost.expert_bytes_read == plan.layers[0].expert_bytes_planned
    return file.read_bytes(), result


def test_all_operators_that_take_a_base_are_merged_here() -> None:
    assert {*MERGES, *OTHERS} == set(OPERATORS) - {"auto"}  # which becomes others


@pytest.mark.parametrize("operator", [*MERGES, *OTHERS])
def test_exact_levels_give_the_file_that_the_originals_give(
    family: PackedFamily, tmp_path: Path, operator: str
) -> None:
    wanted, _ = run(plan_for(family, operator), tmp_path)
    for levels in ([all_at("X")] * 3, MIXED):
        plan = plan_for(family, operator, levels)
        assert plan.plan_id == plan_for(family, operator).plan_id
        assert run(plan, tmp_path, known=family)[0] == wanted


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_exact_levels_of_other_types_give_the_originals_file(tmp_path: Path, dtype: str) -> None:
    family = make_family(tmp_path / "family", dtype)
    for operator, out_dtype in (("ties", "F32"), ("passthrough", dtype)):
        wanted, _ = run(plan_for(family, operator, out_dtype=out_dtype), tmp_path)
        found, _ = run(plan_for(family, operator, [all_at("X")] * 3, out_dtype), tmp_path)
        assert found == wanted


@pytest.mark.parametrize(
    "operator",
    ["linear", "task_arithmetic", "ties", "dare_ties", "della", "della_linear", "ram", "sce"],
)
def test_near_levels_give_what_the_operator_makes_of_their_deltas_in_torch(
    family: PackedFamily, tmp_path: Path, operator: str
) -> None:
    _assert_as_in_torch(family, tmp_path, operator)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_near_levels_of_other_types_do_so_too(tmp_path: Path, dtype: str) -> None:
    family = make_family(tmp_path / "family", dtype)
    for operator in ("linear", "ties"):
        _assert_as_in_torch(family, tmp_path, operator)


def _assert_as_in_torch(family: PackedFamily, tmp_path: Path, operator: str) -> None:
    plan = plan_for(family, operator, NEAR, "F32")
    plan = _without_open_factors(plan)
    found, _ = run(plan, tmp_path)
    (task,) = plan.layers[0].tasks
    deltas = [_delta(family, e) for e in task.experts]
    base = torch.from_numpy(family.base.copy())
    rows = [torch.from_numpy(d) for d in deltas]
    if operator == "linear":
        rows = [_values(family, e, d) for e, d in zip(task.experts, rows, strict=True)]
    closed = replace(
        task, experts=tuple(_closed(e, d) for e, d in zip(task.experts, deltas, strict=True))
    )
    merged = OPERATORS[operator].apply(Window(base, torch.stack(rows), closed, 0))
    assert found.endswith(to_bytes(merged, "F32").tobytes())


def _without_open_factors(plan: MergePlan) -> MergePlan:
    (task,) = plan.layers[0].tasks
    experts = tuple(replace(e, l1=None) for e in task.experts)
    layer = replace(plan.layers[0], tasks=(replace(task, experts=experts),))
    return replace(plan, layers=(layer,))


def _delta(family: PackedFamily, e: ExpertInput) -> np.ndarray:
    """δ̂ where the plan says so, δ elsewhere."""
    delta = family.experts[e.position] - family.base
    tensor, packed = family.tensors[e.position], e.packed
    assert packed is not None
    for r in packed.ranges:
        part = slice(r.start_elem, r.stop_elem)
        delta[part] = quantised_at(r.level, delta[part], tensor.unit, tensor.threshold_bits)
    return delta


def _values(family: PackedFamily, e: ExpertInput, delta: torch.Tensor) -> torch.Tensor:
    """T where bits are given, B + δ̂ elsewhere."""
    values = torch.from_numpy(family.base) + delta
    exact = torch.from_numpy(family.experts[e.position])
    near = [r for r in e.packed.ranges if r.level != "X"] if e.packed else []
    is_exact = torch.ones(NUMEL, dtype=torch.bool)
    for r in near:
        is_exact[r.start_elem : r.stop_elem] = False
        if r.level == "X20":
            is_exact[r.start_elem : r.stop_elem] = delta[r.start_elem : r.stop_elem] != 0
    return torch.where(is_exact, exact, values)


def _closed(e: ExpertInput, delta: np.ndarray) -> ExpertInput:
    """The input with the open rule closed by looking at all of its deltas."""
    assert e.trim is not None
    ties = np.flatnonzero(
        np.abs(delta[: e.trim.ties_until_elem]).view(np.uint32) == e.trim.threshold_bits
    )
    stop = int(ties[: e.trim.ties_after][-1]) + 1 if len(ties) else 0
    return replace(e, trim=TrimRule(e.trim.threshold_bits, stop))


def test_what_a_pack_gives_as_the_expert_s_bits_is_compared_with_those_that_were_analysed(
    tmp_path: Path,
) -> None:
    family = make_family(tmp_path / "family", n_experts=1)
    base, expert = family.stored
    other = (*expert[:2], bytes(reversed(expert[2])))
    lying, tensor = write_pack(tmp_path / "lying", base, other, content_of(expert))
    swapped = replace(family, packs=(lying,), tensors=(tensor,))
    plan = plan_from(swapped, "task_arithmetic", levels=[all_at("X")])
    with pytest.raises(DamagedPackError, match="does not give its expert's bytes") as caught:
        run(plan, tmp_path, known=family)
    assert caught.value.pack_id == plan.packs[0].pack_id


@pytest.mark.parametrize("level", ["X20", "X"])
def test_a_byte_of_the_base_that_is_wrong_only_where_a_cut_chunk_is_decoded_is_named(
    tmp_path: Path, level: Level
) -> None:
    family = make_family(tmp_path / "family", n_experts=1)
    plan = plan_from(family, "task_arithmetic", levels=[all_at(level)])
    entry, file = family.checkpoints[0].tensors[0], tmp_path / "layer.safetensors"
    path = Path(family.checkpoints[0].root)
    kept, was = path.read_bytes(), path.stat()

    def put(data: bytes) -> None:
        path.write_bytes(data)
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    at = entry.start_byte + 2 * (C - 100)
    put(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
    options = EngineOptions(window_elems=7777, threads=1)
    said = "not those that were analysed"
    # The first window has the chunk decoded, the last one reads the byte as the base's.
    with (
        LayerRunner(plan, options, family) as runner,
        pytest.raises(CorruptionError, match=said) as caught,
    ):
        runner.run(plan.layers[0], file, lambda nbytes: put(kept))
    assert f"tensor w, elements 0 to {C}" in str(caught.value.where)
    assert not file.exists()


@pytest.mark.parametrize("operator", ["linear", "ties", "dare_linear", "della"])
def test_bits_depend_neither_on_windows_nor_on_threads(
    family: PackedFamily, tmp_path: Path, operator: str
) -> None:
    plan = plan_for(family, operator, NEAR)
    ways = [(None, 1), (None, 4), (C, 2), (7777, 3), (NUMEL, 1)]
    found = {run(plan, tmp_path, EngineOptions(window_elems=w, threads=t))[0] for w, t in ways}
    assert len(found) == 1


def test_a_device_gives_the_cpu_s_file(family: PackedFamily, tmp_path: Path) -> None:
    plan = plan_for(family, "ties", NEAR)
    wanted, _ = run(plan, tmp_path)
    with on("stand-in"):
        assert run(plan, tmp_path, EngineOptions(threads=2, device="cuda"))[0] == wanted


@pytest.mark.parametrize("level", ["L1", "X20", "X"])
def test_a_flipped_bit_in_a_frame_is_named_and_nothing_is_written(
    tmp_path: Path, level: Level
) -> None:
    family = make_family(tmp_path / "family", n_experts=2)
    path = frames_path(Path(family.packs[1].root), level)
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    plan = plan_from(family, "task_arithmetic", levels=[all_at("X"), all_at(level)])
    file = tmp_path / "layer.safetensors"
    with LayerRunner(plan, TWO) as runner, pytest.raises(CorruptionError) as caught:
        runner.run(plan.layers[0], file)
    assert caught.value.where == f"{path}, tensor w, chunk 2"
    assert not file.exists()


def test_seconds_of_reading_ahead_are_not_taken_from_those_of_arithmetic(
    family: PackedFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any) -> Attempt:
        time.sleep(0.2)
        return read_at_once(*args)

    monkeypatch.setattr(together, "read_at_once", slow)
    _, result = run(plan_from(family, "task_arithmetic", levels=[all_at("X")]), tmp_path)
    assert result.cost.read_s >= 0.2
    assert result.cost.arithmetic_s > 0


def test_what_is_passed_through_from_a_pack_keeps_every_pattern_of_bits(tmp_path: Path) -> None:
    family = make_family(tmp_path / "family", n_experts=1, patterns=True)
    wanted, _ = run(plan_for(family, "passthrough"), tmp_path)
    plan = plan_for(family, "passthrough", [[(0, C, "X"), (2 * C, NUMEL, "X")]])
    assert run(plan, tmp_path)[0] == wanted


def test_the_pack_of_another_expert_is_refused(family: PackedFamily, tmp_path: Path) -> None:
    plan = plan_from(family, "task_arithmetic", levels=[all_at("L1")])
    swapped = replace(plan, packs=(family.packs[1], family.packs[0], family.packs[2]))
    with pytest.raises(CorruptionError, match="does not hold what was planned"):
        run(swapped, tmp_path)
