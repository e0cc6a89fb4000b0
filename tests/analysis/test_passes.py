"""One pass over several experts: the same figures as alone, and the base read once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.analysis import stream
from mergepipe_pipeline.analysis.stream import Buffers
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.stats import TensorStats, narrowed, widened
from tests.analysis.pairs import (
    analyze_all,
    analyze_one,
    bfloat16_bits,
    figures,
    on_disk,
    pairs_of,
    windows_of,
)
from tests.support.kinds import KINDS, make_kinds
from tests.support.reads import of, tensor_reads
from tests.support.stored import Stored, encode, model_of, write

GRID = BlockGrid(8192)


def noisy(n: int, seed: int, dtype: str) -> Stored:
    return encode(np.random.default_rng(seed).standard_normal(n), dtype)


def family(
    folder: Path, sizes: Sequence[int], k: int, dtypes: Sequence[str] = ("BF16", "F16", "F32")
) -> tuple[list[Model], Model]:
    """Experts of several dtypes on a base in BF16; tensors `0`, `1`, … of these sizes."""
    base = {str(i): noisy(n, i, "BF16") for i, n in enumerate(sizes)}
    experts = [
        {str(i): noisy(n, 100 * e + i, dtypes[e % len(dtypes)]) for i, n in enumerate(sizes)}
        for e in range(1, k + 1)
    ]
    models = [model_of(write(folder, f"expert-{e}", t)) for e, t in enumerate(experts)]
    return models, model_of(write(folder, "base", base))


@contextmanager
def cores(n: int) -> Iterator[None]:
    with mock.patch.object(os, "sched_getaffinity", return_value=set(range(n))):
        yield


def without_base_digest(stats: TensorStats) -> dict[str, object]:
    """A pass may see the base whole because of another expert."""
    return figures(replace(stats, base_digest=""))


@given(
    chosen=st.permutations(KINDS).flatmap(
        lambda names: st.integers(1, len(names)).map(lambda k: names[:k])
    ),
    n_cores=st.integers(1, 5),
)
def test_what_is_found_of_an_expert_does_not_depend_on_the_others_in_the_pass(
    kinds_alone: tuple[Path, dict[str, dict[str, object]]], chosen: list[str], n_cores: int
) -> None:
    folder, alone = kinds_alone
    kinds = make_kinds(folder)
    wanted = [(kinds.experts[name].model, [("w", "w")]) for name in chosen]
    with windows_of(8192), cores(n_cores):
        found = analyze_all(wanted, kinds.base, GRID)
    assert [without_base_digest(s.tensors[0]) for s in found] == [alone[n] for n in chosen]


def test_an_expert_with_fewer_rows_is_done_when_others_still_have_windows(tmp_path: Path) -> None:
    kinds, grid = make_kinds(tmp_path), BlockGrid(4096)
    models = [kinds.experts[name].model for name in ("short", "full")]
    with windows_of(4096), cores(2):
        found = analyze_all([(m, [("w", "w")]) for m in models], kinds.base, grid)
        alone = [analyze_one(m, kinds.base, [("w", "w")], grid) for m in models]
    for together, single in zip(found, alone, strict=True):
        assert together.tensors[0].digest == single.tensors[0].digest != ""
        assert without_base_digest(together.tensors[0]) == without_base_digest(single.tensors[0])


@pytest.fixture(scope="module")
def kinds_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, dict[str, object]]]:
    folder = tmp_path_factory.mktemp("kinds")
    kinds = make_kinds(folder)
    alone = {}
    for name, kind in kinds.experts.items():
        with windows_of(16384), cores(1):
            (stats,) = analyze_one(kind.model, kinds.base, [("w", "w")], GRID).tensors
        alone[name] = without_base_digest(stats)
    return folder, alone


def test_a_pass_that_does_not_read_the_base_whole_gives_no_digest_of_it(tmp_path: Path) -> None:
    kinds = make_kinds(tmp_path)
    # The first has all rows but needs no base, the second needs the base but has fewer rows.
    wanted = [(kinds.experts[n].model, [("w", "w")]) for n in ("low rank", "short")]
    found = analyze_all(wanted, kinds.base, GRID)
    assert [s.tensors[0].base_digest for s in found] == ["", ""]


@pytest.mark.parametrize("k", [1, 2, 7])
def test_the_base_is_read_once_for_all_experts(tmp_path: Path, k: int) -> None:
    experts, base = family(tmp_path, [30000, 1, 0, 9000], k)
    with tensor_reads() as reads, windows_of(8192):
        analyze_all([(e, pairs_of(e, base)) for e in experts], base, GRID)
    assert of(reads, "base.safetensors") == base.nbytes
    assert sum(reads.values()) == base.nbytes + sum(e.nbytes for e in experts)


def test_the_base_is_not_read_for_experts_that_are_deltas(tmp_path: Path) -> None:
    kinds = make_kinds(tmp_path)
    wanted = [(kinds.experts[n].model, [("w", "w")]) for n in ("delta", "low rank")]
    with tensor_reads() as reads:
        analyze_all(wanted, kinds.base, GRID)
    assert of(reads, "base.safetensors") == 0


def test_tensors_of_one_expert_may_share_a_tensor_of_the_base(tmp_path: Path) -> None:
    (expert,), _ = family(tmp_path, [9000, 9000], 1)
    base = model_of(write(tmp_path, "other", {"w": noisy(9000, 5, "BF16")}))
    with tensor_reads() as reads:
        found = analyze_one(expert, base, [("0", "w"), ("1", "w")], GRID)
    assert list(found.by_pair) == [("0", "w"), ("1", "w")]
    assert of(reads, "other.safetensors") == base.nbytes


def test_bfloat16_and_what_holds_the_same_values_are_described_alike() -> None:
    pair = noisy(30000, 1, "BF16"), noisy(30000, 2, "BF16")
    wide = [encode(widened(np.frombuffer(data, "<u2")), "F32") for _, _, data in pair]
    found = []
    for expert, base in (pair, (wide[0], wide[1]), (pair[0], wide[1])):
        with on_disk({"w": expert}, {"w": base}) as (e, b):
            (stats,) = analyze_one(e, b, [("w", "w")], GRID).tensors
        found.append(figures(replace(stats, digest="", base_digest="", dtype="", base_dtype="")))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("k", [1, 3])
def test_buffers_do_not_grow_with_the_tensor(tmp_path: Path, k: int) -> None:
    def buffers_of(windows: int) -> list[int]:
        made: list[Buffers] = []

        def make() -> Buffers:
            made.append(Buffers())
            return made[-1]

        folder = tmp_path / str(windows)
        folder.mkdir()
        experts, base = family(folder, [windows << 13], k, ["F32"])
        with windows_of(1 << 13), cores(2), mock.patch.object(stream, "Buffers", make):
            analyze_all([(e, pairs_of(e, base)) for e in experts], base, GRID)
        return [sum(a.nbytes for a in b._bytes) + b._rows.nbytes for b in made]

    few, many = buffers_of(8), buffers_of(100)
    # Per window experts and base, δ and the base's values; two windows at work, one that waits.
    assert set(few) == set(many) == {(4 * k + 2 + 8) << 13}
    assert max(len(few), len(many)) <= 3


def test_samples_are_deltas_at_elements_spread_over_each_block_and_equal_for_all_experts() -> None:
    n = 20000
    index = np.arange(n)
    noise = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    # Two experts spell out where an element lies.
    tensors: dict[str, npt.NDArray[np.generic]] = {
        "high": index // 128,
        "low": index % 128,
        "noise": noise,
        "short": noise[:9000],
    }
    found = {}
    for name, values in tensors.items():
        with on_disk({name: encode(values, "F32")}, {"w": encode(np.zeros(n), "BF16")}) as (e, b):
            found[name] = analyze_one(e, b, [(name, "w")], GRID).tensors[0].block_sample
    at = (widened(found["high"]) * 128 + widened(found["low"])).astype(int)
    for block, elems in enumerate(at):
        start, stop = GRID.range_of(block, n)
        edges = start + np.arange(65) * (stop - start) / 64
        assert np.all((np.floor(edges[:-1]) <= elems) & (elems < edges[1:]))
    assert len(set(at.reshape(-1) % 64)) > 32
    np.testing.assert_array_equal(found["noise"], bfloat16_bits(noise[at]))
    beyond = np.where(index < 9000, noise, 0)
    np.testing.assert_array_equal(found["short"], bfloat16_bits(beyond[at[:2]]))


@given(st.lists(st.floats(width=32), min_size=1))
def test_bfloat16_bits_are_those_of_the_nearest_and_widen_back(values: list[float]) -> None:
    wide = np.array(values, np.float32)
    expected = bfloat16_bits(wide)
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(narrowed(wide)[numbers], expected[numbers])
    np.testing.assert_array_equal(np.isnan(widened(narrowed(wide))), ~numbers)
    np.testing.assert_array_equal(narrowed(widened(expected))[numbers], expected[numbers])
