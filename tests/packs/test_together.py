"""What several inputs get of their packs together is what each gets by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.reader import Tally
from mergepipe_pipeline.domain.pack import CHUNK_ELEMS, TIERS, Level
from mergepipe_pipeline.errors import CorruptionError, DamagedPackError
from mergepipe_pipeline.packs import frame_files
from mergepipe_pipeline.packs.elements import PackedElements, PackedPart, PackReader
from mergepipe_pipeline.packs.exact import Bits
from mergepipe_pipeline.packs.frame_files import read_runs
from mergepipe_pipeline.packs.frames import Frames
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.packs.together import PackedInputs, Placed, decode_together
from mergepipe_pipeline.storage.page_buffer import PageBuffer
from mergepipe_pipeline.storage.source import Handles
from tests.engine.packed import (
    NUMEL,
    Levels,
    PackedFamily,
    all_at,
    make_family,
    plan_from,
    reader_of_base,
)

CHUNKS = [*range(0, NUMEL, CHUNK_ELEMS), NUMEL]
LEVELS = st.lists(st.sampled_from([None, *TIERS]), min_size=3, max_size=3)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> PackedFamily:
    return make_family(tmp_path_factory.mktemp("family"))


@contextmanager
def opened(
    family: PackedFamily, levels: Sequence[Levels]
) -> Iterator[tuple[list[PackedElements], Tally]]:
    """What each expert's input gets of its pack, and what counts the bytes."""
    plan, tally = plan_from(family, "task_arithmetic", levels=levels), Tally()
    with ExitStack() as stack:
        found = []
        for e in plan.layers[0].tasks[0].experts:
            assert e.packed is not None
            reader = PackReader(family.packs[e.position], tally)
            stack.enter_context(reader)
            found.append(PackedElements(reader, e.packed, e.digest, reader_of_base(family)))
        yield found, tally


def taken(levels: Sequence[Level | None]) -> Levels:
    """Each chunk at its level; all at L0 if none is at any."""
    found = [(a, b, lev) for (a, b), lev in zip(pairwise(CHUNKS), levels, strict=True) if lev]
    return found or all_at("L0")


def decoded(parts: Sequence[Sequence[PackedPart]], family: PackedFamily, *, together: bool) -> Bits:
    """Rows [experts, NUMEL] of what the parts of a window give."""
    base = np.frombuffer(family.stored[0][2], np.uint16)
    rows = np.zeros((len(parts), NUMEL), np.uint16)
    placed = [
        Placed(p, row * NUMEL + p.start_elem, p.start_elem)
        for row, of in enumerate(parts)
        for p in of
    ]
    for some in [placed] if together else [[p] for p in placed]:
        decode_together(some, base, rows.reshape(-1))
    return rows


@given(
    st.lists(LEVELS, min_size=3, max_size=3),
    st.sets(st.one_of(st.integers(1, NUMEL - 1), st.sampled_from(CHUNKS[1:-1])), max_size=4),
    st.sampled_from([1, 16 * len(TIERS), 512]),
)
def test_inputs_read_and_decoded_together_give_what_each_gives_alone(
    family: PackedFamily,
    levels: list[list[Level | None]],
    cuts: set[int],
    most_files: int,
) -> None:
    wanted = [taken(of) for of in levels]
    with (
        pytest.MonkeyPatch.context() as patch,
        opened(family, wanted) as (alone, nbytes_alone),
        opened(family, wanted) as (others, nbytes),
    ):
        patch.setattr("mergepipe_pipeline.packs.together.HANDLES", Handles(most_files))
        inputs = PackedInputs(others)
        for window in pairwise([0, *sorted(cuts), NUMEL]):
            mine = [e.fetch(*window, PageBuffer()) for e in alone]
            theirs = inputs.fetch(*window, PageBuffer())
            for one, other in zip(mine, theirs, strict=True):
                assert [p.levels for p in one] == [p.levels for p in other]
            found = decoded(theirs, family, together=True)
            assert np.array_equal(found, decoded(mine, family, together=False))
    assert nbytes.nbytes == nbytes_alone.nbytes


def test_frames_of_several_packs_are_read_by_one_call(
    family: PackedFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*args: Any) -> object:
        calls.append(len(args[0]))
        return read_runs(*args)

    monkeypatch.setattr(frame_files, "read_runs", counted)
    with opened(family, [all_at("X")] * 3) as (elements, _):
        PackedInputs(elements).fetch(0, NUMEL, PageBuffer())
    assert len(calls) == 1
    assert calls[0] >= 3  # X of three packs


def test_a_damaged_frame_of_one_of_several_packs_is_named(tmp_path: Path) -> None:
    family = make_family(tmp_path / "family")
    path = frames_path(Path(family.packs[1].root), "L1")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with opened(family, [all_at("L1")] * 3) as (elements, tally):
        inputs = PackedInputs(elements)
        inputs.fetch(0, CHUNK_ELEMS, PageBuffer())
        before = tally.nbytes
        with pytest.raises(DamagedPackError) as caught:
            inputs.fetch(CHUNK_ELEMS, NUMEL, PageBuffer())
    assert caught.value.where == f"{path}, tensor w, chunk 2"
    assert before > 0


def test_a_part_of_several_that_cannot_be_decoded_is_named(family: PackedFamily) -> None:
    raw = np.frombuffer(b"not a frame", np.uint8)
    starts = np.zeros((len(TIERS), 1), np.int64)

    def part(number: int, nbytes: int) -> list[PackedPart]:
        root, tensor = family.packs[number].root, family.tensors[number]
        frames = Frames(raw, starts, np.full((len(TIERS), 1), nbytes))
        return [PackedPart(root, tensor, ["L1"], 0, CHUNK_ELEMS, frames)]

    with pytest.raises(CorruptionError) as caught:
        decoded([part(0, 0), part(1, len(raw)), part(2, 0)], family, together=True)
    assert caught.value.where == f"{family.packs[1].root}, level L1, tensor w, chunk 0"
