"""The files beside the weights of a result: config, tokenizer, ids of tokens, and what is lost.

The recipe, the models' configs and the output's tensors decide; `execution.assemble` writes.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.layers import embedding_like, is_post
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.model_config import config_places
from mergepipe_pipeline.domain.plan import ConfigValue, SideFiles
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import (
    CheckpointError,
    IncompatibleCheckpointsError,
    IncompleteCheckpointError,
)
from mergepipe_pipeline.remote.address import HUB, is_address
from mergepipe_pipeline.resolution.fp8_output import quantization_config
from mergepipe_pipeline.resolution.layer_config import layer_changes
from mergepipe_pipeline.resolution.layer_tensors import refuse_unlike_layers
from mergepipe_pipeline.resolution.plain_numbers import stale_settings
from mergepipe_pipeline.resolution.vocabulary import size_changes
from mergepipe_pipeline.storage.json_text import json_bytes, load_object
from mergepipe_pipeline.storage.side_files import (
    CONFIG,
    SideStamp,
    is_module,
    module_folders,
    pickled_modules,
    side_files,
    side_sha256,
    side_stamps,
)
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.text import listed
from mergepipe_pipeline.tokenizer.build import TokenizerBuild
from mergepipe_pipeline.tokenizer.chat import BUILT_IN, ENDS, chat_template, with_chat_template
from mergepipe_pipeline.tokenizer.chat import template_of as chat_template_of
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    CONFIG as TOKENIZER_CONFIG,
)
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    ModelTokenizer,
    json_object,
    of_tokenizer,
    read_tokenizer,
)
from mergepipe_pipeline.tokenizer.special_ids import GENERATION, Statement, followed, statement_of

#: Files that each are a tokenizer's vocabulary.
_VOCABULARIES = frozenset(
    {"sentencepiece.bpe.model", "spiece.model", "tokenizer.json", "tokenizer.model", "vocab.json"}
    | {"vocab.txt"}
)
#: Bytes at the end of a file among which its last bracket is.
_END_NBYTES = 256


def template_of(recipe: Recipe, models: Sequence[Model]) -> int:
    """The model that gives the output its config and files: the base, or the first whole one."""
    if recipe.base is not None:
        return recipe.base
    return next((i for i, m in enumerate(models) if not m.is_partial), 0)


def side_of(
    recipe: Recipe,
    models: Sequence[Model],
    tokenizer_files: Mapping[str, bytes] | None,
    *,
    copies_tokenizer: bool = True,
) -> SideFiles:
    """The output's side files; `tokenizer_files` replace the template's (None: they stay, or go
    unless the merge `copies_tokenizer`).

    Raises RecipeError for a chat template that is none, IncompleteCheckpointError for a file that
    ends early.
    """
    template = template_of(recipe, models)
    files = None if tokenizer_files is None else dict(tokenizer_files)
    if recipe.chat_template is not None:
        whole = ((m.name, tokenizer_files_of(m)) for m in models if not m.is_partial)
        text = chat_template(recipe.chat_template, whole)
        if text is not None:
            own = tokenizer_files_of(models[template]) if files is None else files
            files = with_chat_template(own, text)
    keeps_own = files is None and copies_tokenizer
    _refuse_cut_files(models[template].checkpoint, is_replaced=not keeps_own)
    packed = None
    if files is not None:
        packed = tuple((n, b64encode(data).decode()) for n, data in sorted(files.items()))
    return SideFiles(template, tuple(_config(recipe, models, template)), packed)


def _refuse_cut_files(checkpoint: Checkpoint, *, is_replaced: bool) -> None:
    """Raise IncompleteCheckpointError for a JSON file without end, but for a replaced tokenizer's.

    A cut copy shows at its end; whoever uses the model parses all of it.
    """
    if checkpoint.tokenizer_files is not None or is_address(checkpoint.root):
        return
    with open_source(checkpoint.root) as source:
        for name, nbytes in side_files(source, checkpoint.root).items():
            if (is_replaced and of_tokenizer(name)) or not name.endswith(".json"):
                continue
            start = max(0, nbytes - _END_NBYTES)
            end = source.read_range(name, start, nbytes - start).rstrip()
            if not end.endswith((b"}", b"]")):
                raise IncompleteCheckpointError(
                    "A file beside the weights ends early",
                    where=f"{checkpoint.root}, {name}",
                    expected="JSON up to its last bracket",
                    found=f"{nbytes} bytes that end in {end[-20:].decode(errors='replace')!r}",
                    next_step="copy the file again, or get it from who made the model",
                )


def without_tokenizer(side: SideFiles, models: Sequence[Model]) -> tuple[str, ...]:
    """A warning where the result has no tokenizer, and another model than the template has one."""
    if side.files is not None or _has_tokenizer(models[side.template]):
        return ()
    lacking = models[side.template]
    owner = next((m.name for m in models if m is not lacking and _has_tokenizer(m)), None)
    if owner is None:
        return ()
    return (
        f"{lacking.name!r} has no tokenizer, so the result has none; {owner!r} has one: "
        "`tokenizer_source:` takes it",
    )


def _has_tokenizer(model: Model) -> bool:
    checkpoint = model.checkpoint
    if checkpoint.tokenizer_files is None and is_address(checkpoint.root):
        return False  # a warning is not worth a request
    return _brings_tokenizer(checkpoint)


def _brings_tokenizer(checkpoint: Checkpoint) -> bool:
    if checkpoint.tokenizer_files is not None:
        return bool(checkpoint.tokenizer_files)
    with open_source(checkpoint.root) as source:
        return any(name in _VOCABULARIES for name in side_files(source, checkpoint.root))


def tokenizer_files_of(model: Model) -> dict[str, bytes]:
    """The tokenizer files of a model's folder, by name."""
    return files_of(model.checkpoint, of_tokenizer)


