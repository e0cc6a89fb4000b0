"""What stands beside the weights of a result: whose config, with which changes, which tokenizer.

The recipe, the models' configs and the output's tensors decide; `execution.assemble` writes.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.layers import embedding_like, is_post
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.plan import ConfigValue
from mergepipe_pipeline.domain.recipe import Recipe
from mergepipe_pipeline.errors import IncompleteCheckpointError
from mergepipe_pipeline.planner.plan_builder import Side
from mergepipe_pipeline.remote.address import is_address
from mergepipe_pipeline.resolution.layer_config import (
    config_of,
    config_places,
    layer_changes,
)
from mergepipe_pipeline.resolution.plain_numbers import stale_settings
from mergepipe_pipeline.resolution.vocabulary_tables import size_changes
from mergepipe_pipeline.storage.side_files import side_files
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.tokenizer.chat import chat_template, with_chat_template
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    ModelTokenizer,
    of_tokenizer,
    read_tokenizer,
)

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
) -> Side:
    """The output's side files; `tokenizer_files` replace the template's (None: they stay, or go
    unless the merge `copies_tokenizer`).

    Raises RecipeError for a chat template that is none, IncompleteCheckpointError for a file that
    ends early.
    """
    template = template_of(recipe, models)
    files = None if tokenizer_files is None else dict(tokenizer_files)
    if recipe.chat_template is not None:
        tokenizers = [
            ModelTokenizer(m.name, tokenizer_files_of(m), 0, {}, ())
            for m in models
            if not m.is_partial
        ]
        text = chat_template(recipe.chat_template, tokenizers)
        if text is not None:
            own = tokenizer_files_of(models[template]) if files is None else files
            files = with_chat_template(own, text)
    keeps_own = files is None and copies_tokenizer
    _refuse_cut_files(models[template].checkpoint, is_replaced=not keeps_own)
    packed = None
    if files is not None:
        packed = tuple((n, b64encode(data).decode()) for n, data in sorted(files.items()))
    return Side(template, tuple(_config(recipe, models, template)), packed)


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


def without_tokenizer(side: Side, models: Sequence[Model]) -> tuple[str, ...]:
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
    config = config_of(models[template])
    changes = [*models[template].becomes, *layer_changes(recipe, models, template)]
    changes += size_changes(recipe, models, template, config)
    if _must_untie(recipe, models, config):
        places = dict.fromkeys(
            ("tie_word_embeddings", *config_places(config, ("tie_word_embeddings",)))
        )
        changes += [(place, False) for place in places]
    stale = stale_settings(recipe, models, models[template].checkpoint)
    return changes + [(place, None) for place in stale]


def _must_untie(recipe: Recipe, models: Sequence[Model], config: Mapping[str, Any]) -> bool:
    """The output has a head of its own, the template's config may tie it, an input's does not."""
    has_head = any(embedding_like(t.name) and is_post(t.name) for t in recipe.tensors)
    if has_head and any(m.unties for m in models):
        return True
    if not has_head or config.get("tie_word_embeddings") is False:
        return False
    used = {i.model for t in recipe.tensors for i in t.inputs}
    return any(config_of(models[m]).get("tie_word_embeddings") is False for m in used)
