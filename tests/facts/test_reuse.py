"""Statistics of contents that are known already: taken over where, and only where, they hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from mergepipe_pipeline.analysis import statistics
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.stats import TensorStats
from mergepipe_pipeline.domain.view import Run
from mergepipe_pipeline.facts.analysed import AnalysedExpert
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.resolution.locate import Places
from mergepipe_pipeline.resolution.open_models import open_pair
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.analysis.pairs import analyze_one, figures, pairs_of
from tests.support.family import layout, tensors_of, write_model
from tests.support.kinds import make_kinds
from tests.support.reads import of, tensor_reads
from tests.support.stored import Stored, encode, low_rank_of, model_of, write

GRID = BlockGrid(4096)


@contextmanager
def described() -> Iterator[list[str]]:
    """The experts' tensors that are analysed meanwhile."""
    names: list[str] = []
    real = statistics.analyze_experts

    def analyze_experts(experts, *args, **kwargs):  # type: ignore[no-untyped-def]
        names.extend(mine for _, pairs in experts for mine, _ in pairs)
        return real(experts, *args, **kwargs)

    with mock.patch.object(statistics, "analyze_experts", analyze_experts):
        yield names


def known(home: Warehouse, name: str) -> dict[tuple[str, str], TensorStats]:
    expert, base = open_pair(*map(Places(home).locate, (name, "base")))
    facts = home.catalog.facts(base.model_id, expert.model_id)
    stats = facts.stats(GRID.block_elems)
    listed = dict(facts.magnitudes(GRID.block_elems, stats.by_pair))
    return {p: replace(t, block_magnitudes=listed.get(p)) for p, t in stats.by_pair.items()}


def assert_as_if_read(home: Warehouse, name: str) -> None:
    """What is known of an expert is what a pass over its files finds."""
    expert, base = open_pair(*map(Places(home).locate, (name, "base")))
    fresh = analyze_one(expert, base, pairs_of(expert, base), GRID).by_pair
    found = known(home, name)
    assert {p: figures(t) for p, t in found.items()} == {p: figures(t) for p, t in fresh.items()}


@pytest.fixture
def analyzed(home: Warehouse, family: Path, tmp_path: Path) -> Warehouse:
    """A home that knows `expert`, which lies in `tmp_path`, and `base`."""
    register(home, family / "base", "base")
    write_model(tmp_path / "expert", tensors_of(0, 0))
    register(home, tmp_path / "expert", base="base")
    analyze(home, ["expert"], block_elems=GRID.block_elems)
    return home


@pytest.mark.parametrize("copy_file", [shutil.copyfile, shutil.copy2])  # without times, and with
def test_a_copy_by_another_name_costs_only_its_digest(
    analyzed: Warehouse, tmp_path: Path, copy_file: Callable[[str, str], object]
) -> None:
    shutil.copytree(tmp_path / "expert", tmp_path / "copy", copy_function=copy_file)
    copy = register(analyzed, tmp_path / "copy", base="base").checkpoint
    with tensor_reads() as reads, described() as names:
        (found,) = analyze(analyzed, ["copy"], block_elems=GRID.block_elems)
    assert names == []
    assert reads == {("copy", t.name): t.nbytes for t in copy.tensors}
    assert found.content_sha256 == analyzed.catalog.content_sha256(
        analyzed.catalog.get("expert").checkpoint.checkpoint_id
    )
    assert_as_if_read(analyzed, "copy")


def test_a_copy_of_the_base_is_the_same_base(
    analyzed: Warehouse, family: Path, tmp_path: Path
) -> None:
    shutil.copytree(family / "base", tmp_path / "again", copy_function=shutil.copyfile)
    register(analyzed, tmp_path / "again", "base")
    with tensor_reads() as reads, described() as names:
        analyze(analyzed, ["expert"], block_elems=GRID.block_elems)
    assert names == []
    assert of(reads, "expert") == 0
    assert_as_if_read(analyzed, "expert")


def test_another_expert_of_the_same_layout_is_not_read_twice(
    analyzed: Warehouse, family: Path
) -> None:
    other = register(analyzed, family / "expert_02", "other", "base").checkpoint
    with tensor_reads() as reads:
        analyze(analyzed, ["other"], block_elems=GRID.block_elems)
    assert of(reads, "expert_02") == other.nbytes


def test_of_a_new_version_only_the_changed_tensors_are_analysed(
    analyzed: Warehouse, tmp_path: Path
) -> None:
    tensors = tensors_of(0, 0)
    changed = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    for name in changed:
        tensors[name] = tensors[name] * 1.5
    write_model(tmp_path / "expert", tensors)
    with tensor_reads() as reads, described() as names:
        (found,) = analyze(analyzed, ["expert"], block_elems=GRID.block_elems)
    assert found.fresh
    assert sorted(names) == changed
    nbytes = {t.name: t.nbytes for t in analyzed.catalog.get("expert").checkpoint.tensors}
    assert len(nbytes) == len(layout(2, 64, 512))
    assert {t: n for (where, t), n in reads.items() if where == "expert"} == {
        t: n * (2 if t in changed else 1) for t, n in nbytes.items()
    }
    assert {t: n for (where, t), n in reads.items() if where == "base"} == {
        t: nbytes[t] for t in changed
    }
    assert_as_if_read(analyzed, "expert")


