"""Every input byte that is merged is compared with what was analysed, or there is no snapshot."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from mergepipe_pipeline.analysis.digests import digest_checkpoint
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.engine.options import EngineOptions
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import MergeOutcome, run_plan
from mergepipe_pipeline.facts import contents
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.storage.read_batch import ReadBatch
from mergepipe_pipeline.storage.source import Use
from mergepipe_pipeline.warehouse import Warehouse
from tests.support.family import write_adapter

METHODS = {
    "ties": "{weight: 0.5, density: 0.5}",
    "linear": "{weight: 0.5}",
    "dare_ties": "{weight: 0.5, density: 0.5}",
    "slerp": "{t: 0.5}",
    "model_stock": "{filter_wise: true}",
    "passthrough": "",
}


def flip(root: Path, tensor: str, at: float, bit: int = 3) -> None:
    """Turn one bit of a tensor's data; size and time stay."""
    entry = open_checkpoint(str(root), "x").by_name[tensor]
    path = root / entry.file
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(entry.start_byte + int(at * entry.nbytes))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ (1 << bit)]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def believe(home: Warehouse, root: Path) -> None:
    """Take files for what was read there: a disk that rots changes no time that a system keeps."""
    checkpoint = open_checkpoint(str(root), "x")
    places = Contents(home, checkpoint).places
    place = places.place_of(checkpoint)
    assert place is not None
    places.add(place, str(root))


@pytest.fixture
def inputs(tmp_path: Path, family: Path) -> Path:
    """A copy of base and experts that may be damaged."""
    return Path(shutil.copytree(family, tmp_path / "family"))


def run(
    home: Warehouse, text: str, budget: str | None = None, window_elems: int | None = None
) -> MergeOutcome:
    plan = make_plan(home, parse(text, name="r", where="r"), budget=budget, block_elems=4096)
    return run_plan(home, plan, options=EngineOptions(window_elems=window_elems))


def recipe(inputs: Path, method: str, parameters: str) -> str:
    experts = {"slerp": 1, "passthrough": 1}.get(method, 2)
    lines = [f"merge_method: {method}"]
    lines += [] if method in ("linear", "passthrough") else [f"base_model: {inputs / 'base'}"]
    lines += ["models:"]
    lines += [f"- model: {inputs / f'expert_{i:02d}'}" for i in range(experts)]
    if method == "slerp":
        lines += [f"- model: {inputs / 'base'}"]
    return "\n".join([*lines, *([f"parameters: {parameters}"] if parameters else []), ""])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("window_elems", [None, 5000])
def test_a_bit_that_flips_after_the_analysis_is_named_and_nothing_is_merged_from_it(
    home: Warehouse, inputs: Path, method: str, window_elems: int | None
) -> None:
    text = recipe(inputs, method, METHODS[method])
    plan = make_plan(home, parse(text, name="r", where="r"), block_elems=4096)
    source = next(s for s, role in zip(plan.sources, plan.roles, strict=True) if role == "expert")
    name = next(
        e.view.name
        for layer in plan.layers
        for t in layer.tasks
        for e in t.experts
        if plan.sources[e.view.stored[0].source] == source and e.view.numel > 20000
    )
    flip(Path(source.root), name, 0.3)
    believe(home, Path(source.root))
    with pytest.raises(CorruptionError, match="not those that were analysed") as error:
        run(home, text, window_elems=window_elems)
    assert name in str(error.value)
    assert "elements" in str(error.value)
    assert list_snapshots(home.snapshots) == []
    flip(Path(source.root), name, 0.3)
    mended = run(home, text)
    clean = run(Warehouse.at(home.root.parent / "clean").ensure(), text)
    assert mended.snapshot.snapshot_id == clean.snapshot.snapshot_id


@pytest.mark.parametrize("budget", ["0", "30%", None])
def test_a_bit_of_the_base_is_seen_where_it_is_merged_and_where_it_is_copied(
    home: Warehouse, inputs: Path, budget: str | None
) -> None:
    text = recipe(inputs, "ties", METHODS["ties"])
    plan = make_plan(home, parse(text, name="r", where="r"), block_elems=4096)
    largest = max((t for lay in plan.layers for t in lay.tasks), key=lambda t: t.out_nbytes)
    flip(inputs / "base", largest.name, 0.1)
    with pytest.raises(CorruptionError, match=largest.name):
        run(home, text, budget)
    flip(inputs / "base", largest.name, 0.1)
    run(home, text, budget)


