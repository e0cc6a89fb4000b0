"""Steps of training runs as torch writes them are read, and merged, as their exports are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import open_reader
from mergepipe_pipeline.deploy.inbox import scan_inbox
from mergepipe_pipeline.errors import CheckpointError, MergePipeError
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import move_to_cold
from mergepipe_pipeline.verbs.verify import verify_all
from mergepipe_pipeline.warehouse import Warehouse
from tests.checkpoints.runs import exported, save_alone, save_sharded
from tests.execution.test_run import run
from tests.support.family import Size, tensors_of, write_model
from tests.support.reads import of, tensor_reads

STEPS = ("step-10", "step-20", "step-30")
#: Rows that go into neither two nor four, and fewer rows than processes.
SIZE: Size = {"layers": 2, "hidden": 22, "vocab": 301}


def _values(root: Path | str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    checkpoint = open_checkpoint(str(root), "step")
    with open_reader(checkpoint) as reader:
        return {
            t.name: (t.dtype, t.shape, bytes(reader.read(t, 0, t.numel)))
            for t in checkpoint.tensors
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and by 2 and by 4 processes three steps and a small model with what is uncommon.

    Of that one a copy is cut along two dimensions. `exports` has torch's exports of the first.
    """
    root = tmp_path_factory.mktemp("runs")
    write_model(root / "base", tensors_of(3, None, **SIZE), **SIZE)
    states = {
        step: tensors_of(3, n, **SIZE, dtype=torch.float32 if n == 2 else torch.bfloat16)
        for n, step in enumerate(STEPS)
    }
    states["odd"] = {
        "one.weight": torch.randn(1, 7),
        "three.weight": torch.randn(3, 2, 5),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "wide.bias": torch.randn(9),
    }
    for name, tensors in states.items():
        save_file(tensors, root / f"{name}.safetensors")
    for ranks in (2, 4):
        models = {root / f"by-{ranks}" / n: root / f"{n}.safetensors" for n in states}
        save_sharded(models, (root / f"by-{ranks}/grid", root / "odd.safetensors"), ranks)
    for step in STEPS:
        exported(root / "by-2" / step, root / "exports" / step, "model")
    return root


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_processes_saved_in_parts_is_read_bit_for_bit_as_torch_exports_it(
    runs: Path, tmp_path: Path, ranks: int
) -> None:
    folders = runs / f"by-{ranks}"
    for name, keys in {
        **dict.fromkeys((*STEPS, "odd"), ("model",)),
        "grid": ("app", "model"),
    }.items():
        wanted = exported(folders / name, tmp_path / name, *keys)
        assert _values(folders / name) == _values(tmp_path / name)
        assert (
            wanted.keys()
            == load_file(runs / f"{'odd' if name == 'grid' else name}.safetensors").keys()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64])
def test_what_one_process_saved_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.randn(5, 3).to(dtype)
    state = {"embed.weight": matrix, "head.weight": matrix, "count": torch.tensor(3).to(dtype)}
    save_alone(tmp_path / "step", {**state, "note": "no tensor"})
    wanted = exported(tmp_path / "step", tmp_path / "export")
    assert _values(tmp_path / "step") == _values(tmp_path / "export")
    assert wanted.keys() == state.keys()


@pytest.mark.parametrize("method", ["ties", "linear"])
def test_merges_of_steps_have_the_ids_of_merges_of_their_exports(
    runs: Path, tmp_path: Path, method: str
) -> None:
    found = {}
    for form in ("exports", "by-2", "by-4"):
        home = Warehouse.at(tmp_path / form).ensure()
        models = "".join(
            f"  - {{model: {runs / form / step}, parameters: {{weight: {weight}}}}}\n"
            for step, weight in zip(STEPS, (0.5, 0.3, 0.2), strict=True)
        )
        text = f"merge_method: {method}\nbase_model: {runs / 'base'}\nmodels:\n{models}"
        full = run(home, text + "dtype: bfloat16\n")
        with tensor_reads() as reads:
            less = run(home, text + "dtype: bfloat16\nbudget: 25%\n")
        found[form] = [(m.plan.plan_id, m.snapshot.snapshot_id) for m in (full, less)]
        assert full.realised.expert_bytes_read == full.plan.estimates.expert_bytes_total
        assert 0 < less.realised.expert_bytes_read <= (less.plan.estimates.budget_bytes or 0)
        if method == "linear":  # ties looks at some bytes twice, and counts them once
            assert sum(of(reads, step) for step in STEPS) == less.realised.expert_bytes_read
        assert not verify_all(home).findings
    assert found["exports"] == found["by-2"] == found["by-4"]


