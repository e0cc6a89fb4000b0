"""For the tests of projects: the chain of a recipe in one process, over a family of small models.

Real parts all the way: models land, are indexed, planned, merged, audited, judged and released in a
new warehouse, by the jobs of the definitions. No daemon runs, no sensor waits, nothing is loaded
from the hub.
"""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import yaml

from mergepipe_pipeline.assets.experts import experts_of
from mergepipe_pipeline.checkpoints.header import build_header
from mergepipe_pipeline.dagster.door import build_inbox_defs, build_recipe_defs
from mergepipe_pipeline.deploy.copies import Source
from mergepipe_pipeline.deploy.recipe_files import RecipeFile, names_read, recipe_files
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.sensors.ticks import RECIPE_TAG
from mergepipe_pipeline.storage.atomic import write_atomic
from mergepipe_pipeline.text import plain_of_markdown
from mergepipe_pipeline.verbs.deploy import current_snapshot
from mergepipe_pipeline.verbs.index import index_arrival
from mergepipe_pipeline.verbs.land import land
from mergepipe_pipeline.warehouse import Warehouse

#: What a test gives: a recipe, or what builds definitions for a warehouse's folder.
Built = Source | Callable[[Path], dg.Definitions]
_HIDDEN, _VOCAB = 64, 256


@dataclass(frozen=True)
class InProcess:
    """What a chain gave: the folder of its `snapshot`, and the `version` of the ref that names it.

    `passed`: all checks did, the gate among them; else there is no version, and where nothing was
    merged no snapshot. `said` is what the gate says, or the check that failed.
    """

    snapshot: Path | None
    version: int | None
    passed: bool
    said: str
    run: dg.ExecuteInProcessResult


def merge_in_process(
    what: Built,
    folder: str | Path,
    *,
    name: str | None = None,
    models: Mapping[str, str | Path] | None = None,
    also: Collection[str] = (),
    layers: int = 2,
    metrics: Mapping[str, float] | None = None,
) -> InProcess:
    """Run the chain of a recipe from checkpoints to release, in a new warehouse in `folder`.

    `what` is a recipe, or what builds definitions for a warehouse's folder, of whose recipes `name`
    is meant. The models that recipes name are those of `models`, else small ones of so many
    `layers`, and so are those `also` that selectors take. `metrics` stand for what the recipe's
    evaluator would measure. Raises MergePipeError for a chain that fails other than by a check.
    """
    home = Warehouse.at(Path(folder) / "warehouse").ensure()
    defs = what(home.root) if callable(what) else _defs(what, home)

    def small(model: str) -> Path:
        return write_model(Path(folder) / "models" / model, layers)

    made = {model: small(model) for model in also} | dict(models or {})
    with dg.DagsterInstance.ephemeral() as instance:
        _index(home, defs, instance, made)
        # Now that there is something to select, recipes say what else they need.
        others = {model: small(model) for model in names_read(home) - set(made)}
        _index(home, defs, instance, others)
        file, job = _chosen(home, defs, name)
        if metrics is not None:
            _measure_as(home, file, metrics)
        run = job.execute_in_process(instance=instance, raise_on_error=False)
    return _told(home, file, run)


