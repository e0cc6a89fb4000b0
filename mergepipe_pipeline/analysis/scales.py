"""L1 rescale factors of sparsified deltas: ‖δ‖₁ over that of what is kept, per whole tensor.

mergekit's rescale (its pull request 245). What is kept is what the engine will keep: the same
sparsifiers are applied to the same task, window by window; a random drop and the sum of what it
keeps are one compiled pass, 0.4 ns per element of bfloat16 in cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from mergepipe_pipeline.analysis.stream import DeltaWindow, WindowReader
from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.operator import Fact
from mergepipe_pipeline.domain.plan import TensorTask, TrimRule
from mergepipe_pipeline.domain.segments import KnownSegments
from mergepipe_pipeline.domain.view import TensorView, moved
from mergepipe_pipeline.operators import Window
from mergepipe_pipeline.operators.kernels.kept_l1 import (
    CHUNK_ELEMS,
    kept_l1,
    kept_l1_bfloat16,
    l1_scale,
)
from mergepipe_pipeline.operators.kernels.nth_tie import closed
from mergepipe_pipeline.operators.steps import sparsify
from mergepipe_pipeline.operators.steps.random import keep_below, stream_key

Pair = tuple[str, str]


def l1_scales(
    expert: Model,
    base: Model,
    tasks: Mapping[Pair, tuple[float, TensorTask]],
    kind: Fact,
    *,
    known: KnownSegments | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[Pair, float]:
    """Factors by (expert's tensor, base's tensor): ‖δ‖₁/‖sparsified δ‖₁, 1 if either is below 1e-7.

    `tasks`: ‖δ‖₁, and that one expert with the facts that a sparsifier of this `kind` needs.
    `known`: segments of the expert's checkpoints and then the base's, which verify what is read.
    """
    scales = {}
    with WindowReader((*expert.checkpoints, *base.checkpoints), known) as reader:
        for pair, (l1, task) in tasks.items():
            view = expert.views[pair[0]]
            base_view = moved(base.views[pair[1]], len(expert.checkpoints))
            task = _closed(task, reader, view, base_view)
            row_elems = task.shape[-1] if kind == "ranked" and task.shape else 1

            def kept_part(window: DeltaWindow, task: TensorTask = task) -> tuple[float, int]:
                return _kept_l1(window, task, kind), len(window.expert_raw)

            kept = []
            for part, nbytes in reader.deltas(view, base_view, kept_part, row_elems=row_elems):
                kept.append(part)
                if progress:
                    progress(nbytes)
            total = math.fsum(kept)
            scales[pair] = l1_scale(l1, total)
        reader.verify_unchanged()
    return scales


def _closed(
    task: TensorTask, reader: WindowReader, view: TensorView, base_view: TensorView
) -> TensorTask:
    """The task with rules that say by themselves which ties are kept."""

    def exact(rule: TrimRule | None) -> TrimRule | None:
        if rule is None or not rule.is_open:
            return rule
        start = rule.tie_stop_elem

        def close(window: DeltaWindow) -> TrimRule:
            return closed(rule, window.values[start - window.start_elem :])

        (closed_rule,) = reader.deltas(view, base_view, close, only=start // reader.window_elems)
        return closed_rule

    (expert,) = task.experts
    both = replace(expert, trim=exact(expert.trim), outliers=exact(expert.outliers))
    return replace(task, experts=(both,))


def _kept_l1(window: DeltaWindow, task: TensorTask, kind: Fact) -> float:
    if kind == "drop":
        return _kept_at_random(window, task)
    rows = torch.from_numpy(window.values).view(1, -1)
    _sparsify(Window(None, rows, task, window.start_elem), kind)
    magnitude: F32Array = np.abs(window.delta)
    sums = magnitude.reshape(-1, CHUNK_ELEMS).sum(axis=1, dtype=np.float64)
    return math.fsum(sums.tolist())


def _kept_at_random(window: DeltaWindow, task: TensorTask) -> float:
    expert = task.experts[0]
    limit = keep_below(float(dict(expert.params)["density"]))
    if not limit:
        return 0.0
    sums = np.zeros((2, -(-window.n // CHUNK_ELEMS)))
    key = stream_key(task.seed, expert.position, task.name)
    which = (key, window.start_elem, np.uint32(limit - 1), sums)
    if window.dtype == "BF16":
        values = np.frombuffer(window.expert_raw, np.uint16)
        kept_l1_bfloat16(values, np.frombuffer(window.base_raw, np.uint16), *which)
    else:
        kept_l1(window.delta, *which)
    return math.fsum(sums[0].tolist())


def _sparsify(window: Window, kind: Fact) -> None:
    params = dict(window.task.experts[0].params)
    epsilon = float(params["epsilon"]) if kind == "ranked" else 0.0
    sparsify.thin(window, 0, kind, float(params["density"]), epsilon)