def test_a_new_version_with_another_dtype_is_analysed_whole(
    analyzed: Warehouse, tmp_path: Path
) -> None:
    tensors = tensors_of(0, 0)
    write_model(tmp_path / "expert", {n: t.to(torch.float16) for n, t in tensors.items()})
    with described() as names:
        analyze(analyzed, ["expert"], block_elems=GRID.block_elems)
    assert sorted(names) == sorted(tensors)
    assert_as_if_read(analyzed, "expert")


def test_a_run_cut_short_between_digests_and_statistics_goes_on(
    analyzed: Warehouse, tmp_path: Path
) -> None:
    tensors = tensors_of(0, 0)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    write_model(tmp_path / "expert", tensors)
    expert, _ = open_pair(*map(Places(analyzed).locate, ("expert", "base")))
    Contents(analyzed, expert.checkpoint).learn()
    with tensor_reads() as reads:
        analyze(analyzed, ["expert"], block_elems=GRID.block_elems)
    assert {t for _, t in reads} == {"model.norm.weight"}
    assert_as_if_read(analyzed, "expert")


def stored_models(home: Warehouse, folder: Path, **models: dict[str, Stored]) -> None:
    """Registers single-file checkpoints, with digests, so that known contents are expected."""
    for name, tensors in models.items():
        write(folder, name, tensors)
        registration = register(home, folder / f"{name}.safetensors", name)
        Contents(home, registration.checkpoint).learn()


def test_equal_contents_over_another_tensor_of_the_base_keep_that_tensors_samples(
    home: Warehouse, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    x, y, z = (encode(rng.standard_normal(9000), "BF16") for _ in range(3))
    stored_models(home, tmp_path, base={"a": x, "b": x}, one={"a": y, "b": z}, two={"a": z, "b": y})
    for name in ("one", "two"):
        analyze(home, [name], base="base", block_elems=GRID.block_elems)
        assert_as_if_read(home, name)
    one = known(home, "one")
    assert not np.array_equal(one["a", "a"].block_sample, one["b", "b"].block_sample)


def test_equal_bytes_of_another_dtype_are_other_contents(home: Warehouse, tmp_path: Path) -> None:
    _, shape, y = encode(np.random.default_rng(0).standard_normal(9000), "F16")
    _, _, x = encode(np.ones(9000), "F16")
    stored_models(home, tmp_path, base={"w": ("F16", shape, x)}, one={"w": ("F16", shape, y)})
    analyze(home, ["one"], base="base", block_elems=GRID.block_elems)
    stored_models(home, tmp_path, base={"w": ("BF16", shape, x)}, two={"w": ("BF16", shape, y)})
    analyze(home, ["two"], base="base", block_elems=GRID.block_elems)
    assert_as_if_read(home, "two")


def test_zeros_of_another_length_are_other_contents(home: Warehouse, tmp_path: Path) -> None:
    few, many = encode(np.zeros(6000), "F32"), encode(np.zeros(12000), "BF16")
    assert few[2] == many[2]
    for name, zeros in (("one", few), ("two", many)):
        stored_models(home, tmp_path, base={"w": zeros}, **{name: {"w": zeros}})
        analyze(home, [name], base="base", block_elems=GRID.block_elems)
        assert_as_if_read(home, name)


def test_nothing_is_taken_over_for_a_view_that_is_not_as_stored(
    home: Warehouse, tmp_path: Path
) -> None:
    kinds = make_kinds(tmp_path)
    plain = kinds.experts["full"].model
    view = plain.views["w"]
    turned = replace(view, runs=(Run(0, 0, 8000, 7000), Run(7000, 0, 0, 8000)))
    reordered = Model(plain.name, plain.checkpoints, {"w": turned}, variant="turned")
    (adapter,) = kinds.experts["low rank"].model.checkpoints
    low = low_rank_of(adapter, "w", 0.25, source=1, transposed=False)
    below = replace(kinds.base.views["w"], low_rank=low)
    tuned = model_of(*kinds.base.checkpoints, adapter, views=[below])
    for expert, base in ((plain, kinds.base), (reordered, kinds.base), (plain, tuned)):
        analysed = AnalysedExpert(home, expert, base, GRID, [("w", "w")])
        analysed.complete()
        stats = analysed.stats()
        fresh = analyze_one(expert, base, [("w", "w")], GRID)
        unlisted = replace(fresh.tensors[0], block_magnitudes=None)
        assert figures(stats.tensors[0]) == figures(unlisted)


def test_a_known_copy_whose_files_are_gone_does_not_matter(
    analyzed: Warehouse, tmp_path: Path
) -> None:
    os.rename(tmp_path / "expert", tmp_path / "moved")
    os.utime(tmp_path / "moved" / "model.safetensors", ns=(1, 1))
    register(analyzed, tmp_path / "moved", base="base")
    with tensor_reads() as reads:
        analyze(analyzed, ["moved"], block_elems=GRID.block_elems)
    moved = analyzed.catalog.get("moved").checkpoint
    assert of(reads, "moved") == moved.nbytes
    assert_as_if_read(analyzed, "moved")


def test_an_analysis_that_an_expert_lost_is_read_again_and_not_taken_over_from_itself(
    analyzed: Warehouse,
) -> None:
    (file,) = analyzed.catalog_dir.glob("facts/*/*/*/b*.parquet")
    file.unlink()
    analyze(analyzed, ["expert"], base="base", block_elems=GRID.block_elems)
    assert file.exists()
    assert_as_if_read(analyzed, "expert")