def test_under_a_budget_exactly_the_flips_in_what_is_read_are_seen(
    home: Warehouse, inputs: Path
) -> None:
    text = recipe(inputs, "ties", METHODS["ties"])
    expected = run(home, text, "30%").snapshot.snapshot_id
    plan = make_plan(home, parse(text, name="r", where="r"), budget="30%", block_elems=4096)
    shutil.rmtree(home.actions_dir)
    places = [
        (plan.sources[e.view.stored[0].source].root, e)
        for layer in plan.layers
        for t in layer.tasks
        for e in t.experts
    ]
    seen = 0
    for root, e in random.Random(0).sample(places, 12):
        at = random.Random(e.view.name).random()
        elem = int(at * e.view.numel * 2) // 2
        is_read = any(a <= elem < b for a, b in e.read)
        flip(Path(root), e.view.name, at)
        # A probe may fall on the flipped byte: then it is another checkpoint, not a damaged one.
        same = open_checkpoint(root, "x").checkpoint_id
        if all(s.checkpoint_id != same for s in plan.sources):
            flip(Path(root), e.view.name, at)
            continue
        shutil.rmtree(home.actions_dir, ignore_errors=True)
        believe(home, Path(root))
        if is_read:
            seen += 1
            with pytest.raises(CorruptionError, match="not those that were analysed"):
                run(home, text, "30%")
        else:
            assert run(home, text, "30%").snapshot.snapshot_id == expected
        flip(Path(root), e.view.name, at)
    assert seen


def test_segments_that_the_catalog_lost_are_taken_again_and_only_from_what_was_analysed(
    home: Warehouse, inputs: Path, recipe_text: Callable[..., str]
) -> None:
    text = recipe(inputs, "ties", METHODS["ties"])
    expected = run(home, text).snapshot.snapshot_id
    for folder in (home.actions_dir, home.catalog_dir / "contents"):
        shutil.rmtree(folder)
    assert run(home, text).snapshot.snapshot_id == expected
    for folder in (home.actions_dir, home.catalog_dir / "contents"):
        shutil.rmtree(folder)
    plan = make_plan(home, parse(text, name="r", where="r"), block_elems=4096)
    name = max((t for layer in plan.layers for t in layer.tasks), key=lambda t: t.out_nbytes).name
    flip(inputs / "expert_01", name, 0.3)
    with pytest.raises(CorruptionError, match=name):
        run(home, text)


def test_an_expert_is_not_analysed_against_a_base_that_changed_since(
    home: Warehouse, inputs: Path
) -> None:
    run(home, recipe(inputs, "ties", METHODS["ties"]))
    largest = max(open_checkpoint(str(inputs / "base"), "b").tensors, key=lambda t: t.nbytes)
    flip(inputs / "base", largest.name, 0.1)
    believe(home, inputs / "base")
    text = recipe(inputs, "ties", METHODS["ties"]).replace("expert_01", "expert_03")
    with pytest.raises(CorruptionError, match=largest.name):
        run(home, text)
    flip(inputs / "base", largest.name, 0.1)
    mended = run(home, text).snapshot.snapshot_id
    clean = Warehouse.at(home.root.parent / "clean").ensure()
    assert mended == run(clean, text).snapshot.snapshot_id


def test_numbers_that_planning_measures_come_from_verified_bytes(
    home: Warehouse, inputs: Path
) -> None:
    run(home, recipe(inputs, "ties", METHODS["ties"]))
    largest = max(open_checkpoint(str(inputs / "base"), "b").tensors, key=lambda t: t.nbytes)
    flip(inputs / "expert_01", largest.name, 0.1)
    believe(home, inputs / "expert_01")
    for text in (
        recipe(inputs, "model_stock", ""),
        recipe(inputs, "breadcrumbs", "{weight: 0.5, density: 0.5, gamma: 0.1, rescale: true}"),
    ):
        with pytest.raises(CorruptionError, match=largest.name):
            make_plan(home, parse(text, name="r", where="r"), block_elems=4096)


def test_a_plan_whose_inputs_are_known_no_longer_takes_only_the_bytes_it_was_made_from(
    home: Warehouse, inputs: Path
) -> None:
    text = recipe(inputs, "ties", METHODS["ties"])
    plan = make_plan(home, parse(text, name="r", where="r"), block_elems=4096)
    view = max((e.view for t in plan.layers[0].tasks for e in t.experts), key=lambda v: v.numel)
    root = Path(plan.sources[view.stored[0].source].root)
    shutil.rmtree(home.catalog_dir / "contents")
    flip(root, view.name, 0.3)
    with pytest.raises(CorruptionError, match=view.name):
        run_plan(home, plan)
    assert not any(home.actions_dir.rglob("*.json"))