def files_of(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Files that lie beside a checkpoint's weights; of a stage, those that it will write."""
    made = checkpoint.tokenizer_files or {}
    with open_source(checkpoint.root) as source:
        sizes = side_files(source, checkpoint.root)
        names = [n for n in sizes if wanted(n) and n not in made]
        if checkpoint.tokenizer_files is not None:
            names = [n for n in names if not of_tokenizer(n)]
        own = {n: source.read_range(n, 0, sizes[n]) for n in names}
    return own | {n: data for n, data in made.items() if wanted(n)}


def tokenizer_owner(model: Model) -> Checkpoint:
    """The checkpoint with a model's tokenizer: an adapter that brings one, else the model's."""
    adapters = (c for c in model.checkpoints[1:] if c.kind == "adapter")
    return next(filter(_brings_tokenizer, adapters), model.checkpoint)


def tokenizer_of(model: Model, n_rows: int) -> ModelTokenizer:
    """A model's tokenizer; `n_rows` of its embedding. Raises CheckpointError."""
    return read_tokenizer(model.name, files_of(tokenizer_owner(model), of_tokenizer), n_rows)


def _config(
    recipe: Recipe, models: Sequence[Model], template: int
) -> list[tuple[str, ConfigValue]]:
    refuse_unlike_layers(recipe, models, template)
    config = models[template].stated
    changes = [*models[template].becomes, *layer_changes(recipe, models, template)]
    changes += size_changes(recipe, models, template, config)
    if _must_untie(recipe, models, config):
        places = dict.fromkeys(
            ("tie_word_embeddings", *config_places(config, ("tie_word_embeddings",)))
        )
        changes += [(place, False) for place in places]
    stale = stale_settings(recipe, models, models[template].checkpoint)
    changes += [(place, None) for place in stale]
    if recipe.coded:
        changes.append(("quantization_config", quantization_config(recipe, models)))
    return changes


def _must_untie(recipe: Recipe, models: Sequence[Model], config: Mapping[str, Any]) -> bool:
    """The output has a head of its own, the template's config may tie it, an input's does not."""
    has_head = any(embedding_like(t.name) and is_post(t.name) for t in recipe.tensors)
    if has_head and any(m.unties for m in models):
        return True
    if not has_head or config.get("tie_word_embeddings") is False:
        return False
    used = recipe.contributing
    return any(models[m].stated.get("tie_word_embeddings") is False for m in used)


#: Files with an `auto_map`; each names classes as `module.Class`.
_MAPPED = ("preprocessor_config.json", "processor_config.json", TOKENIZER_CONFIG)
_MOST_NAMED = 12


def beside_warnings(recipe: Recipe, models: Sequence[Model], side: SideFiles) -> tuple[str, ...]:
    """A warning for code that the result needs, and one for each adapter's tokenizer left aside."""
    template = models[side.template].checkpoint
    used = recipe.contributing
    out = [*_code(template), *_modules(template, [models[n] for n in sorted(used)])]
    if recipe.tokenizer is None:
        for number in used if len(used) == 1 else ():
            out += _adapters_tokenizer(recipe.models[number].text, models[number], template)
    return tuple(out)


def _code(template: Checkpoint) -> Iterator[str]:
    """Names the files of Python that the template's `auto_map`s name: none is copied."""
    documents = [template.stated]
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
    """Names the modules of sentence-transformers that are pickled, or that others set otherwise.

    Raises IncompatibleCheckpointsError for other weights of modules: these are not merged.
    """
    own, pickled = _module_digests(template)
    if pickled:
        yield (
            f"{listed(pickled, _MOST_NAMED)} of {template.name} is pickled and not copied: write "
            "it as model.safetensors in the same folder, or put it beside the result"
        )
    for checkpoint in {c.root: c for m in models for c in m.checkpoints}.values():
        others, _ = _module_digests(checkpoint)
        differing = [name for name, digest in others.items() if own.get(name) != digest]
        weights = [name for name in differing if not name.endswith(f"/{CONFIG}")]
        if weights:
            raise IncompatibleCheckpointsError(
                "Modules of sentence-transformers have other weights, and these are not merged",
                where=f"{checkpoint.root}, {listed(weights, _MOST_NAMED)}",
                expected=f"the bytes of those in {template.root}, which the result has",
                found="other bytes" if weights[0] in own else "no such file there",
                next_step=f"make the files equal, or merge a copy of {checkpoint.name} without "
                "modules.json, whose modules the result then lacks",
            )
        if differing:
            yield (
                f"{checkpoint.name} has other {listed(differing, _MOST_NAMED)} than "
                f"{template.name}: the result has the settings of {template.name}"
            )


def _module_digests(checkpoint: Checkpoint) -> tuple[dict[str, str], list[str]]:
    """SHA-256 of each file of the modules beside a model by name, and which of them are pickled.

    Raises IncompatibleCheckpointsError where they cannot be seen.
    """
    if not is_address(checkpoint.root) and not os.path.exists(checkpoint.root):
        return {}, []  # of a stored plan, whose curve is drawn
    with open_source(checkpoint.root) as source:
        if not (folders := module_folders(source)):
            return {}, []
        missing = [folder for folder in folders if folder not in source.list()]
        is_far = is_address(checkpoint.root) and not checkpoint.root.startswith(f"{HUB}://")
        if is_far and missing:
            raise IncompatibleCheckpointsError(
                "Modules of sentence-transformers cannot be read from this address",
                where=checkpoint.root,
                expected="a folder, or a model of the hub, where modules.json lists modules",
                found=f"an address below which no folders are seen: {listed(missing, _MOST_NAMED)}",
                next_step="download the model and give its folder, or take modules.json away",
            )
        stamps = [s for s in side_stamps(source, checkpoint.root) if is_module(s.file)]
        pickled = [SideStamp(n, source.size(n), 0) for n in pickled_modules(source, folders)]
        digests = {s.file: side_sha256(source, s) for s in (*stamps, *pickled)}
    return digests, [s.file for s in pickled]


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
    """The parts of a folder's tokenizer and ends that matter, by how messages call them."""
    files = files_of(checkpoint, lambda name: of_tokenizer(name) or name == GENERATION)
    tokenizer = read_tokenizer(checkpoint.name, files, 1 << 62)
    return {
        "vocabulary": tokenizer.vocab,
        "chat template": chat_template_of(files, checkpoint.name),
        "end tokens": json_object(files, GENERATION, checkpoint.name).get("eos_token_id"),
    }


_UNBOUNDED = 1 << 62


def with_ids(
    side: SideFiles, recipe: Recipe, models: Sequence[Model], build: TokenizerBuild | None
) -> tuple[SideFiles, tuple[str, ...]]:
    """The side with the ids of the output's tokens in both configs, and warnings.

    `models` are as their files have them. Raises IncompatibleCheckpointsError for an id that the
    output needs and has no token for, CheckpointError for files that cannot be read.
    """
    if side.files is None:
        return side, ()
    lead = recipe.base or 0
    asked = recipe.tokenizer.source if recipe.tokenizer else side.template
    source = lead if asked == "union" else asked
    ending, is_built_in = _ending(side, recipe, models, source)
    if build is None and ending == side.template and not is_built_in:
        return side, ()
    numbers = (source, ending)
    try:
        lead_tokenizer = tokenizer_of(models[lead if build else side.template], _UNBOUNDED)
        template = models[side.template].checkpoint
        owners = [tokenizer_owner(models[m]) if build else models[m].checkpoint for m in numbers]
        said = {id(c): _statement(c, lead_tokenizer) for c in (template, *owners)}
        own, by_source, by_ending = (said[id(c)] for c in (template, *owners))
    except CheckpointError as error:
        if build is not None:
            raise
        return side, (f"chat_template: which tokens end a text is left as it is: {error}",)
    vocab, n_rows = lead_tokenizer.vocab, _UNBOUNDED
    if build is not None:
        vocab, n_rows = build.vocab, build.n_rows
    told = _built_in_ends(recipe, by_ending, vocab) if is_built_in else ()
    if build is None and is_built_in:
        return side, told
    new = followed(own, by_source, by_ending, vocab, n_rows)
    files = dict(side.files)
    if new.generation is not None:
        files[GENERATION] = b64encode(json_bytes(new.generation)).decode()
    config = (*side.config, *new.config)
    return replace(side, config=config, files=tuple(sorted(files.items()))), (*new.warnings, *told)


def _ending(
    side: SideFiles, recipe: Recipe, models: Sequence[Model], source: int
) -> tuple[int, bool]:
    """The model whose template the output has, and whether that is a built-in one instead."""
    if recipe.chat_template is None:
        return source, False
    files = {name: b64decode(text) for name, text in side.files or ()}
    text = chat_template_of(files, "output")
    for m in dict.fromkeys((source, side.template, *range(len(models)))):
        own = chat_template_of(tokenizer_files_of(models[m]), models[m].name)
        if (own or "").strip() == (text or "").strip():
            return m, False
    return source, recipe.chat_template in BUILT_IN


def _statement(checkpoint: Checkpoint, lead: ModelTokenizer) -> Statement:
    files = files_of(checkpoint, lambda name: of_tokenizer(name) or name == GENERATION)
    tokenizer = read_tokenizer(checkpoint.name, files, _UNBOUNDED)
    lead = tokenizer if tokenizer.plain else lead
    return statement_of(lead, checkpoint.name, checkpoint.stated, files)


def _built_in_ends(recipe: Recipe, said: Statement, vocab: Mapping[str, int]) -> tuple[str, ...]:
    """A warning where a built-in template ends turns with a token that ends no text."""
    token = ENDS.get(recipe.chat_template or "")
    ends = said.ends()
    if token is None or vocab.get(token, -1) in (ends if isinstance(ends, list) else [ends]):
        return ()
    place = f"with id {vocab[token]} is not among these" if token in vocab else "is no token of it"
    return (
        f"chat_template: {recipe.chat_template} ends turns with {token}; the result stops at "
        f"{ends}, and {token} {place}: generation goes on after a turn",
    )