def write_model(folder: Path, layers: int = 2) -> Path:
    """Write a Llama model of few weights: near to all others that this makes, as experts are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "vocab_size": _VOCAB,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    write_atomic(folder / "config.json", json.dumps(config).encode())
    common, own = np.random.default_rng(0), np.random.default_rng(list(folder.name.encode()))
    shapes = sorted(_shapes(layers).items())
    header = build_header([(name, "F32", shape) for name, shape in shapes], {"format": "pt"})
    weights = (
        0.02 * common.standard_normal(shape) + 0.001 * own.standard_normal(shape)
        for _, shape in shapes
    )
    data = (weight.astype("<f4").tobytes() for weight in weights)
    write_atomic(folder / "model.safetensors", [header, *data])
    return folder


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors of such a model."""
    square, wide = (_HIDDEN, _HIDDEN), (2 * _HIDDEN, _HIDDEN)
    found = {"model.embed_tokens.weight": (_VOCAB, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
    for prefix in (f"model.layers.{n}." for n in range(layers)):
        found |= {f"{prefix}self_attn.{part}_proj.weight": square for part in "qkvo"}
        found |= {f"{prefix}mlp.{part}_proj.weight": wide for part in ("gate", "up")}
        found[f"{prefix}mlp.down_proj.weight"] = wide[::-1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = (_HIDDEN,)
    return found


def _defs(recipes: Source, home: Warehouse) -> dg.Definitions:
    parts = build_inbox_defs(home=home.root), build_recipe_defs(recipes, home=home.root)
    return dg.Definitions.merge(*parts)


def _jobs(defs: dg.Definitions) -> list[dg.JobDefinition]:
    found = defs.get_repository_def().get_all_jobs()
    return [job for job in found if job.name != "__ASSET_JOB"]


def _index(
    home: Warehouse,
    defs: dg.Definitions,
    instance: dg.DagsterInstance,
    models: Mapping[str, str | Path],
) -> None:
    """Land models, and index them by these definitions' own job."""
    experts = experts_of(home)
    job = next((job for job in _jobs(defs) if job.partitions_def == experts), None)
    instance.add_dynamic_partitions(experts.name or "", list(models))
    for name, folder in sorted(models.items()):
        land(home, str(folder), name)
        if job is None:  # they watch another inbox
            index_arrival(home, name)
        else:
            job.execute_in_process(instance=instance, partition_key=name)


def _chosen(
    home: Warehouse, defs: dg.Definitions, name: str | None
) -> tuple[RecipeFile, dg.JobDefinition]:
    """The recipe that is meant, and the job that runs its chain."""
    files = recipe_files(home)
    chosen = [file for file in files if name in (None, file.name)]
    if len(chosen) == 1 and chosen[0].problem is None:
        for job in _jobs(defs):
            is_of = job.tags.get(RECIPE_TAG) == chosen[0].name
            if is_of and job.name.endswith(f"merge_{chosen[0].identifier}"):
                return chosen[0], job
    raise MergePipeError(
        "There is no recipe to run",
        where="merge_in_process" if name is None else f"merge_in_process, {name}",
        expected="one that can be used",
        found="; ".join(f"{f.name}: {f.problem or 'it can'}" for f in files) or "none",
        next_step="mend it, or say by `name` which one is meant, by `models` what it lacks",
    )


def _measure_as(home: Warehouse, file: RecipeFile, metrics: Mapping[str, float]) -> None:
    """Let the recipe's evaluator be one that says these metrics."""
    path = home.recipe_path(file.name)
    recipe: dict[str, Any] = yaml.safe_load(path.read_text())
    said = f"print({json.dumps(json.dumps(dict(metrics)))})"
    recipe["evaluate"] = {"command": ["python", "-c", said]}
    write_atomic(path, yaml.safe_dump(recipe, sort_keys=False).encode())


def _told(home: Warehouse, file: RecipeFile, run: dg.ExecuteInProcessResult) -> InProcess:
    checks = {check.check_name: check for check in run.get_asset_check_evaluations()}
    failed = [event for event in run.all_events if event.is_step_failure]
    if failed and all(check.passed for check in checks.values()):
        error = failed[0].step_failure_data.error
        raise MergePipeError(
            "A chain failed",
            where=f"{file.name}, {failed[0].step_key}",
            found=error.message.strip() if error else failed[0].message or "no word",
            next_step="mend what it says; the log of the test has the rest",
        )
    refused = next((check for check in checks.values() if not check.passed), None)
    telling, made = refused or checks.get("gate"), None
    with suppress(NotFoundError):  # nothing was merged
        made = Path(current_snapshot(home, file.name).path)
    version = None if refused else home.refs.current(file.recipe.ref).number
    said = "" if telling is None else plain_of_markdown(telling.description or "")
    return InProcess(made, version, refused is None, said, run)
