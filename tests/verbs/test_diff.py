"""What changed between two snapshots, against NumPy over the files as safetensors reads them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.cli.main import main
from mergepipe_pipeline.errors import CorruptionError, NotFoundError
from mergepipe_pipeline.execution.lookup import snapshot_named
from mergepipe_pipeline.snapshots.export import Shards
from mergepipe_pipeline.verbs.compare import diff
from mergepipe_pipeline.verbs.merge import export
from mergepipe_pipeline.verbs.publish import publish
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.facts.test_input_segments import flip
from tests.support.reads import tensor_reads
from tests.verbs.test_compare import distance

Text = Callable[..., str]


def test_the_same_snapshot_differs_in_nothing_and_no_weight_is_read(
    home: Warehouse, recipe_text: Text
) -> None:
    snapshot_id = run(home, recipe_text()).snapshot.snapshot_id
    with tensor_reads() as reads:
        found = diff(home, snapshot_id, snapshot_id[:9])
    assert (reads.total(), found.tensors, found.inputs, found.settings) == (0, (), (), ())
    assert {x.state for x in found.layers} == {"same"}
    assert found.whole.state == "same"


def test_every_figure_is_that_of_the_written_files(home: Warehouse, recipe_text: Text) -> None:
    one = run(home, recipe_text("task_arithmetic", "")).snapshot
    other = run(home, recipe_text("task_arithmetic", "{lambda: 0.5}")).snapshot
    found = diff(home, one.snapshot_id, other.snapshot_id)
    before, after = tensors(one.path), tensors(other.path)
    assert len(found.tensors) == len(before)
    for t in found.tensors:
        assert t.tensor is not None
        a, b = before[t.tensor].double(), after[t.tensor].double()
        assert t.changed_elems == int((a != b).sum())
        assert t.l2 == pytest.approx((b - a).norm().item(), rel=1e-9)
        assert t.relative == pytest.approx(((b - a).norm() / a.norm()).item(), rel=1e-9)
        assert t.max_abs == (b - a).abs().max().item()
    assert found.whole.l2 == pytest.approx(distance(one.path, other.path), rel=1e-9)
    assert found.layers[1].l2 == pytest.approx(distance(one.path, other.path, "layers.0."))
    assert any(line.startswith("+parameters: {lambda: 0.5}") for line in found.recipe)


def test_a_new_version_of_an_expert_changes_its_layer_and_only_that_is_read(
    home: Warehouse, family: Path, tmp_path: Path, recipe_text: Text
) -> None:
    shutil.copytree(family, tmp_path / "models")
    text = recipe_text().replace(str(family), str(tmp_path / "models"))
    one = run(home, text).snapshot
    file = tmp_path / "models" / "expert_00" / "model.safetensors"
    changed = load_file(file)
    changed["model.layers.1.mlp.up_proj.weight"] *= 2
    save_file(changed, file, metadata={"format": "pt"})
    other = run(home, text, budget="none").snapshot
    with tensor_reads() as reads:
        found = diff(home, one.snapshot_id, other.snapshot_id)
    assert [x.state for x in found.layers] == ["same", "same", "changed", "same"]
    assert [t.tensor for t in found.tensors if t.state != "same"] == [
        "model.layers.1.mlp.up_proj.weight"
    ]
    assert {name.split(".")[2] for _, name in reads} == {"1"}
    assert [(c.name, c.state) for c in found.inputs] == [("expert expert_00", "changed")]
    assert {c.name for c in found.files} == {"README.md"}


def test_experts_that_come_and_go_and_budgets_are_told(home: Warehouse, recipe_text: Text) -> None:
    one = run(home, recipe_text(experts=2), budget="50%").snapshot
    other = run(home, recipe_text(experts=3)).snapshot
    found = diff(home, one.snapshot_id, other.snapshot_id)
    assert [(c.name, c.state) for c in found.inputs] == [("expert expert_02", "added")]
    assert {c.name for c in found.settings} >= {"budget_bytes", "plan"}
    back = diff(home, other.snapshot_id, one.snapshot_id)
    assert [(c.name, c.state) for c in back.inputs] == [("expert expert_02", "removed")]


def test_versions_of_a_ref_and_exported_folders_can_be_named(
    home: Warehouse, tmp_path: Path, recipe_text: Text
) -> None:
    ids = [run(home, recipe_text(experts=n)).snapshot.snapshot_id for n in (2, 3)]
    for snapshot_id in ids:
        publish(home, snapshot_id, "live")
    export(home, ids[0], tmp_path / "out")
    found = diff(home, "live@1", "live")
    assert [found.before, found.after] == ids
    elsewhere = Warehouse.at(tmp_path / "other").ensure()
    assert diff(elsewhere, str(tmp_path / "out"), str(tmp_path / "out")).before == ids[0]
    with pytest.raises(NotFoundError, match="No such"):
        diff(home, "live@7", "live")
    with pytest.raises(NotFoundError, match="No such snapshot"):
        diff(home, "nothing", "live")


def test_a_folder_in_other_shards_is_the_same_layers(
    home: Warehouse, tmp_path: Path, recipe_text: Text
) -> None:
    made = run(home, recipe_text(experts=2)).snapshot.snapshot_id
    other = run(home, recipe_text(experts=1)).snapshot.snapshot_id
    export(home, made, tmp_path / "out", Shards(50_000))
    found = diff(home, str(tmp_path / "out"), made)
    assert {x.state for x in found.layers} == {"same"}
    plain = diff(home, other, made)
    assert [x.layer for x in found.layers] == [x.layer for x in plain.layers]
    changed = diff(home, other, str(tmp_path / "out"))
    assert [(x.layer, x.state, x.l2) for x in changed.layers] == [
        (x.layer, x.state, x.l2) for x in plain.layers
    ]


def test_other_shapes_buffers_and_infinities_are_said_without_a_figure(
    home: Warehouse, tmp_path: Path
) -> None:
    """passthrough keeps every tensor as it is, whatever it holds."""
    ids = []
    for n in (2, 3):
        weights = {
            "model.embed_tokens.weight": torch.ones(2 + n, 8),
            "model.layers.0.mlp.up_proj.weight": torch.full((8, 8), math.inf if n == 3 else 1.0),
            "model.layers.0.self_attn.position_ids": torch.tensor([0, 1, n]),
            "model.norm.weight": torch.full((8,), math.nan),
        }
        (tmp_path / f"m{n}").mkdir()
        save_file(weights, tmp_path / f"m{n}" / "model.safetensors", metadata={"format": "pt"})
        text = f"merge_method: passthrough\nmodels: [{{model: {tmp_path}/m{n}}}]\n"
        ids.append(run(home, text).snapshot.snapshot_id)
    one, other = ids
    found = {t.tensor: t for t in diff(home, one, other).tensors}
    assert found["model.embed_tokens.weight"].state == "reshaped"
    up = found["model.layers.0.mlp.up_proj.weight"]
    assert (up.changed_elems, up.l2, up.max_abs) == (64, None, None)
    assert found["model.layers.0.self_attn.position_ids"].changed_elems == 1
    assert "model.norm.weight" not in found
    args = ["diff", *ids, "--json", "--home", str(home.root)]
    assert "NaN" not in CliRunner().invoke(main, args).stdout


def test_the_command_shows_a_table_by_layer_or_tensor(home: Warehouse, recipe_text: Text) -> None:
    ids = [run(home, recipe_text(experts=n)).snapshot.snapshot_id for n in (2, 3)]
    for by, first in (("layer", "embed"), ("tensor", "model.embed_tokens.weight")):
        done = CliRunner().invoke(main, ["diff", *ids, "--by", by, "--home", str(home.root)])
        assert done.exit_code == 0, done.output
        assert any(line.startswith(first) for line in done.stdout.splitlines())
    done = CliRunner().invoke(main, ["diff", *ids, "--json", "--home", str(home.root)])
    assert json.loads(done.stdout)["whole"]["tensors_changed"] == 20


def test_a_folder_that_is_no_snapshot_is_told_so(home: Warehouse, family: Path) -> None:
    with pytest.raises(NotFoundError, match=r"A folder is no snapshot.*found no manifest\.json"):
        snapshot_named(home, str(family / "base"))


def test_no_figure_is_told_of_a_snapshot_in_which_a_bit_turned(
    home: Warehouse, recipe_text: Text
) -> None:
    one = run(home, recipe_text("task_arithmetic", "")).snapshot
    other = run(home, recipe_text("task_arithmetic", "{lambda: 0.5}")).snapshot
    name = "model.layers.1.mlp.up_proj.weight"
    flip(Path(other.path), name, 0.5)
    for a, b in ((one, other), (other, one)):
        with pytest.raises(CorruptionError, match="not the bytes that were written") as error:
            diff(home, a.snapshot_id, b.snapshot_id)
        assert name in str(error.value)
