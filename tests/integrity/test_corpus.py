"""Every valid recipe of the corpus runs from text to snapshot, on tiny models under its names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.recipe.synthetic import layers_of
from tests.support.family import tensors_of, write_adapter, write_model

VALID = sorted((Path(__file__).parent.parent / "recipes" / "valid").glob("*.yml"))
HIDDEN, VOCAB = 32, 64


def _models(text: str, folder: Path) -> str:
    """The recipe with paths of models made for it in `folder` in place of its names."""
    raw = parse(text, name="corpus", where="corpus.yml")
    stages = (*raw.before, raw)
    n_layers = layers_of(stages)
    made = {stage.stage for stage in stages}
    names: dict[str, str] = {}
    for ref in (ref for stage in stages for ref in stage.references):
        for name, is_adapter in ((ref.model, False), (ref.lora, True)):
            if name is None or name in made or name in names:
                continue
            path = folder / f"m{len(names)}"
            names[name] = str(path)
            if is_adapter:
                write_adapter(path, len(names), HIDDEN)
                continue
            values = tensors_of(0, len(names), layers=n_layers, hidden=HIDDEN, vocab=VOCAB)
            write_model(path, values, layers=n_layers, hidden=HIDDEN, vocab=VOCAB)
            if "modules:" in text:
                vision = {f"visual.blocks.{k}.attn.qkv.weight": torch.randn(8, 8) for k in range(2)}
                save_file(
                    load_file(path / "model.safetensors") | vision, path / "model.safetensors"
                )
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])(?:@[\w.]+)?", names[name], text)
    # A plain folder has no revisions, and the tiny tokenizer has no tokens of a chat.
    text = re.sub(r",? *revision: *[\w.]+", "", text)
    return text.replace("<|im_start|>", "w5")


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_a_valid_recipe_runs_and_gives_finite_tensors(
    home: Warehouse, tmp_path: Path, path: Path
) -> None:
    snapshot = run(home, _models(path.read_text(), tmp_path)).snapshot
    merged = tensors(snapshot.path)
    assert all(bool(value.isfinite().all()) for value in merged.values())
    config = json.loads((Path(snapshot.path) / "config.json").read_text())
    numbers = {int(m[1]) for name in merged if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    assert config["num_hidden_layers"] == len(numbers)
