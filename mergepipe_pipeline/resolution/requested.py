"""How a plan was requested: which checkpoint each model text stood for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.domain.request import Request, RequestedModel
from mergepipe_pipeline.resolution.resolve import ResolvedRecipe


def requested(
    resolved: ResolvedRecipe,
    models: Sequence[Model],
    digests: Sequence[Sequence[Mapping[str, str]]],
    stages: Collection[str],
) -> Request:
    """The request of a checked recipe with its models, after those of the stages before it.

    `digests` are by tensor, per model and checkpoint; the results of `stages` are no inputs.
    """
    contents = {
        c.checkpoint_id: digest_json(dict(by_tensor))
        for model, by_checkpoint in zip(models, digests, strict=True)
        for c, by_tensor in zip(model.checkpoints, by_checkpoint, strict=True)
    }
    models_by_text = {m.text: m for m in resolved.request.models}
    for ref, model in zip(resolved.recipe.models, resolved.originals, strict=True):
        for text, c in zip(_texts(ref, len(model.checkpoints)), model.checkpoints, strict=True):
            if text not in stages:
                content = contents[c.checkpoint_id]
                models_by_text[text] = RequestedModel(
                    text, c.name, c.root, c.checkpoint_id, content
                )
    return replace(resolved.request, models=tuple(models_by_text.values()))


def _texts(ref: ModelRef, count: int) -> Iterator[str]:
    """What names each checkpoint of a model, as `open_models.Pending` has it."""
    if count == 1:
        yield ref.text
        return
    for text, revision in ((ref.model, ref.revision), (ref.lora, ref.lora_revision)):
        yield f"{text}@{revision}" if revision else str(text)
