"""Strategies to compare with: blocks by a hash of their names, and leaving whole experts out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mergepipe_pipeline.arrays import F64Array
from mergepipe_pipeline.planner.candidates import Candidates
from mergepipe_pipeline.planner.strategies import STRATEGIES, Strategy
from mergepipe_pipeline.recipe import schema


def by_hash(c: Candidates) -> F64Array:
    """Score blocks by a hash of their names: importance plays no part."""
    names = [f"{c.rows[r].name}:{b}" for r, b in zip(c.row.tolist(), c.block.tolist(), strict=True)]
    digests = [int.from_bytes(hashlib.sha256(n.encode()).digest()[:3], "big") for n in names]
    score: F64Array = (1.0 + np.array(digests)) * np.maximum(c.nbytes, 1e-3)
    return score


def drop_experts(c: Candidates) -> F64Array:
    """Score experts in recipe order: each is read before the next."""
    score: F64Array = (1.0 + c.expert.max(initial=0) - c.expert) * np.maximum(c.nbytes, 1e-3)
    return score


BASELINES = {"hash": Strategy(by_hash), "drop-experts": Strategy(drop_experts)}


@contextmanager
def baselines() -> Iterator[None]:
    """Let plans follow the baselines, too, by their names."""
    known = schema.STRATEGIES
    schema.STRATEGIES = (*known, *BASELINES)  # type: ignore[assignment]
    STRATEGIES.update(BASELINES)
    try:
        yield
    finally:
        schema.STRATEGIES = known
        for name in BASELINES:
            del STRATEGIES[name]
