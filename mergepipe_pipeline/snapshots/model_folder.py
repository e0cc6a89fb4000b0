"""The side files of a Hugging Face model folder, as pure functions: index, config, card.

Deterministic: no time, no host, no path, since the manifest covers them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import yaml

from mergepipe_pipeline.domain.plan import ConfigValue
from mergepipe_pipeline.domain.snapshot import LineageEntry, OperatorCount, ShardEntry
from mergepipe_pipeline.dtypes import TORCH_NAME
from mergepipe_pipeline.errors import CheckpointChangedError
from mergepipe_pipeline.storage.json_text import json_bytes, load_object
from mergepipe_pipeline.text import markdown

T = TypeVar("T")

#: The recipe of an exported snapshot, beside its files.
RECIPE_FILE = "mergepipe_recipe.yml"
#: The key of an exported provenance that holds what was measured; the card tells it, too.
MEASURED = "evaluations"
#: The key of a provenance that holds what the inputs' own cards say, for the cards of copies.
STATED = "card"


def shard_name(number: int, count: int) -> str:
    """The file name of shard `number` of `count`, both from 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def grouped(items: Iterable[T], nbytes_of: Callable[[T], int], most: int | None) -> list[list[T]]:
    """The items of each shard: that follow each other, as many as fit into `most` bytes."""
    groups, nbytes = [list[T]()], 0
    for item in items:
        if groups[-1] and most is not None and nbytes + nbytes_of(item) > most:
            groups.append([])
            nbytes = 0
        groups[-1].append(item)
        nbytes += nbytes_of(item)
    return groups


def index_json(shards: Sequence[ShardEntry], total_nbytes: int) -> bytes:
    """`model.safetensors.index.json`; `total_nbytes` counts tensor data without headers."""
    weight_map = {tensor: s.file for s in shards for tensor, _ in s.tensors}
    value = {
        "metadata": {"total_size": total_nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(value, indent=2) + "\n").encode()


def config_json(
    original: bytes, dtype: str | None, changes: Sequence[tuple[str, ConfigValue]] = ()
) -> bytes:
    """The template's config.json with the dtype of the merged weights; every other key is kept.

    `dtype` None leaves it; `changes` are (dotted key, value). Raises CheckpointError for no
    config, CheckpointChangedError for one without a place for a change.
    """
    config = load_object(original, "config.json", "A model's config")
    if dtype is not None:
        keys = [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]
        config.update(dict.fromkeys(keys, TORCH_NAME[dtype]))
    for place, value in changes:
        *above, key = place.split(".")
        part = config
        for name in above:
            part = part.setdefault(name, {})
            if not isinstance(part, dict):
                raise CheckpointChangedError(
                    "A model's config is not the one that was planned with",
                    where=f"config.json, {place}",
                    expected="an object with this key",
                    found=type(part).__name__,
                    next_step="plan again with the config as it is",
                )
        if value is None and not key.endswith("_token_id"):
            part.pop(key, None)  # while an id that is left out would be what its class assumes
        else:
            part[key] = value
    return json_bytes(config)


def model_card(
    method: str,
    plan_id: str,
    inputs: Sequence[LineageEntry],
    operators: Sequence[OperatorCount],
) -> bytes:
    """README.md with the lineage: which contents, by which method and operators, which plan."""
    front = ["---", "library_name: transformers", "tags:", "- merge", "- mergepipe", "---", ""]
    rows = [f"| {i.role} | {markdown(i.name)} | `{i.content_sha256[:16]}` |" for i in inputs]
    operator_rows = [f"| `{name}` | {variant or '–'} | {n} |" for name, variant, n in operators]
    body = [
        f"# Merged model ({method})",
        "",
        f"Merged by MergePipe with `{method}` from {len(inputs)} checkpoints, "
        f"under plan `{plan_id[:16]}`.",
        "",
        "| role | checkpoint | content |",
        "|---|---|---|",
        *rows,
        "",
        "| operator | variant | tensors |",
        "|---|---|---|",
        *operator_rows,
        "",
        "`manifest.json` names every byte of this folder; `provenance.json` holds the recipe, "
        "its budget, the predicted error with its bound, and what was read.",
        "",
    ]
    return "\n".join(front + body).encode()


def tool_card(verb: str, parameters: Mapping[str, Any], inputs: Sequence[LineageEntry]) -> bytes:
    """README.md of a result that no recipe made: which verb, with which parameters, from what."""
    library = "peft" if verb == "extract-lora" else "transformers"
    front = ["---", f"library_name: {library}", "tags:", "- mergepipe", "---", ""]
    rows = [f"| {i.role} | {markdown(i.name)} | `{i.content_sha256[:16]}` |" for i in inputs]
    settings = [f"- {key}: `{json.dumps(value)}`" for key, value in sorted(parameters.items())]
    body = [
        f"# Made by `mergepipe {verb}`",
        "",
        "| role | checkpoint | content |",
        "|---|---|---|",
        *rows,
        "",
        *settings,
        "",
        "`manifest.json` names every byte of this folder; `provenance.json` says how it was made.",
        "",
    ]
    return "\n".join(front + body).encode()


def has_own_card(provenance: Mapping[str, Any]) -> bool:
    """Whether the card of a copy says more than the snapshot's, which its id covers."""
    return not provenance.keys().isdisjoint((MEASURED, STATED))


def exported_card(card: bytes, provenance: Mapping[str, Any]) -> bytes:
    """The card of a copy: with what its provenance says of inputs and of what was measured."""
    if stated := provenance.get(STATED):
        front = yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)
        card = card.replace(b"---\n", f"---\n{front}".encode(), 1)
    measured = provenance.get(MEASURED)
    return _measured_card(card, measured) if measured else card


def _measured_card(card: bytes, evaluations: Sequence[Mapping[str, Any]]) -> bytes:
    """The card with a table of what evaluators measured, as `domain.evaluation` says it as JSON."""
    rows = [
        f"| {markdown(name)} | {value:.10g} | {markdown(e['evaluator'])} | {e['created']} |"
        for e in evaluations
        for name, value in e["metrics"].items()
    ]
    lines = ["## Metrics", "", "| metric | value | measured by | at |", "|---|---|---|---|", *rows]
    return card + "\n".join(["", *lines, ""]).encode()
