"""Equal inputs and recipes keep their snapshot ids and layer keys from release to release.

`python -m tests.golden.test_ids` records `ids.json` anew: only when a change means to give other
bits, which the commit then says.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mergepipe_pipeline.cli.main import main as mergepipe
from tests.support.family import Size, tensors_of, write_adapter, write_model

_RECORDED = Path(__file__).parent / "ids.json"
_SIZES: Size = {"layers": 2, "hidden": 16, "vocab": 64}
_MTIME_S = 1_700_000_000

_TRIO = """\
base_model: base
models:
- {model: e0, parameters: {weight: 1.0}}
- {model: e1, parameters: {weight: [0.2, 0.8]}}
- {model: e2, parameters: {weight: [{filter: mlp, value: 0.3}, {value: 0.6}]}}
"""
_PAIR = """\
models:
- {model: e0, parameters: {weight: 0.6}}
- {model: e1, parameters: {weight: 0.4}}
"""
_ON_E0 = "base_model: e0\nmodels: [{model: e0}, {model: e1}]\n"
_HALVES = """\
slices:
- sources: [{model: e0, layer_range: [0, 1]}, {model: e1, layer_range: [0, 1]}]
- sources: [{model: e0, layer_range: [0, 2]}, {model: e1, layer_range: [0, 2]}]
"""
_STAGES = f"""\
name: skills
merge_method: ties
{_TRIO}parameters: {{density: 0.4}}
---
merge_method: task_arithmetic
base_model: base
models:
- {{model: skills, parameters: {{weight: 0.7}}}}
- {{model: base+lora, parameters: {{weight: 0.3}}}}
"""
_TIES = f"merge_method: ties\n{_TRIO}parameters: {{density: 0.4}}\n"
_SUM = f"merge_method: task_arithmetic\n{_TRIO}parameters: {{lambda: 0.8}}\n"
_DARE = f"merge_method: dare_ties\n{_TRIO}parameters: {{density: 0.5}}\nseed: 3\n"

RECIPES = {
    "arcee_fusion": f"merge_method: arcee_fusion\n{_ON_E0}",
    "auto": f"merge_method: auto\n{_TRIO}",
    "breadcrumbs": f"merge_method: breadcrumbs\n{_TRIO}parameters: {{density: 0.6, gamma: 0.05}}\n",
    "breadcrumbs_ties": f"merge_method: breadcrumbs_ties\n{_TRIO}parameters: {{density: 0.6}}\n",
    "dare_linear": f"merge_method: dare_linear\n{_TRIO}parameters: {{density: 0.5}}\n",
    "dare_ties": _DARE,
    "dare_ties-budget": _DARE + "budget: 30%\n",
    "della": f"merge_method: della\n{_TRIO}parameters: {{density: 0.5, epsilon: 0.1}}\n",
    "della_linear": f"merge_method: della_linear\n{_TRIO}parameters: {{density: 0.5}}\n",
    "float32": _SUM + "dtype: float32\n",
    "karcher": f"merge_method: karcher\n{_PAIR}",
    "linear": f"merge_method: linear\n{_PAIR}",
    "linear-budget": f"merge_method: linear\nbase_model: base\n{_PAIR}budget: 50%\n",
    "lora": _SUM.replace("model: e2", "model: base+lora"),
    "model_stock": f"merge_method: model_stock\n{_TRIO}",
    "multislerp": f"merge_method: multislerp\n{_PAIR}",
    "nearswap": f"merge_method: nearswap\n{_ON_E0}parameters: {{t: 0.001}}\n",
    "nuslerp": f"merge_method: nuslerp\n{_PAIR}",
    "paper-della": f"merge_method: della\n{_TRIO}parameters: {{variant: paper, density: 0.5}}\n",
    "passthrough": "merge_method: passthrough\nmodels: [{model: e2, parameters: {scale: 0.5}}]\n",
    "ram": f"merge_method: ram\n{_TRIO}",
    "ramplus_tl": f"merge_method: ramplus_tl\n{_TRIO}",
    "sce": f"merge_method: sce\n{_TRIO}parameters: {{select_topk: 0.4}}\n",
    "slerp": f"merge_method: slerp\n{_ON_E0}parameters: {{t: [0.2, 0.7]}}\n",
    "slices": f"merge_method: linear\n{_HALVES}parameters: {{weight: 0.5}}\n",
    "stages": _STAGES,
    "task_arithmetic": _SUM,
    "task_arithmetic-budget": _SUM + "budget: 30%\n",
    "task_arithmetic-magnitude": _SUM + "budget: 30%\nstrategy: magnitude\n",
    "task_arithmetic-none": _SUM + "budget: 0\n",
    "ties": _TIES,
    "ties-budget": _TIES + "budget: 30%\n",
    "ties-wishes": _TIES + "budget: {limit: 50%, pin: [e1], exclude: [e0], keep: ['*norm*']}\n",
    "union": f"merge_method: linear\n{_PAIR}tokenizer_source: union\n",
}
#: Those that are merged from models in other files, too: of each kind of planning one.
_CUT = [
    "auto",
    "dare_ties-budget",
    "linear-budget",
    "lora",
    "passthrough",
    "slerp",
    "slices",
    "stages",
    "ties-budget",
    "union",
]


def call(home: Path, *args: str | Path) -> Any:
    """What a command shows as JSON. Raises AssertionError with its messages where it fails."""
    done = CliRunner().invoke(mergepipe, ["--home", str(home), *map(str, args), "--json"])
    assert done.exit_code == 0, f"{args}: {done.exit_code}\n{done.output}"
    return json.loads(done.stdout)


def write_inputs(folder: Path) -> None:
    """A base, three experts, one with a token of its own, and a LoRA adapter."""
    for name, expert in (("base", None), ("e0", 0), ("e1", 1), ("e2", 2)):
        write_model(folder / name, tensors_of(11, expert, **_SIZES), **_SIZES)
    tokenizer = folder / "e0" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w63"', '"sum"'))
    write_adapter(folder / "lora", 3, hidden=_SIZES["hidden"])
    for path in folder.rglob("*"):
        os.utime(path, (_MTIME_S, _MTIME_S))


def register(folder: Path, change: Callable[[Path], None] = lambda inputs: None) -> Path:
    """A new warehouse in `folder` that knows the inputs by name, changed before."""
    write_inputs(folder / "inputs")
    change(folder / "inputs")
    home = folder / "warehouse"
    for path in sorted((folder / "inputs").iterdir()):
        base = ("--base", "base") if path.name != "base" else ()
        call(home, "register", path, "--name", path.name, *base)
    return home


def ids(home: Path, name: str) -> dict[str, Any]:
    """The snapshot id and layer keys that merging a recipe gives."""
    recipe = home.parent / f"{name}.yml"
    recipe.write_text(RECIPES[name])
    snapshot_id = call(home, "merge", recipe)["snapshot_id"]
    manifest = json.loads((home / "snapshots" / snapshot_id / "manifest.json").read_text())
    keys = {shard["layer"]: shard["layer_key"] for shard in manifest["shards"]}
    return {"snapshot_id": snapshot_id, "layer_keys": keys}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return register(tmp_path_factory.mktemp("ids"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_snapshot_id_and_layer_keys(home: Path, name: str) -> None:
    assert ids(home, name) == json.loads(_RECORDED.read_text())[name]


@pytest.fixture(scope="module", params=["backwards", "shards of odd and even tensors"])
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warehouse with the same models, the tensors of each in other files and another order."""

    def recut(inputs: Path) -> None:
        for path in sorted(inputs.glob("*/model.safetensors")):
            values = load_file(path)
            path.unlink()
            names = sorted(values, reverse=True)
            parts = [names] if request.param == "backwards" else [names[::2], names[1::2]]
            for number, part in enumerate(parts, 1):
                write_in_order(path.with_name(f"model-{number}.safetensors"), part, values)
            index = {n: f"model-{i}.safetensors" for i, part in enumerate(parts, 1) for n in part}
            text = json.dumps({"metadata": {}, "weight_map": index})
            path.with_name("model.safetensors.index.json").write_text(text)

    return register(tmp_path_factory.mktemp("cut"), recut)


def write_in_order(path: Path, names: Sequence[str], values: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file with bfloat16 tensors in this order, which the library does not keep."""
    header: dict[str, Any] = {}
    data = b""
    for name in names:
        raw = values[name].view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": values[name].shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("name", _CUT)
def test_ids_do_not_depend_on_how_models_are_cut_into_files(cut: Path, name: str) -> None:
    assert ids(cut, name) == json.loads(_RECORDED.read_text())[name]


def main() -> None:
    """Record the ids of all recipes."""
    with tempfile.TemporaryDirectory() as folder:
        of = partial(ids, register(Path(folder)))
        _RECORDED.write_text(json.dumps({name: of(name) for name in RECIPES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
