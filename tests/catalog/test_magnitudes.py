"""Magnitudes come back to the bit, and only to who asks."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.catalog import stats_tables
from mergepipe_pipeline.catalog.pairs import PairFacts
from mergepipe_pipeline.catalog.stats_tables import encode_stats
from mergepipe_pipeline.domain.stats import ExpertStats, Magnitudes
from tests.catalog.facts import some_stats

ELEMS = 4096
NAMES = ("w", "v", "u")


def some_magnitudes(blocks: int, seed: int) -> Magnitudes:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 20, blocks)
    n = int(sizes.sum())
    return Magnitudes(
        np.cumsum([0, *sizes]),
        rng.integers(1, 1 << 31, n).astype(np.uint32),
        rng.integers(1, 4097, n).astype(np.uint32),
    )


def listed(blocks: int = 3, seed: int = 0, without: tuple[str, ...] = ()) -> ExpertStats:
    """Statistics of three tensors, with magnitudes but for some."""
    stats = some_stats(blocks=blocks, names=NAMES)
    tensors = (
        t
        if t.tensor in without
        else replace(t, block_magnitudes=some_magnitudes(blocks, seed + number))
        for number, t in enumerate(stats.tensors)
    )
    return replace(stats, tensors=tuple(tensors))


def facts_in(folder: Path) -> PairFacts:
    return PairFacts(folder, "b" * 24, "c" * 24)


def arrays(m: Magnitudes) -> list[tuple[str, bytes]]:
    return [(v.dtype.str, v.tobytes()) for v in (m.edges, m.bits, m.counts)]


@given(blocks=st.integers(0, 20), seed=st.integers(0, 1000), asked=st.sets(st.sampled_from(NAMES)))
def test_magnitudes_that_are_asked_for_come_back_to_the_bit(
    blocks: int, seed: int, asked: set[str]
) -> None:
    stats = listed(blocks, seed, without=("v",))
    assert encode_stats(stats) == encode_stats(stats)
    pairs = {(name, name) for name in asked}
    with tempfile.TemporaryDirectory() as tmp:
        facts = facts_in(Path(tmp))
        facts.put_stats(stats)
        found = dict(facts.magnitudes(ELEMS, pairs))
    assert set(found) == (pairs - {("v", "v")} if blocks else set())
    for pair, magnitudes in found.items():
        wanted = stats.by_pair[pair].block_magnitudes
        assert wanted is not None
        assert arrays(magnitudes) == arrays(wanted)


def test_statistics_come_without_magnitudes_and_these_of_several_analyses(tmp_path: Path) -> None:
    facts, both = facts_in(tmp_path), listed()
    for part in (both.tensors[:1], both.tensors[1:]):
        facts.put_stats(replace(both, tensors=part))
    assert all(t.block_magnitudes is None for t in facts.stats(ELEMS).tensors)
    pairs = [("w", "w"), ("u", "u"), ("x", "x")]
    assert {pair for pair, _ in facts.magnitudes(ELEMS, pairs)} == set(pairs[:2])
    assert list(PairFacts(tmp_path, "b" * 24, "d" * 24).magnitudes(ELEMS, pairs)) == []


def test_only_the_columns_and_tensors_in_question_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_tables, "_GROUP_NBYTES", 1)
    facts = facts_in(tmp_path)
    facts.put_stats(listed())
    read: list[tuple[list[int], set[str]]] = []
    real = pq.ParquetFile.read_row_groups

    def counted(self: pq.ParquetFile, numbers: list[int], columns: list[str], **o: Any) -> object:
        read.append((numbers, set(columns)))
        return real(self, numbers, columns, **o)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    assert [pair for pair, _ in facts.magnitudes(ELEMS, [("v", "v")])] == [("v", "v")]
    facts.stats(ELEMS, without=["sample", "hist"])
    (groups, columns), (every, plain) = read
    assert (groups, every) == ([1], [0, 1, 2])
    assert columns == {"tensor", "base_tensor", "entries", "bits", "counts"}
    assert not plain & {"block_sample", "hist_bins", "bits"}


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"x" * 500])
def test_a_damaged_analysis_is_said_and_made_again(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    facts, stats = facts_in(tmp_path), listed()
    facts.put_stats(stats)
    (file,) = tmp_path.rglob("*.parquet")
    file.write_bytes(damage)
    assert list(facts.magnitudes(ELEMS, [("w", "w")])) == []
    assert [str(file) in m for m in caplog.messages] == [True]
    assert facts.known_pairs(ELEMS) == set()
    facts.put_stats(stats)
    assert [pair for pair, _ in facts.magnitudes(ELEMS, [("w", "w")])] == [("w", "w")]
    assert facts.known_pairs(ELEMS) == set(stats.by_pair)


def test_magnitudes_of_another_analysis_are_not_taken(tmp_path: Path) -> None:
    facts = facts_in(tmp_path)
    facts.put_stats(listed())
    (own,) = tmp_path.rglob("*.parquet")
    facts.put_stats(listed(seed=9))
    (other,) = set(tmp_path.rglob("*.parquet")) - {own}
    own.write_bytes(other.read_bytes())
    ((_, found),) = facts.magnitudes(ELEMS, [("w", "w")])
    assert arrays(found) == arrays(some_magnitudes(3, 9))
