"""Stored elements of views: runs put together, cropped, and moved to other source numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.checkpoints.stored import as_float32, read_stored
from mergepipe_pipeline.domain.view import LowRank, TensorView, cropped, moved
from mergepipe_pipeline.errors import BudgetError
from mergepipe_pipeline.storage.source import open_source
from tests.checkpoints.readers import CountingReader, opened
from tests.support.kinds import Kinds, make_kinds
from tests.support.stored import Floats, gathered

COLS = 25


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds(tmp_path_factory.mktemp("kinds"), rows=40, cols=COLS)


def read(readers: list[CountingReader], view: TensorView, start: int, stop: int) -> Floats:
    raw = np.empty((stop - start) * 2, dtype=np.uint8)
    read_stored(readers.__getitem__, view, start, stop, raw.data)
    values: Floats = as_float32(raw, view.dtype).numpy()
    return values


@given(data=st.data(), rows=st.integers(1, 40))
def test_gathered_and_cropped_rows_are_numpy_s_fancy_indexing(
    kinds: Kinds, data: st.DataObject, rows: int
) -> None:
    kind = kinds.experts["gathered"]
    wanted = gathered(kind.view, kind.stored)
    view = cropped(kind.view, rows)
    assert (view.shape, view.stored_nbytes) == ((rows, COLS), 2 * rows * COLS)
    assert all(run.n_elems > 0 for run in view.runs)
    start = data.draw(st.integers(0, view.numel - 1))
    stop = data.draw(st.integers(start + 1, view.numel))
    with opened(kind.model.checkpoints) as readers:
        np.testing.assert_array_equal(read(readers, view, start, stop), wanted[start:stop])
        assert readers[0].bytes_read == 2 * (stop - start)


def test_cropping_twice_is_cropping_once(kinds: Kinds) -> None:
    view = kinds.experts["gathered"].view
    assert cropped(cropped(view, 20), 7) == cropped(view, 7)


def test_a_moved_view_reads_its_new_sources(kinds: Kinds) -> None:
    kind = kinds.experts["gathered"]
    view = moved(kind.view, 2)
    with opened((*kinds.base.checkpoints, *kinds.base.checkpoints, *kind.model.checkpoints)) as rs:
        np.testing.assert_array_equal(read(rs, view, 0, 1000), gathered(kind.view, kind.stored))
    low_rank = moved(kinds.experts["low rank on a full one"].view, 3).low_rank
    assert isinstance(low_rank, LowRank)
    assert (low_rank.a.source, low_rank.b.source) == (4, 4)


def test_runs_are_gated_by_what_they_are_runs_of(kinds: Kinds) -> None:
    kind = kinds.experts["gathered"]
    (checkpoint,) = kind.model.checkpoints
    run = kind.view.runs[0]
    entry = kind.view.stored[run.part].entry
    allowed = {entry.name: [(run.at_elem, run.at_elem + run.n_elems)]}
    with open_source(checkpoint.root) as source:
        reader = BlockReader(source, checkpoint, allowed)
        raw = np.empty(2 * run.n_elems, dtype=np.uint8)
        read_stored(lambda _: reader, kind.view, 0, run.n_elems, raw.data)
        with pytest.raises(BudgetError, match=r"leave the access set.*elements inside"):
            read_stored(lambda _: reader, kind.view, 0, 1000, np.empty(2000, np.uint8).data)
