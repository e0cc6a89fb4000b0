"""How far merges are from each other, against NumPy over the files as safetensors reads them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from mergepipe_pipeline.errors import (
    CorruptionError,
    IncompatibleCheckpointsError,
    NotFoundError,
)
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.execution.run import MergeOutcome
from mergepipe_pipeline.verbs.compare import compare, full_plan_id, known_comparison
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.facts.test_input_segments import flip
from tests.support.family import write_adapter
from tests.support.reads import tensor_reads
from tests.verbs.test_curve import raw_of

Text = Callable[..., str]
LAYERS = ["embed", "layer.00", "layer.01", "head"]


def distance(a: str | Path, b: str | Path, part: str = "") -> float:
    """L2 over all tensors whose names hold `part`."""
    one, other = tensors(a), tensors(b)
    squares = [
        np.square(one[n].double().numpy() - other[n].double().numpy()).sum()
        for n in one
        if part in n
    ]
    return float(np.sqrt(sum(squares)))


def both(home: Warehouse, text: str, budget: str = "30%") -> tuple[MergeOutcome, MergeOutcome]:
    return run(home, text, budget=budget), run(home, text)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_the_realised_error_is_that_of_the_written_files(
    home: Warehouse, family: Path, recipe_text: Text, method: str
) -> None:
    part, full = both(home, recipe_text(method, parameters="", extra="out_dtype: float32"))
    found = compare(home, part.snapshot.snapshot_id)
    error = distance(part.snapshot.path, full.snapshot.path)
    update = distance(full.snapshot.path, family / "base")
    assert found.whole.error == pytest.approx(error, rel=1e-9)
    assert found.whole.update == pytest.approx(update, rel=1e-9)
    assert found.whole.relative == pytest.approx(error / update, rel=1e-9)
    assert [x.layer for x in found.layers] == LAYERS
    one = distance(part.snapshot.path, full.snapshot.path, "layers.1.")
    assert found.layers[2].error == pytest.approx(one, rel=1e-9)
    e = part.plan.estimates
    assert e.error_bound is not None
    assert found.whole.error <= e.error_bound * (1 + 1e-6)


def test_a_comparison_is_remembered_and_reads_nothing_again(
    home: Warehouse, recipe_text: Text
) -> None:
    part, full = both(home, recipe_text())
    assert known_comparison(home, part.plan) is None
    found = compare(home, part.snapshot.snapshot_id[:10])
    with tensor_reads() as reads:
        assert compare(home, part.snapshot.snapshot_id, full.snapshot.snapshot_id) == found
        assert known_comparison(home, part.plan) == found
    assert reads.total() == 0


def test_the_full_plan_is_known_from_a_part_of_it_whatever_the_blocks(
    home: Warehouse, recipe_text: Text
) -> None:
    raw = raw_of(recipe_text())
    full = make_plan(home, raw)
    assert full_plan_id(full) == full.plan_id
    for block_elems in (4096, 16384):
        part = make_plan(home, raw, budget="20%", block_elems=block_elems)
        assert full_plan_id(part) == full.plan_id != part.plan_id


def test_without_the_full_merge_the_way_to_it_is_told(home: Warehouse, recipe_text: Text) -> None:
    part = run(home, recipe_text(), budget="30%")
    with pytest.raises(NotFoundError, match=r"full merge to compare with.*--budget none"):
        compare(home, part.snapshot.snapshot_id)


def test_where_the_base_is_gone_or_changed_the_error_is_told_without_the_update(
    home: Warehouse, tmp_path: Path, family: Path, recipe_text: Text
) -> None:
    shutil.copytree(family, tmp_path / "models")
    text = recipe_text().replace(str(family), str(tmp_path / "models"))
    part, full = both(home, text)
    shutil.rmtree(tmp_path / "models" / "base")
    found = compare(home, part.snapshot.snapshot_id)
    assert found.whole.error == pytest.approx(distance(part.snapshot.path, full.snapshot.path))
    assert (found.whole.update, found.whole.relative) == (None, None)


def test_layers_that_both_share_are_read_of_one_snapshot_only(
    home: Warehouse, recipe_text: Text
) -> None:
    wishes = "budget: {limit: 100%, exclude: [{tensors: ['*layers.1.*']}]}"
    part = run(home, recipe_text(extra=wishes))
    full = run(home, recipe_text())
    with tensor_reads() as reads:
        found = compare(home, part.snapshot.snapshot_id)
    for snapshot, layers in ((part.snapshot, {"1"}), (full.snapshot, {"0", "1"})):
        read = {n for folder, n in reads if folder == snapshot.snapshot_id}
        assert {n.split(".")[2] for n in read if ".layers." in n} == layers
    assert [x.error > 0 for x in found.layers] == [False, False, True, False]


def test_a_base_with_an_adapter_counts_as_what_it_is(
    home: Warehouse, tmp_path: Path, family: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", 3)
    text = (
        f"merge_method: task_arithmetic\nbase_model: {family}/base+{adapter}\nout_dtype: float32\n"
        f"models:\n- {{model: {family}/expert_00, parameters: {{weight: 1}}}}\n"
        f"- {{model: {family}/expert_01, parameters: {{weight: 0.5}}}}\n"
    )
    part, _ = both(home, text)
    nothing = run(home, text, budget="0")
    update = compare(home, nothing.snapshot.snapshot_id).whole
    assert update.error == pytest.approx(update.update, rel=1e-6)
    assert compare(home, part.snapshot.snapshot_id).whole.update == pytest.approx(update.update)


def test_snapshots_of_other_models_cannot_be_compared(
    home: Warehouse, tmp_path: Path, family: Path, recipe_text: Text
) -> None:
    models = tmp_path / "models"
    for name in ("base", "expert_00"):
        shutil.copytree(family / name, models / name)
        kept = tensors(models / name)
        del kept["model.norm.weight"]
        save_file(kept, models / name / "model.safetensors", metadata={"format": "pt"})
    ours = run(home, recipe_text()).snapshot.snapshot_id
    text = recipe_text(experts=1).replace(str(family), str(models))
    theirs = run(home, text).snapshot.snapshot_id
    with pytest.raises(
        IncompatibleCheckpointsError, match=r"cannot be compared.*only one has model\.norm\.weight"
    ):
        compare(home, ours, theirs)


@pytest.mark.parametrize("damaged", ["part", "full"])
def test_no_figure_is_kept_of_a_snapshot_in_which_a_bit_turned(
    home: Warehouse, recipe_text: Text, damaged: str
) -> None:
    part, full = (done.snapshot for done in both(home, recipe_text()))
    root = Path((part if damaged == "part" else full).path)
    name = "model.layers.1.mlp.up_proj.weight"
    flip(root, name, 0.5)
    with pytest.raises(CorruptionError, match="not the bytes that were written") as error:
        compare(home, part.snapshot_id, full.snapshot_id)
    assert name in str(error.value)
    flip(root, name, 0.5)
    found = compare(home, part.snapshot_id, full.snapshot_id)
    assert found.whole.error == pytest.approx(distance(part.path, full.path), rel=1e-6)
