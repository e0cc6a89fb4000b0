"""Magnitudes in a file of their own: they come back to the bit, and only to who asks."""

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

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.catalog.magnitude_files import (
    MAGNITUDES,
    decode_magnitudes,
    encode_magnitudes,
)
from mergepipe_pipeline.catalog.row_groups import RowGroups, write_groups
from mergepipe_pipeline.domain.stats import ExpertStats, Magnitudes
from tests.catalog.facts import same, some_stats

IDS = ("b" * 24, "c" * 24, 4096)
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


def arrays(m: Magnitudes) -> list[tuple[str, bytes]]:
    return [(v.dtype.str, v.tobytes()) for v in (m.edges, m.bits, m.counts)]


@given(blocks=st.integers(0, 20), seed=st.integers(0, 1000), asked=st.sets(st.sampled_from(NAMES)))
def test_magnitudes_that_are_asked_for_come_back_to_the_bit(
    blocks: int, seed: int, asked: set[str]
) -> None:
    stats = listed(blocks, seed, without=("v",))
    data = encode_magnitudes(stats)
    assert data == encode_magnitudes(stats)
    pairs = {(name, name) for name in asked}
    with (
        tempfile.TemporaryDirectory() as tmp,
        RowGroups(write_groups(Path(tmp), "m", data), MAGNITUDES) as file,
    ):
        found = dict(decode_magnitudes(file, pairs))
    assert set(found) == (pairs - {("v", "v")} if blocks else set())
    for pair, magnitudes in found.items():
        wanted = stats.by_pair[pair].block_magnitudes
        assert wanted is not None
        assert arrays(magnitudes) == arrays(wanted)


def test_statistics_come_without_magnitudes_and_these_of_several_analyses(tmp_path: Path) -> None:
    catalog, both = Catalog(tmp_path), listed()
    for part in (both.tensors[:1], both.tensors[1:]):
        catalog.put_stats(replace(both, tensors=part))
    found = catalog.stats(*IDS)
    assert found is not None
    assert all(t.block_magnitudes is None for t in found.tensors)
    pairs = [("w", "w"), ("u", "u"), ("x", "x")]
    assert {pair for pair, _ in catalog.magnitudes(*IDS, pairs)} == set(pairs[:2])
    assert list(catalog.magnitudes("b" * 24, "d" * 24, 4096, pairs)) == []


def test_only_the_tensors_in_question_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    catalog.put_stats(listed())
    read: list[int] = []
    real = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, number: int, **options: Any) -> object:
        read.append(number)
        return real(self, number, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    catalog.stats(*IDS)
    assert not read
    assert [pair for pair, _ in catalog.magnitudes(*IDS, [("v", "v")])] == [("v", "v")]
    assert read == [1]


def test_an_analysis_without_magnitudes_is_read_as_before(tmp_path: Path) -> None:
    catalog, stats = Catalog(tmp_path), some_stats()
    catalog.put_stats(stats)
    assert not list(tmp_path.rglob("*.magnitudes.*.parquet"))
    found = catalog.stats(*IDS)
    assert found is not None
    assert same(found, stats)
    assert list(catalog.magnitudes(*IDS, stats.by_pair)) == []


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"x" * 500])
def test_damaged_magnitudes_are_said_and_their_analysis_is_made_again(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    catalog, stats = Catalog(tmp_path), listed()
    catalog.put_stats(stats)
    (file,) = tmp_path.rglob("*.magnitudes.*.parquet")
    file.write_bytes(damage)
    assert list(catalog.magnitudes(*IDS, [("w", "w")])) == []
    assert [str(file) in m for m in caplog.messages] == [True]
    assert catalog.known_pairs(*IDS) == set()
    catalog.put_stats(stats)
    assert [pair for pair, _ in catalog.magnitudes(*IDS, [("w", "w")])] == [("w", "w")]
    assert catalog.known_pairs(*IDS) == set(stats.by_pair)


def test_magnitudes_of_another_analysis_are_not_taken(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.put_stats(listed())
    (own,) = tmp_path.rglob("*.magnitudes.*.parquet")
    catalog.put_stats(listed(seed=9))
    (other,) = set(tmp_path.rglob("*.magnitudes.*.parquet")) - {own}
    own.write_bytes(other.read_bytes())
    ((_, found),) = catalog.magnitudes(*IDS, [("w", "w")])
    assert arrays(found) == arrays(some_magnitudes(3, 9))
