"""Whether models that are merged by their tensors' names are of one architecture."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mergepipe_pipeline.spec.model import Model


def mixed_architectures(models: Sequence[Model]) -> list[str]:
    """A warning where models whose tensors are named alike are of different architectures."""
    model_by_kind: dict[str, str] = {}
    for model in models:
        kinds = json.loads(model.checkpoint.config or "{}").get("architectures")
        if isinstance(kinds, list) and kinds and not model.is_partial:
            model_by_kind.setdefault(str(kinds[0]), model.name)
    if len(model_by_kind) < 2:
        return []
    listed = ", ".join(f"{name} is a {kind}" for kind, name in model_by_kind.items())
    return [
        f"the models are of different architectures ({listed}): tensors of one name may mean "
        "different things, and mergekit asks for --allow-crimes"
    ]
