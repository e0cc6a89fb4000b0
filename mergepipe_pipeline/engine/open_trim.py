"""Trim rules of one expert that a plan leaves open: finds where their ties are cut.

A look ahead at that part of a block which the merge itself will read, through the same gate; its
bytes are kept till then, so that none is read twice. In short runs: on average half of a block is
enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.engine.sources import SourcePool
from mergepipe_pipeline.engine.windows import cut
from mergepipe_pipeline.engine.workspace import Desk
from mergepipe_pipeline.operators.open_trim import Run, closed
from mergepipe_pipeline.spec.blocks import clip
from mergepipe_pipeline.spec.plan import BaseInput, ExpertInput, TrimRule
from mergepipe_pipeline.tensors.low_rank import LowRankUpdate
from mergepipe_pipeline.tensors.rows import BaseRow, ExpertRow
from mergepipe_pipeline.tensors.stored import announce_stored

_RUN_ELEMS = 1 << 18


class OpenTrim:
    """One expert of a task, with open rules."""

    def __init__(self, sources: SourcePool, base: BaseInput, expert: ExpertInput) -> None:
        self._sources, self._base, self._expert = sources, base.view, expert
        low, low_below = expert.view.low_rank, base.view.low_rank
        self._update = LowRankUpdate(sources.expert_look, low) if low else None
        self._base_update = LowRankUpdate(sources.base_before, low_below) if low_below else None

    def announce(self) -> None:
        """Say to the disk what `run` may look at; the merge will read all of it."""
        view = self._expert.view
        for rule in (self._expert.trim, self._expert.outliers):
            if rule and rule.ties_after and view.stored:
                for a, b in clip(self._expert.read, rule.tie_stop_elem, rule.ties_until_elem):
                    announce_stored(self._sources.expert, view, a, b)

    def run(self, desk: Desk) -> ExpertInput:
        """The expert with rules that are not open, as far as what is read goes."""
        trim, outliers = (
            rule and closed(rule, self._runs(rule, desk))
            for rule in (self._expert.trim, self._expert.outliers)
        )
        return replace(self._expert, trim=trim, outliers=outliers)

    def _runs(self, rule: TrimRule, desk: Desk) -> Iterator[Run]:
        for a, b in clip(self._expert.read, rule.tie_stop_elem, rule.ties_until_elem):
            for start, stop in cut(b - a, _RUN_ELEMS):
                yield self._run(a + start, a + stop, desk)

    def _run(self, start_elem: int, stop_elem: int, desk: Desk) -> Run:
        n, view = stop_elem - start_elem, self._expert.view
        sizes = n * itemsize(view.dtype), n * itemsize(self._base.dtype)
        desk.clear(sum(sizes), len(sizes))
        row = ExpertRow(
            self._sources.expert_look, view, self._expert.read, desk.take(sizes[0]), self._update
        )
        row.fetch(start_elem, stop_elem)
        base = None
        if view.stands_alone:
            room = desk.take(sizes[1])
            base = BaseRow(self._sources.base_before, self._base, room, self._base_update)
            base.fetch(start_elem, stop_elem)
        bits, below = row.bits(n), base.bits if base else None
        if bits is not None and below is not None:
            return Run(start_elem, bits, below)
        delta = desk.rows(1, n)[0]
        row.delta(delta, base.values() if base else None)
        return Run(start_elem, delta.numpy())