def test_a_base_that_is_a_step_is_that_model(runs: Path, tmp_path: Path) -> None:
    ids = []
    for form in ("exports", "by-4"):
        home = Warehouse.at(tmp_path / form).ensure()
        base = shutil.copytree(runs / form / STEPS[0], tmp_path / f"{form}-base" / "base")
        shutil.copy(runs / "base" / "config.json", base)
        text = f"merge_method: ties\nbase_model: {base}\nmodels:\n"
        text += f"- model: {runs / form / STEPS[1]}\nparameters: {{weight: 1, density: 0.4}}\n"
        ids.append(run(home, text).snapshot.snapshot_id)
    assert ids[0] == ids[1]


def test_a_step_lands_is_packed_gives_the_same_id_and_stays_where_it_is(
    runs: Path, home: Warehouse
) -> None:
    step = shutil.copytree(runs / "by-2" / STEPS[0], home.root / "step")
    landed = land(home, str(step), "landed", link=True)
    assert (Path(landed.path) / "__0_0.distcp").samefile(step / "__0_0.distcp")
    register(home, runs / "base", "base")
    text = "merge_method: ties\nbase_model: base\nmodels:\n- model: landed\n"
    text += "parameters: {weight: 1}\n"
    register(home, landed.path, "landed")
    plain = run(home, text + "dtype: bfloat16\n").snapshot.snapshot_id
    (done,) = pack(home, ["landed"], base="base")
    packed = run(home, text + "dtype: bfloat16\n")
    assert packed.snapshot.snapshot_id == plain
    assert packed.plan.packs
    assert not verify_all(home).findings
    with pytest.raises(MergePipeError, match="cannot stand for"):
        move_to_cold(home, done, home.root / "cold")
    assert (step / "__0_0.distcp").exists()


def test_the_inbox_waits_for_a_step_that_is_being_saved(runs: Path, home: Warehouse) -> None:
    folder = shutil.copytree(runs / "by-2" / STEPS[0], home.inbox / "step")
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    (entry,) = scan_inbox(home, 0.0)
    assert "has not finished to save" in str(entry.waiting)
    (folder / ".metadata.tmp").rename(folder / ".metadata")
    (entry,) = scan_inbox(home, 0.0)
    assert entry.is_ready
    assert index_arrival(home, "step").registration.checkpoint.kind == "full"
    (entry,) = scan_inbox(home, 0.0)
    assert entry.is_indexed
    assert not entry.is_ready


def test_a_prefix_names_one_of_two_models_wherever_a_model_is_named(
    runs: Path, home: Warehouse
) -> None:
    tensors = load_file(runs / f"{STEPS[0]}.safetensors")
    ema = load_file(runs / f"{STEPS[1]}.safetensors")
    save_alone(home.root / "two", {"model": tensors, "ema": ema})
    text = f"merge_method: linear\nmodels:\n- model: dcp://{home.root}/two?prefix=ema.\n"
    merged = run(home, text + "parameters: {weight: 1}\ndtype: bfloat16\n")
    assert _values(merged.snapshot.path) == _values(runs / "exports" / STEPS[1])
    where = f"dcp://{home.root / 'two'}?prefix=ema."
    assert register(home, where, "ema").checkpoint.root == where
    with pytest.raises(CheckpointError, match=r"\?prefix="):
        run(home, text.replace("?prefix=ema.", "") + "parameters: {weight: 1}\n")
