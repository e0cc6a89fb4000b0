"""Windows of any length get what the plan takes from a pack, and read no frame twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.checkpoints.reader import Tally
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, TIERS_OF, Level
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.packs.elements import PackedElements, PackedPart, PackReader
from mergepipe_pipeline.packs.frames import Frames
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from tests.engine.packed import NUMEL, PackedFamily, make_family, plan_from, reader_of_base
from tests.packs.approximate import quantised_at
from tests.support.stored import decode

CHUNKS = [*range(0, NUMEL, CHUNK_ELEMS), NUMEL]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> PackedFamily:
    return make_family(tmp_path_factory.mktemp("family"), n_experts=1)


@given(
    st.lists(st.sampled_from([None, *TIERS]), min_size=3, max_size=3),
    st.lists(st.sampled_from([1.0, 0.75, 1.125]), min_size=3, max_size=3),
    st.sets(st.one_of(st.integers(1, NUMEL - 1), st.sampled_from(CHUNKS[1:-1])), max_size=6),
    st.randoms(use_true_random=False),
)
def test_windows_of_any_length_in_any_order_read_each_frame_once(
    family: PackedFamily,
    levels: list[Level | None],
    lengths: list[float],
    cuts: set[int],
    order: Random,
) -> None:
    taken = [(a, b, lev) for (a, b), lev in zip(pairwise(CHUNKS), levels, strict=True) if lev]
    plan = plan_from(family, "task_arithmetic", levels=[taken or [(0, NUMEL, "L0")]])
    (e,) = plan.layers[0].tasks[0].experts
    assert e.packed is not None
    longer = [
        replace(r, length=1.0 if r.gives_bits else length)
        for r, length in zip(e.packed.ranges, lengths, strict=False)
    ]
    packed = replace(e.packed, ranges=tuple(longer))
    windows = list(pairwise([0, *sorted(cuts), NUMEL]))
    order.shuffle(windows)
    tally, found = Tally(), np.zeros(NUMEL, np.float32)
    with PackReader(family.packs[0], tally) as reader:
        elements = PackedElements(reader, packed, e.digest, reader_of_base(family))
        for start, stop in windows:
            for part in elements.fetch(start, stop, PageBuffer()):
                found[part.start_elem : part.stop_elem] = _delta(part, family)
    assert tally.nbytes == packed.nbytes
    (tensor,), delta = family.tensors, family.experts[0] - family.base
    for r in packed.ranges:
        inside = slice(r.start_elem, r.stop_elem)
        wanted = quantised_at(r.level, delta[inside], tensor.unit, tensor.threshold_bits)
        assert np.allclose(found[inside], np.float32(r.length) * wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", ["L1", "X20", "X"])
def test_a_frame_that_makes_no_sense_is_named_though_its_checksum_is_right(
    family: PackedFamily, level: Level
) -> None:
    (tensor,) = family.tensors
    frames = Frames.of({tier: [f"{tier} is not a frame".encode()] for tier in TIERS_OF[level]})
    part = PackedPart("/packs/p", tensor, [level], CHUNK_ELEMS, 2 * CHUNK_ELEMS, frames)
    with pytest.raises(CorruptionError) as caught:
        _delta(part, family)
    assert caught.value.where == f"/packs/p, level {level}, tensor w, chunk 1"
    assert "mergepipe verify" in str(caught.value.next_step)


def _delta(part: PackedPart, family: PackedFamily) -> F32Array:
    n = part.stop_elem - part.start_elem
    if part.gives_bits:
        base = memoryview(family.stored[0][2])[2 * part.start_elem : 2 * part.stop_elem]
        out = bytearray(2 * n)
        part.fill(memoryview(out), base)
        return decode(("BF16", (n,), bytes(out))) - decode(("BF16", (n,), bytes(base)))
    delta = np.empty(n, np.float32)
    part.delta(delta)
    return delta
