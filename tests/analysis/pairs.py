"""Pairs of models on disk, with short windows while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from mergepipe_pipeline.analysis import stream
from mergepipe_pipeline.spec.model import Model
from tests.stored import Floats, Stored, decode, model_of, write

#: Elements per window in tests: a few thousand elements then make several windows.
WINDOW_ELEMS = 8192


def delta_of(expert: Stored, base: Stored) -> Floats:
    """δ = float32(expert) − float32(base), float32 [N]."""
    return decode(expert) - decode(base)


def pairs_of(expert: Model, base: Model) -> list[tuple[str, str]]:
    """Each tensor of the expert with the base's of the same name."""
    return [(name, name) for name in expert.views if name in base.views]


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
