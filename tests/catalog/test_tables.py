"""What goes into Parquet comes out equal, and equal facts are equal bytes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.catalog import arrow_tables as tables
from mergepipe_pipeline.catalog import stats_tables
from mergepipe_pipeline.catalog.pairs import PairFacts
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.stats import ExpertStats
from mergepipe_pipeline.errors import CorruptionError
from tests.catalog.facts import (
    TENSOR_NAMES,
    checkpoint,
    checkpoints,
    expert_stats,
    same,
    some_stats,
)
from tests.support.laws import examples

NUMBERS = st.floats(allow_nan=False) | st.integers(0, 1 << 53)
FACTS = st.dictionaries(TENSOR_NAMES, st.lists(NUMBERS, max_size=5).map(tuple))


@settings(max_examples=examples(40), deadline=None)
@given(checkpoints())
def test_checkpoints_round_trip_with_their_ids(c: Checkpoint) -> None:
    found = tables.decode_checkpoint(tables.encode_checkpoint(c), "f", c.name, c.root)
    assert found == c
    assert found.checkpoint_id == c.checkpoint_id


def test_checkpoints_of_one_architecture_share_the_names_of_their_tensors() -> None:
    tensors = (TensorEntry("model.norm.weight", "BF16", (1024,), "model.safetensors", 8),)
    data = tables.encode_checkpoint(replace(checkpoint(), tensors=tensors))
    one, other = (tables.decode_checkpoint(data, "f", name, "r").tensors[0] for name in ("a", "b"))
    assert (one, one.name is other.name) == (other, True)


@settings(max_examples=examples(40), deadline=None)
@given(expert_stats())
def test_statistics_round_trip_to_the_bit(stats: ExpertStats) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        facts = PairFacts(Path(tmp), stats.base_id, stats.checkpoint_id)
        facts.put_stats(stats)
        assert same(facts.stats(stats.block_elems), stats)
        assert facts.known_pairs(stats.block_elems) == stats.by_pair.keys()


@settings(max_examples=examples(40), deadline=None)
@given(FACTS)
def test_facts_of_any_count_of_numbers_round_trip(facts: dict[str, tuple[float, ...]]) -> None:
    assert tables.decode_facts(tables.encode_facts(facts, "k"), "f") == facts


def test_the_rules_that_keep_none_and_all_round_trip() -> None:
    facts: dict[str, tuple[float, ...]] = {
        "none": (0x7F800000, 0),
        "infinite": (math.inf, 0.0),
        "all": (0, 1 << 62),
    }
    assert tables.decode_facts(tables.encode_facts(facts, "k"), "f") == facts


def test_equal_facts_are_equal_bytes() -> None:
    assert stats_tables.encode_stats(some_stats()) == stats_tables.encode_stats(some_stats())
    assert stats_tables.encode_stats(some_stats()) != stats_tables.encode_stats(some_stats(seed=1))
    assert tables.encode_checkpoint(checkpoint()) == tables.encode_checkpoint(checkpoint())
    facts: dict[str, tuple[float, ...]] = {"w": (1, 2, 0.5)}
    assert tables.encode_facts(facts, "k") == tables.encode_facts(dict(facts), "k")


def no_parquet(data: bytes) -> bytes:
    return b"PAR1" + data[4:-4] + b"XXXX"


def foreign_parquet(data: bytes) -> bytes:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1]}), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    "damage",
    [no_parquet, foreign_parquet, lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"{}"],
)
def test_a_damaged_file_is_corruption_and_is_named(damage: Callable[[bytes], bytes]) -> None:
    readers: list[Callable[[], object]] = [
        lambda: tables.decode_checkpoint(
            damage(tables.encode_checkpoint(checkpoint())), "the/file", "m", "r"
        ),
        lambda: tables.decode_facts(
            damage(tables.encode_facts({"w": (1, 2, 3.0)}, "k")), "the/file"
        ),
    ]
    for read in readers:
        with pytest.raises(CorruptionError, match=r"catalog file cannot be read.*the/file"):
            read()


def test_one_kind_of_fact_is_not_taken_for_another() -> None:
    facts = tables.encode_facts({"w": (1, 2, 3.0)}, "k")
    with pytest.raises(CorruptionError, match="the/file"):
        tables.decode_checkpoint(facts, "the/file", "m", "r")
