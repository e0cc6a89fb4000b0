"""Strategies to compare with: blocks by a hash of their names, and leaving whole experts out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mergepipe_pipeline.planner.candidates import Candidates, Choice
from mergepipe_pipeline.planner.items import Items, single_items
from mergepipe_pipeline.planner.strategies import STRATEGIES, Ranked
from mergepipe_pipeline.recipe import schema


def by_hash(c: Candidates, free: Choice) -> Ranked:
    """Blocks in the order of a hash of their names: importance plays no part."""
    units = np.unique(c.unit[free & ~c.zero])
    names = [r.name for r in c.rows]
    first = c.unit_first[units]
    keys = np.array(
        [
            int.from_bytes(hashlib.sha256(f"{names[r]}:{b}".encode()).digest()[:8], "big")
            for r, b in zip(c.row[first].tolist(), c.block[first].tolist(), strict=True)
        ],
        dtype=np.uint64,
    )
    return single_items(c, units), np.argsort(keys, kind="stable")


def drop_experts(c: Candidates, free: Choice) -> Ranked:
    """Whole experts in recipe order, as many as fit."""
    members = np.flatnonzero(free)
    members = members[np.argsort(c.expert[members], kind="stable")]
    experts, first = np.unique(c.expert[members], return_index=True)
    saved = np.add.reduceat(c.gain[members], first) if len(first) else np.zeros(0)
    items = Items(experts, saved, np.append(first, len(members)), members)
    return items, np.arange(len(experts))


BASELINES = {"hash": by_hash, "drop-experts": drop_experts}


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
