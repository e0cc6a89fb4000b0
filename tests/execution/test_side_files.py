"""Files beside the weights that a result needs: modules, templates, and code that is only named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergepipe_pipeline.errors import (
    CheckpointError,
    CorruptionError,
    IncompatibleCheckpointsError,
    MergePipeError,
)
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.verbs.merge import export
from mergepipe_pipeline.verbs.verify import verify
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.support.family import make_family

NESTED = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
BESIDE = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"}


def add_modules(folder: Path, seed: int = 0, weights: str = "model.safetensors") -> Path:
    """Make a model one of sentence-transformers, with a pooling and a dense module."""
    kinds = ("", "1_Pooling", "2_Dense", "../secret", "/etc", "a/b")
    entries = [{"idx": i, "name": str(i), "path": p, "type": "x.Y"} for i, p in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(entries))
    for name in BESIDE - {"modules.json"}:
        (folder / name).write_text("{}")
    for module in kinds[1:3]:
        (folder / module).mkdir()
        (folder / module / "config.json").write_text('{"in_features": 4}')
        (folder / module / "notes.txt").write_text("not copied")
    torch.manual_seed(seed)
    save_file({"linear.weight": torch.randn(4, 4)}, folder / "2_Dense" / weights)
    (folder / "3_Other").mkdir()
    (folder / "3_Other" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return make_family(tmp_path / "models", k=2)


def recipe(models: Path, extra: str = "") -> str:
    text = f"merge_method: task_arithmetic\nbase_model: {models / 'base'}\nmodels:\n"
    return f"{text}- {{model: {models / 'expert_00'}, parameters: {{weight: 0.5}}}}\n{extra}\n"


def files_in(folder: str | Path) -> set[str]:
    below = (p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file())
    return {str(path) for path in below}


def test_modules_that_modules_json_lists_are_copied_with_the_result(
    home: Warehouse, tmp_path: Path, models: Path
) -> None:
    base = add_modules(models / "base")
    outcome = run(home, recipe(models))
    folder = Path(outcome.snapshot.path)
    copied = NESTED | BESIDE
    assert {n for n in files_in(folder) if "/" in n} == NESTED
    for name in copied:
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    assert verify(home, outcome.snapshot.snapshot_id).files == len(files_in(folder))
    out = tmp_path / "out"
    for _ in range(2):  # the second finds the first whole
        export(home, outcome.snapshot.snapshot_id, out)
    assert copied < files_in(out)
    (folder / "1_Pooling" / "more").write_text("")
    with pytest.raises(CorruptionError, match="does not belong"):
        verify_snapshot(folder)


def test_an_edited_or_added_file_of_a_module_is_seen_in_an_export(
    home: Warehouse, tmp_path: Path, models: Path
) -> None:
    add_modules(models / "base")
    snapshot = run(home, recipe(models)).snapshot
    export(home, snapshot.snapshot_id, tmp_path / "out")
    (tmp_path / "out" / "2_Dense" / "config.json").write_text("{}")
    (tmp_path / "out" / "2_Dense" / "more").write_text("")
    with pytest.raises(MergePipeError, match=r"config\.json is edited, 2_Dense/more is not of it"):
        export(home, snapshot.snapshot_id, tmp_path / "out")


def test_a_module_that_leads_out_of_its_folder_is_refused(
    home: Warehouse, tmp_path: Path, models: Path
) -> None:
    base = add_modules(models / "base")
    (tmp_path / "secret.json").write_text("{}")
    (base / "1_Pooling" / "config.json").unlink()
    (base / "1_Pooling" / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match="leaves its checkpoint"):
        run(home, recipe(models))


def test_modules_land_with_their_model(home: Warehouse, models: Path) -> None:
    landed = land(home, str(add_modules(models / "base")), name="landed")
    assert files_in(landed.path) >= NESTED | BESIDE


def refused(home: Warehouse, models: Path, match: str) -> None:
    with pytest.raises(IncompatibleCheckpointsError, match=match):
        run(home, recipe(models))
    assert list_snapshots(home.snapshots) == []


def test_weights_of_modules_that_differ_between_models_are_refused(
    home: Warehouse, models: Path
) -> None:
    dense = [add_modules(models / name) / "2_Dense" for name in ("base", "expert_00")]
    kept = (dense[1] / "model.safetensors").read_bytes()
    save_file({"linear.weight": torch.ones(4, 4)}, dense[1] / "model.safetensors")
    refused(home, models, r"expert_00, 2_Dense/model\.safetensors.* found other bytes.*make the")
    (dense[1] / "model.safetensors").rename(dense[1] / "pytorch_model.bin")
    refused(home, models, r"expert_00, 2_Dense/pytorch_model\.bin.* found no such file there")
    (dense[1] / "model.safetensors").write_bytes(kept)
    assert not any("2_Dense" in w for w in run(home, recipe(models)).plan.warnings)


def test_weights_of_modules_that_only_an_expert_has_are_refused(
    home: Warehouse, models: Path
) -> None:
    expert = add_modules(models / "expert_00")
    refused(home, models, r"expert_00, 2_Dense/model\.safetensors.* without modules\.json")
    (expert / "modules.json").unlink()
    run(home, recipe(models))


def test_pickled_modules_and_other_settings_are_named(home: Warehouse, models: Path) -> None:
    dense = [add_modules(models / name) / "2_Dense" for name in ("base", "expert_00")]
    (dense[1] / "config.json").write_text("{}")
    warnings = run(home, recipe(models)).plan.warnings
    assert any("expert_00 has other 2_Dense/config.json than base" in w for w in warnings)
    for folder in dense:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    warnings = run(home, recipe(models)).plan.warnings
    assert any("2_Dense/pytorch_model.bin of base is pickled" in w for w in warnings)
    (dense[1] / "pytorch_model.bin").write_bytes(b"other")
    with pytest.raises(IncompatibleCheckpointsError, match=r"2_Dense/pytorch_model\.bin"):
        run(home, recipe(models))


def test_chat_templates_beside_the_own_go_with_their_tokenizer(
    home: Warehouse, models: Path
) -> None:
    for name in ("base", "expert_00"):
        folder = models / name / "additional_chat_templates"
        folder.mkdir()
        (folder / f"{name}.jinja").write_text(f"{{{{ {name} }}}}")
        (folder / "other.txt").write_text("")
    found = [
        {n for n in files_in(run(home, recipe(models, extra)).snapshot.path) if "chat" in n}
        for extra in ("", f"tokenizer_source: {models / 'expert_00'}", "chat_template: chatml")
    ]
    names = [{f"additional_chat_templates/{n}.jinja"} for n in ("base", "expert_00")]
    assert found == [*names, set()]


def test_code_that_a_result_needs_is_named_and_not_copied(home: Warehouse, models: Path) -> None:
    config = json.loads((models / "base" / "config.json").read_text())
    own = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        "AutoModel": "org/repo--elsewhere.Mine",
    }
    (models / "base" / "config.json").write_text(json.dumps(config | {"auto_map": own}))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    (models / "base" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("configuration_mine", "modeling_mine", "tokenization_mine"):
        (models / "base" / f"{name}.py").write_text("")
    outcome = run(home, recipe(models))
    (told,) = (w for w in outcome.plan.warnings if "auto_map" in w)
    assert "configuration_mine.py, modeling_mine.py, tokenization_mine.py from" in told
    assert "elsewhere" not in told
    assert not any(n.endswith(".py") for n in files_in(outcome.snapshot.path))


def test_settings_of_a_quantisation_are_not_copied(home: Warehouse, models: Path) -> None:
    for name in ("quantize_config.json", "hf_quant_config.json"):
        (models / "base" / name).write_text("{}")
    assert not any("quant" in n for n in files_in(run(home, recipe(models)).snapshot.path))
