"""Running mergekit in this process: its results, and what it has planned for each tensor."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Planned:
    """One output tensor: model folders with the names of their tensors, and resolved parameters."""

    base: tuple[str, str] | None
    experts: tuple[tuple[str, str], ...]
    params: dict[str, Any]
    model_params: tuple[dict[str, Any], ...]


def run_mergekit(text: str, out: Path | None = None, *, seed: int | None = None) -> Tensors:
    """All tensors of mergekit's output for recipe text; the model stays in `out` if given."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        from mergekit.config import MergeConfiguration
        from mergekit.merge import run_merge

        target = out or Path(folder)
        config = MergeConfiguration.model_validate(yaml.safe_load(text))
        run_merge(config, str(target), _options(seed, Path(folder) / "adapters"))
        return read_model(target)


def read_model(folder: Path) -> Tensors:
    """All tensors of a model folder, read by the safetensors library."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def read_family(folder: Path) -> dict[str, Tensors]:
    """The tensors of each model in a family's folder, by the model's path."""
    return {str(model): read_model(model) for model in folder.iterdir() if model.is_dir()}


def plan_of_mergekit(text: str) -> dict[str, Planned]:
    """What mergekit has planned for each output tensor of recipe text."""
    with _quiet():
        from mergekit.architecture import get_architecture_info
        from mergekit.config import MergeConfiguration
        from mergekit.merge import _model_out_config
        from mergekit.plan import MergePlanner

        config = MergeConfiguration.model_validate(yaml.safe_load(text))
        info = get_architecture_info(config, _options())
        out_config = _model_out_config(config, info)
        planner = MergePlanner(config, info, options=_options(), out_model_config=out_config)
        # `plan_in_memory` fails with pydantic 2.12 and later.
        planner._plan()
    out = {}
    for weight, task in planner._tensors:
        sources = {
            m: (str(m.model.path), w.name) for m, w in task.gather_tensors.weight_info.items()
        }
        experts = [m for m in task.model_order if m != task.base_model]
        out[weight.name] = Planned(
            sources.get(task.base_model),
            tuple(sources[m] for m in experts),
            dict(task.parameters.items()),
            tuple(dict(task.input_parameters[m].items()) for m in experts),
        )
    return out


def _options(seed: int | None = None, adapters: Path | None = None) -> Any:
    """Its options; what it makes of adapters is kept in the folder `adapters`."""
    from mergekit.options import MergeOptions

    return MergeOptions(
        quiet=True,
        write_model_card=False,
        clone_tensors=True,
        random_seed=seed,
        lora_merge_cache=adapters and str(adapters),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
