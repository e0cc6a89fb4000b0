"""Trim rules that a plan leaves open: windows find where their ties are cut, and read no more.

Against the same plans with closed rules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.domain.blocks import Range
from mergepipe_pipeline.domain.plan import MergePlan, TrimRule
from mergepipe_pipeline.engine.execute import LayerRunner
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.engine.window import BufferPool, Window
from tests.engine.plans import merged
from tests.support.kinds import KINDS, Kinds, make_kinds
from tests.support.stored import Floats

BLOCK = 4096
OWN = (("weight", 1.0), ("density", 0.5), ("gamma", 0.1))
Rules = Sequence[tuple[TrimRule, TrimRule]]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(tmp_path_factory.mktemp("kinds"), rows=150, cols=100)


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def open_and_closed(
    delta: Floats, value: float, block: int, ties: int
) -> tuple[TrimRule, TrimRule]:
    """The rule that keeps the first `ties` ties at `value` of a block, and what it means."""
    start, stop = block * BLOCK, min(len(delta), (block + 1) * BLOCK)
    found = start + np.flatnonzero(np.abs(delta[start:stop]) == value)
    cut = int(found[ties - 1]) + 1 if ties <= len(found) else stop
    return TrimRule(bits(value), start, ties, stop), TrimRule(bits(value), cut)


def common_value(delta: Floats, block: int) -> float:
    """The most frequent |δ| > 0 of a block; 1 if there is none."""
    size = np.abs(delta[block * BLOCK : (block + 1) * BLOCK])
    values, counts = np.unique(size[size > 0], return_counts=True)
    return float(values[counts.argmax()]) if len(values) else 1.0


def with_rules(plan: MergePlan, rules: Rules) -> MergePlan:
    """The plan with these rules, (trim, outliers) per expert."""
    ((task,),) = (layer.tasks for layer in plan.layers)
    experts = tuple(
        replace(e, trim=trim, outliers=outliers)
        for e, (trim, outliers) in zip(task.experts, rules, strict=True)
    )
    layer = replace(plan.layers[0], tasks=(replace(task, experts=experts),))
    return replace(plan, layers=(layer,))


def digest(plan: MergePlan, folder: Path, options: EngineOptions) -> tuple[str, int]:
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    with LayerRunner(plan, options) as runner:
        result = runner.run(plan.layers[0], file)
    return result.stored.sha256, result.cost.expert_bytes_read


@pytest.mark.parametrize("operator", ["breadcrumbs", "breadcrumbs_ties"])
def test_open_rules_of_experts_of_every_kind_mean_the_first_ties_of_their_block(
    kinds: Kinds, tmp_path: Path, operator: str
) -> None:
    names = [name for name in KINDS if name != "empty"]
    plan = merged(kinds, names, operator, (), [OWN] * len(names))
    opened, closed = [], []
    for number, name in enumerate(names):
        delta, block = kinds.experts[name].delta, number % 3
        value = common_value(delta, block)
        trim = open_and_closed(delta, value, block, 1 + 3 * number)
        outliers = open_and_closed(delta, value * 2, (number + 1) % 3, 2)
        opened.append((trim[0], outliers[0]))
        closed.append((trim[1], outliers[1]))
    wanted = digest(with_rules(plan, closed), tmp_path, EngineOptions(threads=2))
    for window, threads in ((None, 2), (777, 1), (4096, 3)):
        options = EngineOptions(window_elems=window, threads=threads)
        assert digest(with_rules(plan, opened), tmp_path, options) == wanted
    assert with_rules(plan, opened).plan_id == with_rules(plan, closed).plan_id


@pytest.mark.parametrize("read", [((0, 4096), (8192, 15000)), ((4096, 8192),), ((0, 15000),)])
def test_an_open_rule_costs_no_byte_that_the_plan_does_not_read(
    kinds: Kinds, tmp_path: Path, read: tuple[Range, ...]
) -> None:
    delta = kinds.experts["full"].delta
    opened, closed = open_and_closed(delta, common_value(delta, 1), 1, 5)
    plan = merged(kinds, ["full"], "breadcrumbs", (), [OWN], [read])
    found = digest(with_rules(plan, [(opened, opened)]), tmp_path, EngineOptions(threads=2))
    assert found[1] == plan.layers[0].expert_bytes_planned
    closed_plan = with_rules(plan, [(closed, closed)])
    assert found == digest(closed_plan, tmp_path, EngineOptions(threads=2))


@pytest.mark.parametrize("step", ["run", "announce"])
@pytest.mark.parametrize("at", [4000, 5000, 8000])
def test_a_window_that_fails_stops_the_run_with_its_own_error(
    kinds: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, at: int
) -> None:
    """Those before it are late, those behind it wait for their turn in the block."""
    delta = kinds.experts["full"].delta
    opened, _ = open_and_closed(delta, common_value(delta, 1), 1, 5)
    plan = with_rules(merged(kinds, ["full"], "breadcrumbs", (), [OWN]), [(opened, opened)])
    real_run, real_announce = Window.run, Window.announce

    def late(self: Window[BufferPool], buffers: BufferPool) -> U8Array:
        if self._start < at:
            time.sleep(0.05)
        return real_run(self, buffers)

    def broken(self: Window[BufferPool], *buffers: BufferPool) -> object:
        if self._start == at:
            raise OSError("the disk is gone")
        return late(self, *buffers) if step == "run" else real_announce(self)

    monkeypatch.setattr(Window, "run", late)
    monkeypatch.setattr(Window, step, broken)
    with pytest.raises(OSError, match="the disk is gone"):
        digest(plan, tmp_path, EngineOptions(window_elems=1000, threads=3))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_left_while_windows_wait_for_each_other_ends(
    kinds: Kinds, tmp_path: Path
) -> None:
    delta = kinds.experts["full"].delta
    opened, _ = open_and_closed(delta, common_value(delta, 1), 1, 5)
    plan = with_rules(merged(kinds, ["full"], "breadcrumbs", (), [OWN]), [(opened, opened)])

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    for _ in range(20):
        with (
            LayerRunner(plan, EngineOptions(window_elems=100, threads=3)) as runner,
            pytest.raises(KeyboardInterrupt),
        ):
            runner.run(plan.layers[0], tmp_path / "f", stop)


@pytest.mark.parametrize("name", ["full", "cropped"])
def test_of_a_part_of_a_block_the_first_ties_of_that_part_are_kept(
    kinds: Kinds, tmp_path: Path, name: str
) -> None:
    delta = kinds.experts[name].delta
    value = common_value(delta, 1)
    inside = 5000 + np.flatnonzero(np.abs(delta[5000:7000]) == value)
    plan = merged(kinds, [name], "breadcrumbs", (), [OWN], [((5000, 7000),)])
    rules = TrimRule(bits(value), 4096, 3, 8192), TrimRule(bits(value), int(inside[2]) + 1)
    one, other = (
        digest(with_rules(plan, [(rule, rule)]), tmp_path, EngineOptions(threads=1))
        for rule in rules
    )
    assert one == other
