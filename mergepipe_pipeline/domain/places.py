"""A plan with other folders: as it is recorded, or as this machine has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mergepipe_pipeline.domain.plan import MergePlan


def with_folders(plan: MergePlan, placed: Callable[[str], str]) -> MergePlan:
    """The plan with each folder as `placed` gives it; its id covers none of them."""
    models = (replace(m, root=placed(m.root)) for m in plan.request.models)
    return replace(
        plan,
        sources=tuple(replace(s, root=placed(s.root)) for s in plan.sources),
        packs=tuple(replace(p, root=placed(p.root)) for p in plan.packs),
        request=replace(plan.request, models=tuple(models)),
    )