@pytest.mark.parametrize("gated", [True, False])
def test_a_byte_that_is_read_wrong_only_while_factors_are_found_is_seen(
    home: Warehouse, inputs: Path, monkeypatch: pytest.MonkeyPatch, gated: bool
) -> None:
    opened = SourcePool._open

    class Wrong:
        """A reader to which a disk gives other bytes once."""

        def __init__(self, reader: BlockReader) -> None:
            self._reader = reader

        def read_into(self, entry: TensorEntry, start: int, stop: int, out: memoryview) -> None:
            self._reader.read_into(entry, start, stop, out)
            out[0] ^= 8

        def put(
            self, batch: ReadBatch, entry: TensorEntry, start: int, stop: int, out: memoryview
        ) -> None:
            self.read_into(entry, start, stop, out)

        def lend(
            self, batch: ReadBatch, entry: TensorEntry, start: int, stop: int, use: Use
        ) -> bool:
            def use_wrong(piece: memoryview) -> None:
                piece[0] ^= 8
                try:
                    use(piece)
                finally:
                    piece[0] ^= 8

            return self._reader.lend(batch, entry, start, stop, use_wrong)

        def verify_unchanged(self) -> None:
            self._reader.verify_unchanged()

    def half_wrong(
        pool: SourcePool, number: int, of_expert: bool, when: Literal["merge", "before", "besides"]
    ) -> BlockReader | Wrong:
        reader = opened(pool, number, of_expert, when)
        return Wrong(reader) if when == "before" and of_expert is gated else reader

    monkeypatch.setattr(SourcePool, "_open", half_wrong)
    with pytest.raises(CorruptionError, match="not those that were analysed"):
        run(home, recipe(inputs, "dare_ties", METHODS["dare_ties"]))


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_a_bit_that_turned_in_a_snapshot_before_it_was_ever_an_input_gets_into_no_merge(
    home: Warehouse, inputs: Path, method: str
) -> None:
    root = Path(run(home, recipe(inputs, "linear", METHODS["linear"])).snapshot.path)
    text = recipe(inputs, method, METHODS[method]).replace(str(inputs / "expert_00"), str(root))
    name = "model.layers.0.mlp.up_proj.weight"
    flip(root, name, 0.1)
    with pytest.raises(CorruptionError, match="not the bytes that were written") as error:
        run(home, text)
    assert name in str(error.value)
    flip(root, name, 0.1)
    run(home, text)


def test_a_snapshot_below_several_adapters_is_checked_once(
    home: Warehouse, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(run(home, recipe(inputs, "linear", METHODS["linear"])).snapshot.path)
    adapters = [write_adapter(inputs / f"a{n}", n) for n in (1, 2)]
    checked: list[Path] = []

    def check(snapshot: Snapshot, progress: Progress | None) -> None:
        checked.append(Path(snapshot.path))

    monkeypatch.setattr(contents, "verify_with_progress", check)
    models = "".join(f"- model: {root}+{adapter}\n" for adapter in adapters)
    parameters = f"parameters: {METHODS['ties']}\n"
    run(home, f"merge_method: ties\nbase_model: {root}\nmodels:\n{models}{parameters}")
    assert checked == [root]


def test_a_bit_that_turned_in_a_snapshot_of_which_a_part_is_known_gets_into_no_merge(
    home: Warehouse, inputs: Path
) -> None:
    root = Path(run(home, recipe(inputs, "linear", METHODS["linear"])).snapshot.path)
    checkpoint = open_checkpoint(str(root), "result")
    # A pass was killed, and the warehouse is a copy now: its files have never been read here.
    taken = digest_checkpoint(checkpoint, names=["model.layers.1.mlp.up_proj.weight"])
    home.catalog.contents(checkpoint.checkpoint_id).put(taken, checkpoint.by_name)
    flip(root, "model.layers.0.mlp.up_proj.weight", 0.1)
    text = recipe(inputs, "ties", METHODS["ties"]).replace(str(inputs / "expert_00"), str(root))
    with pytest.raises(CorruptionError, match="not the bytes that were written"):
        run(home, text)
