"""Published recipes on tiny families: each runs here and in mergekit, and results are compared.

Models are replaced by a base and experts of the recipe's architecture, adapters by LoRA on every
query projection. Both sides compute and write float32, and what draws random masks keeps all.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from mergepipe_pipeline.errors import MergePipeError
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run
from tests.parity.peer import Tensors, read_model, run_mergekit
from tests.support.architectures import fused, layout, make

RECIPES: dict[str, dict[str, Any]] = {
    entry["name"]: entry
    for entry in yaml.safe_load((Path(__file__).parent / "recipes.yml").read_text())
}
#: 9999 rounds of karcher on 40 layers take mergekit more than ten minutes: run by name only.
SLOW = {"moonlit-karcher"}
#: Layers of a model where the recipe names none.
_LAYERS = 4
_RANDOM = ("dare_", "della")
_NO_MODEL = {"base", "union"}
#: Relative and absolute error of float32 arithmetic in another order.
_RTOL, _ATOL = 2e-4, 2e-5


@dataclass(frozen=True)
class Outcome:
    """What became of one recipe: errors (None: it ran), and the share of equal elements.

    `ours` is of the recipe as written; with `lenient` it was read so, since strictly it is refused.
    """

    name: str
    ours: str | None
    theirs: str | None
    lenient: bool
    equal: float | None


def outcome_of(name: str, families: Path) -> Outcome:
    """Run a recipe on both sides; families are kept in the folder `families`."""
    entry = RECIPES[name]
    recipe = _with_models(entry, families)
    lenient = False
    with tempfile.TemporaryDirectory(dir=families) as folder:
        home = Warehouse.at(Path(folder)).ensure()
        try:
            ours = _refused(home, recipe, lenient=False)
            if ours is not None:
                lenient = (again := _refused(home, recipe, lenient=True)) is None
                ours = again
            mine = None if ours else _merged(home, _comparable(recipe), lenient=lenient)
        except MergePipeError as error:
            ours, mine = str(error), None
        try:
            theirs, peer = None, run_mergekit(yaml.safe_dump(_exact(_comparable(recipe))))
        except Exception as error:
            theirs, peer = f"{type(error).__name__}: {error}", {}
    equal = None
    if mine is not None and theirs is None:
        equal = _equal_share(fused(entry["arch"], mine), peer)
    return Outcome(name, ours, theirs, lenient, equal)


def _refused(home: Warehouse, recipe: dict[str, Any], *, lenient: bool) -> str | None:
    """Why the recipe as written is refused; None: it is not."""
    try:
        resolve(home, parse(yaml.safe_dump(recipe), name="r", where="r", lenient=lenient))
    except MergePipeError as error:
        return str(error)
    return None


def _merged(home: Warehouse, recipe: dict[str, Any], *, lenient: bool) -> Tensors:
    text = yaml.safe_dump(recipe)
    if lenient:
        from mergepipe_pipeline.verbs.merge import merge

        parsed = parse(text, name="r", where="r", lenient=True)
        return read_model(Path(merge(home, parsed).outcome.snapshot.path))
    return read_model(Path(run(home, text).snapshot.path))


def _comparable(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe in float32, keeping all where masks are drawn: one stream there, another here."""
    given = {k: v for k, v in recipe.items() if k != "out_dtype"} | {"dtype": "float32"}
    if given["merge_method"].startswith(_RANDOM):
        given = _replaced(given, "density", 1.0)
        given["parameters"] = {**given.get("parameters", {}), "density": 1.0}
    return given


def _exact(recipe: dict[str, Any]) -> dict[str, Any]:
    """For mergekit: its divergences of softmaxes are mostly rounding in float32."""
    if recipe["merge_method"] != "arcee_fusion":
        return recipe
    return {**recipe, "dtype": "float64", "out_dtype": "float32"}


def _replaced(value: Any, key: str, new: float) -> Any:
    if isinstance(value, dict):
        return {k: new if k == key else _replaced(v, key, new) for k, v in value.items()}
    return [_replaced(v, key, new) for v in value] if isinstance(value, list) else value


def _equal_share(ours: Tensors, theirs: Tensors) -> float:
    """The share of equal elements, 0 for other names or shapes than mergekit's."""
    if not theirs or not theirs.keys() <= ours.keys():
        return 0.0
    equal = total = 0
    for name, value in theirs.items():
        if ours[name].shape != value.shape:
            return 0.0
        near = torch.isclose(ours[name].float(), value.float(), rtol=_RTOL, atol=_ATOL)
        equal, total = equal + int(near.sum()), total + near.numel()
    return equal / total


def _with_models(entry: dict[str, Any], families: Path) -> dict[str, Any]:
    """The recipe with folders in place of its models."""
    recipe: dict[str, Any] = entry["recipe"]
    names = list(dict.fromkeys(_models(recipe)))
    plain = list(dict.fromkeys(n.partition("+")[0] for n in names))
    base = str(recipe.get("base_model", plain[0])).partition("+")[0]
    experts = [n for n in plain if n != base]
    sliced = "layer_range" in yaml.safe_dump(recipe)
    layers = entry["layers"] if sliced else _LAYERS
    n_experts, unchanged = max(1, len(experts)), recipe["merge_method"] != "multislerp"
    folder = families / f"{entry['arch']}-{layers}-{n_experts}-{unchanged}"
    if not folder.exists():  # mergekit has no multislerp of tensors that no expert changes
        sizes = {"layers": layers, "dtype": torch.float32, "unchanged": unchanged}
        make(entry["arch"], folder, n_experts, **sizes)
    paths = {base: folder / "base"}
    paths |= {n: folder / f"expert_{i:02d}" for i, n in enumerate(experts)}
    adapters = list(dict.fromkeys(n.partition("+")[2] for n in names if "+" in n))
    found = {}
    for name in names:
        model, _, lora = name.partition("+")
        path = str(paths[model])
        if lora:
            number = adapters.index(lora)
            path += f"+{_adapter(folder / f'adapter_{number}', entry['arch'], layers, number)}"
        found[name] = path
    return dict(_put(recipe, found))


def _models(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _models(v, k)
    elif isinstance(value, list):
        for v in value:
            yield from _models(v, key)
    elif _is_model(key, value):
        yield value


def _is_model(key: str, value: Any) -> bool:
    is_source = key in ("tokenizer_source", "source") and value not in _NO_MODEL
    named = key in ("model", "base_model") or (is_source and not str(value).startswith("model:"))
    return named and isinstance(value, str)


def _put(value: Any, paths: dict[str, str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _put(v, paths, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_put(v, paths, key) for v in value]
    return paths[value] if _is_model(key, value) else value


def _adapter(folder: Path, arch: str, layers: int, seed: int) -> Path:
    """A LoRA adapter of rank 4 on every query projection."""
    if folder.exists():
        return folder
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    factors = {}
    for name, shape in layout(arch, layers):
        if name.endswith("q_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            factors[f"{stem}A.weight"] = 0.05 * torch.randn(4, shape[1])
            factors[f"{stem}B.weight"] = 0.05 * torch.randn(shape[0], 4)
    save_file(factors, folder / "adapter_model.safetensors")
    return folder
