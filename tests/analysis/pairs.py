"""Pairs of models on disk, with short windows while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from mergepipe_pipeline.analysis import stream
from mergepipe_pipeline.analysis.statistics import analyze_experts
from mergepipe_pipeline.domain.blocks import BlockGrid
from mergepipe_pipeline.domain.model import Model
from mergepipe_pipeline.domain.stats import ExpertStats, Magnitudes, TensorStats
from tests.support.stored import Floats, Stored, decode, model_of, write

#: Elements per window in tests: a few thousand elements then make several windows.
WINDOW_ELEMS = 8192


def delta_of(expert: Stored, base: Stored) -> Floats:
    """δ = float32(expert) − float32(base), float32 [N]."""
    return decode(expert) - decode(base)


def pairs_of(expert: Model, base: Model) -> list[tuple[str, str]]:
    """Each tensor of the expert with the base's of the same name."""
    return [(name, name) for name in expert.views if name in base.views]


def analyze_all(
    experts: Sequence[tuple[Model, Sequence[tuple[str, str]]]],
    base: Model,
    grid: BlockGrid,
    progress: Callable[[int], None] | None = None,
) -> list[ExpertStats]:
    """Statistics of several experts from one pass."""
    found: list[list[TensorStats]] = [[] for _ in experts]
    for done in analyze_experts(experts, base, grid, progress=progress):
        for i, stats in done:
            found[i].append(stats)
    return [
        ExpertStats(base.model_id, model.model_id, grid.block_elems, tuple(tensors))
        for (model, _), tensors in zip(experts, found, strict=True)
    ]


def analyze_one(
    expert: Model, base: Model, pairs: Sequence[tuple[str, str]], grid: BlockGrid
) -> ExpertStats:
    """Statistics of one expert from a pass of its own."""
    (found,) = analyze_all([(expert, pairs)], base, grid)
    return found


def figures(stats: TensorStats) -> dict[str, object]:
    """All figures, arrays as bytes and floats in full: equal only if every bit is."""

    def plain(value: object) -> object:
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, Magnitudes):
            return {name: plain(part) for name, part in vars(value).items()}
        return value.tobytes() if isinstance(value, np.ndarray) else value

    left_out = ("segments", "base_segments")  # which the digests are of
    return {name: plain(value) for name, value in vars(stats).items() if name not in left_out}


def bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """The nearest bfloat16 to each, as bits."""
    bits: npt.NDArray[np.uint16] = (
        torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    )
    return bits


@contextmanager
def on_disk(
    expert: Mapping[str, Stored], base: Mapping[str, Stored], window_elems: int = WINDOW_ELEMS
) -> Iterator[tuple[Model, Model]]:
    """Both models in a temporary folder, with short windows meanwhile."""
    with TemporaryDirectory() as folder, windows_of(window_elems):
        yield (
            model_of(write(Path(folder), "expert", expert)),
            model_of(write(Path(folder), "base", base)),
        )


@contextmanager
def windows_of(elems: int) -> Iterator[None]:
    """Analysis in windows of so many elements of one expert."""
    with mock.patch.object(stream, "WINDOW_ELEMS", elems):
        yield
