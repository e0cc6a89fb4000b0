"""Plans made by hand, and what a layer's file holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

from mergepipe_pipeline.domain.blocks import Range
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.plan import (
    BaseInput,
    Estimates,
    ExpertInput,
    LayerTask,
    MergePlan,
    SideFiles,
    Source,
    TensorTask,
)
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.view import TensorView, moved
from tests.support.kinds import Kinds
from tests.support.oracles import Case
from tests.support.stored import Floats

Reads = Sequence[tuple[Range, ...] | None]
SEED = 3


def plan_of(checkpoints: Sequence[Checkpoint], *layers: Sequence[TensorTask]) -> MergePlan:
    """A plan of these layers over these sources."""
    return MergePlan(
        recipe_name="r",
        recipe_text="",
        method="m",
        sources=tuple(Source(c.name, c.root, c.checkpoint_id, c.stamp) for c in checkpoints),
        roles=tuple("base" if i == 0 else "expert" for i in range(len(checkpoints))),
        layers=tuple(LayerTask(f"layer.{i:02d}", tuple(tasks)) for i, tasks in enumerate(layers)),
        side=SideFiles(0),
        estimates=Estimates(None, "full", 4096, 0, 0, 0, 0, 0, 0, None, "", None, None, None),
        ref="main",
    )


def merged(
    kinds: Kinds,
    names: Sequence[str],
    operator: str,
    params: Params = (),
    model_params: Sequence[Params] | None = None,
    reads: Reads | None = None,
    *,
    out_dtype: str = "F32",
    base: bool = True,
) -> MergePlan:
    """A plan that merges tensor `w` of experts by kind; source 0 is the base.

    `reads` are the ranges of each expert (None: all of it).
    """
    checkpoints = list(kinds.base.checkpoints)
    experts = []
    for i, name in enumerate(names):
        kind = kinds.experts[name]
        view = moved(kind.view, len(checkpoints))
        checkpoints += kind.model.checkpoints
        span = reads[i] if reads and reads[i] is not None else ((0, view.numel),)
        assert span is not None
        given = model_params[i] if model_params else (("weight", 1.0),)
        experts.append(ExpertInput(i, view, f"sha of {name}", given, span, span))
    below = kinds.base.views["w"]
    task = TensorTask(
        "w",
        below.shape,
        out_dtype,
        operator,
        params,
        SEED,
        BaseInput(below, "sha of base") if base else None,
        tuple(experts),
    )
    return plan_of(checkpoints, [task])


def copied(view: TensorView, name: str = "w", out_dtype: str | None = None) -> TensorTask:
    """The task that copies a base's tensor."""
    dtype = out_dtype or view.dtype
    return TensorTask(name, view.shape, dtype, "copy", (), SEED, BaseInput(view, "sha"), ())


def case_of(kinds: Kinds, plan: MergePlan, names: Sequence[str]) -> Case:
    """What a plan of `merged` means to an oracle: outside what is read, an expert is the base."""
    ((task,),) = (layer.tasks for layer in plan.layers)
    base = kinds.values.astype(np.float64)
    rows = []
    for e, name in zip(task.experts, names, strict=True):
        read = np.zeros(len(base), dtype=np.bool_)
        for a, b in e.read:
            read[a:b] = True
        rows.append(base + np.where(read, kinds.experts[name].delta, 0))
    models = [dict(e.params) for e in task.experts]
    return Case(base, np.stack(rows), dict(task.params), models, shape=task.shape)


def values_in(file: Path, name: str = "w") -> Floats:
    """A tensor of a written layer, float32 [N], read by the reference implementation."""
    with safe_open(file, "pt") as f:
        values: Floats = f.get_tensor(name).float().numpy().reshape(-1)
    return values
