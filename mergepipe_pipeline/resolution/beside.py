"""What a result's user should know of files that lie beside models and are not in the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.planner.plan_builder import Side
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.resolution.model_files import files_of
from mergepipe_pipeline.storage.json_text import load_object
from mergepipe_pipeline.storage.side_files import (
    is_module,
    pickled_modules,
    side_sha256,
    side_stamps,
)
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.tokenizer.chat import template_of
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    CONFIG as TOKENIZER_CONFIG,
)
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    json_object,
    of_tokenizer,
    read_tokenizer,
)
from mergepipe_pipeline.tokenizer.special_ids import GENERATION

#: Files with an `auto_map`; each names classes as `module.Class`.
_MAPPED = ("preprocessor_config.json", "processor_config.json", TOKENIZER_CONFIG)
_MOST_NAMED = 12


def beside_warnings(recipe: Recipe, models: Sequence[Model], side: Side) -> tuple[str, ...]:
    """A warning for code that the result needs, and one for each adapter's tokenizer left aside."""
    template = models[side.template].checkpoint
    used = {i.model for t in recipe.tensors for i in t.inputs}
    out = [*_code(template), *_modules(template, [models[n] for n in sorted(used)])]
    if recipe.tokenizer is None:
        for number in used if len(used) == 1 else ():
            out += _adapters_tokenizer(recipe.models[number].text, models[number], template)
    return tuple(out)


def _code(template: Checkpoint) -> Iterator[str]:
    """Names the files of Python that the template's `auto_map`s name: none is copied."""
    documents = [load_object(template.config or "{}", template.root, "A model's config")]
    if not is_address(template.root):
        files = files_of(template, _MAPPED.__contains__)
        documents += [load_object(data, f"{template.root}, {n}", n) for n, data in files.items()]
    classes = [text for document in documents for text in _texts(document.get("auto_map"))]
    # `repository--module.Class` is fetched from there.
    modules = [c.rpartition(".")[0] for c in classes if "--" not in c]
    names = dict.fromkeys(f"{module}.py" for module in modules if module)
    if names:
        yield (
            f"the result needs code of its own (auto_map), which is not copied: put "
            f"{listed(list(names), _MOST_NAMED)} from {template.root} beside its weights, with the "
            "files that they import, if you trust them"
        )


def _modules(template: Checkpoint, models: Sequence[Model]) -> Iterator[str]:
    """Names the modules of sentence-transformers that others have otherwise: none is merged."""
    if is_address(template.root):
        return
    with open_source(template.root) as source:
        pickled = pickled_modules(source)
    if pickled:
        yield (
            f"{listed(pickled, _MOST_NAMED)} of {template.name} is pickled and not copied: write "
            "it as model.safetensors in the same folder, or put it beside the result"
        )
    own = _module_digests(template)
    for model in models if own else ():
        others = _module_digests(model.checkpoint)
        differing = [name for name, digest in own.items() if others.get(name, digest) != digest]
        if differing:
            yield (
                f"{model.name} has other {listed(differing, _MOST_NAMED)} than {template.name}: "
                f"modules beside the weights are not merged, and the result has those of "
                f"{template.name}"
            )


def _module_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of each file of the modules beside a model, by name."""
    if is_address(checkpoint.root):
        return {}
    with open_source(checkpoint.root) as source:
        return {
            stamp.file: side_sha256(source, stamp)
            for stamp in side_stamps(source, checkpoint.root)
            if is_module(stamp.file)
        }


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _adapters_tokenizer(text: str, model: Model, template: Checkpoint) -> Iterator[str]:
    """Says that an adapter brings another tokenizer or other ends than the result has."""
    for adapter in model.checkpoints:
        if adapter.kind != "adapter" or adapter is template or is_address(adapter.root):
            continue
        try:
            own, others = (_described(c) for c in (adapter, template))
        except CheckpointError:  # what is not used is no reason to refuse
            continue
        differing = [what for what, value in own.items() if value and value != others[what]]
        if differing:
            yield (
                f"{adapter.name} brings its own {', '.join(differing)}, which the result has not; "
                f"`tokenizer_source: {text}` takes what the adapter has"
            )


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    """What of a folder's tokenizer and ends matters, by how messages call it."""
    files = files_of(checkpoint, lambda name: of_tokenizer(name) or name == GENERATION)
    tokenizer = read_tokenizer(checkpoint.name, files, 1 << 62)
    return {
        "vocabulary": tokenizer.vocab,
        "chat template": template_of(tokenizer),
        "end tokens": json_object(files, GENERATION, checkpoint.name).get("eos_token_id"),
    }
