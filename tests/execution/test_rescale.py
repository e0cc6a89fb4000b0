"""The pass before a DARE merge reads what was analysed, or refuses it by the delta's norm."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.plan import MergePlan, TensorTask
from mergepipe_pipeline.engine.rescale import RescalePrepass
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.facts.input_segments import plan_inputs
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.laws import examples

pytestmark = pytest.mark.usefixtures("baselines")


@pytest.fixture
def plan(home: Warehouse, recipe_text: Callable[..., str]) -> MergePlan:
    """A full DARE merge, whose factors are open."""
    text = recipe_text("dare_ties", "{density: 0.5}")
    return make_plan(home, parse(text, name="test", where="test"))


def scales(home: Warehouse, plan: MergePlan) -> list[list[float]]:
    """The factors that the pass finds for every task."""
    tasks = [task for layer in plan.layers for task in layer.tasks]
    known = plan_inputs(home, plan, plan.layers)
    with SourcePool(plan, known) as sources, RescalePrepass(sources, 2) as prepass:
        return [[e.scale for e in prepass.rescaled(task).experts] for task in tasks]


@pytest.mark.parametrize("held_nbytes", [0, 3 << 20, 1 << 30])
def test_factors_come_in_order_and_are_the_same_however_far_ahead_they_are_found(
    home: Warehouse, plan: MergePlan, held_nbytes: int
) -> None:
    tasks = [task for layer in plan.layers for task in layer.tasks]
    known, right = plan_inputs(home, plan, plan.layers), scales(home, plan)
    with SourcePool(plan, known, held_nbytes) as sources, RescalePrepass(sources, 2) as prepass:
        found = list(prepass.rescaled_ahead(iter(tasks)))
    assert [t.name for t in found] == [t.name for t in tasks]
    assert [[e.scale for e in t.experts] for t in found] == right
    assert all(e.l1 is None for t in found for e in t.experts)


@pytest.mark.parametrize("held_nbytes", [0, 1 << 30])
def test_factors_are_found_as_far_ahead_as_what_is_read_can_be_held(
    home: Warehouse, plan: MergePlan, monkeypatch: pytest.MonkeyPatch, held_nbytes: int
) -> None:
    opened = [t for lay in plan.layers for t in lay.tasks if any(e.l1 for e in t.experts)]
    asked: list[str] = []
    real = RescalePrepass.rescaled

    def rescaled(self: RescalePrepass, task: TensorTask) -> TensorTask:
        asked.append(task.name)
        return real(self, task)

    monkeypatch.setattr(RescalePrepass, "rescaled", rescaled)
    known = plan_inputs(home, plan, plan.layers)
    most, deadline_s = 2 if held_nbytes == 0 else len(opened), time.monotonic() + 30
    with SourcePool(plan, known, held_nbytes) as sources, RescalePrepass(sources, 2) as prepass:
        ahead = prepass.rescaled_ahead(iter(opened))
        next(ahead)
        while len(asked) < most and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert len(asked) == most < 1 + len(opened)
        ahead.close()


def test_a_flipped_bit_that_makes_no_number_of_an_element_is_refused_by_the_norm(
    home: Warehouse, plan: MergePlan
) -> None:
    tasks = [task for layer in plan.layers for task in layer.tasks]
    e = next(e for t in tasks for e in t.experts if "layernorm" in t.name and e.l1 is not None)
    entry = e.view.stored[0].entry
    path = Path(plan.sources[e.view.stored[0].source].root) / entry.file
    high = path.read_bytes()[entry.start_byte + 1 : entry.start_byte + entry.nbytes : 2]
    number = high.index(0x3F)  # of 1 and more: with all bits of its exponent it is NaN
    with (
        _flipped(path, entry.start_byte + 2 * number + 1, 0x40),
        pytest.raises(CorruptionError, match=r"elements \d+ to"),
    ):
        scales(home, plan)


def test_any_flipped_bit_of_an_expert_is_refused_by_the_norm_of_its_delta(
    home: Warehouse, plan: MergePlan
) -> None:
    right = scales(home, plan)
    opened = [e for layer in plan.layers for t in layer.tasks for e in t.experts if e.l1]
    assert opened
    bases = {
        t.base.view.name: t.base.view.stored[0].entry
        for layer in plan.layers
        for t in layer.tasks
        if t.base
    }
    base_path = Path(plan.sources[plan.roles.index("base")].root) / "model.safetensors"

    @settings(max_examples=examples(6))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        e = data.draw(st.sampled_from(opened))
        entry = e.view.stored[0].entry
        path = Path(plan.sources[e.view.stored[0].source].root) / entry.file
        byte = entry.start_byte + data.draw(st.integers(0, entry.nbytes - 1))
        flip = 1 << data.draw(st.integers(0, 7))
        elem = (byte - entry.start_byte) // 2
        base, was = _bfloat16(base_path, bases[entry.name], elem), _bfloat16(path, entry, elem)
        with _flipped(path, byte, flip):
            # A delta of the other sign has the same norm, and gives the same factor.
            assume(abs(_bfloat16(path, entry, elem) - base) != abs(was - base))
            with pytest.raises(CorruptionError, match=r"elements \d+ to"):
                scales(home, plan)

    check()
    assert scales(home, plan) == right


def _bfloat16(path: Path, entry: TensorEntry, elem: int) -> float:
    """An element as it lies in the file."""
    bits = np.fromfile(path, np.uint16, 1, offset=entry.start_byte + 2 * elem).astype(np.uint32)
    return float((bits << 16).view(np.float32)[0])


class _flipped:
    """A byte with other bits; size and times stay."""

    def __init__(self, path: Path, byte: int, flip: int) -> None:
        self._path, self._byte, self._flip = path, byte, flip

    def __enter__(self) -> None:
        found = self._path.stat()
        with self._path.open("r+b") as file:
            file.seek(self._byte)
            (value,) = file.read(1)
            file.seek(self._byte)
            file.write(bytes([value ^ self._flip]))
        os.utime(self._path, ns=(found.st_atime_ns, found.st_mtime_ns))

    def __exit__(self, *_: object) -> None:
        self.__enter__()
