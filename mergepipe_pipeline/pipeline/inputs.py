"""What a plan's inputs are compared with while they are read: the segments of all it reads.

The catalog has them from the pass that analysed or digested a checkpoint; what it lacks is taken
from the files before the merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType

from mergepipe_pipeline.catalog.segment_files import SegmentFiles
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.pipeline.digests import Known, put_taken, take_segments
from mergepipe_pipeline.pipeline.progress import Progress
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.plan import LayerTask, MergePlan
from mergepipe_pipeline.spec.segments import Segments, segment_elems_for
from mergepipe_pipeline.spec.view import Part, TensorView
from mergepipe_pipeline.storage.checkpoint import open_checkpoint
from mergepipe_pipeline.warehouse import Warehouse


class Inputs:
    """The segments of a plan's sources (`spec.segments.KnownSegments`); a context manager."""

    def __init__(
        self,
        home: Warehouse,
        plan: MergePlan,
        layers: tuple[LayerTask, ...],
        progress: Progress | None = None,
    ) -> None:
        self._home, self._plan = home, plan
        self._elems = segment_elems_for(plan.estimates.block_elems)
        self._stack = ExitStack()
        self._files: dict[str, SegmentFiles] = {}
        views = list(_views(layers))
        needed: dict[int, set[str]] = {}
        for part in (p for view in views for p in _parts(view)):
            needed.setdefault(part.source, set()).add(part.entry.name)
        try:
            for source, names in sorted(needed.items()):
                self._ensure_parts(source, names, progress)
            for view in views:
                if view.runs:
                    self._ensure_view(view)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Inputs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def of_view(self, view: TensorView) -> Segments:
        """Of the view's stored elements, in the view's order. Raises CorruptionError."""
        if not view.runs:
            return self.of_part(view.stored[0])
        digests = self._of(self._view_id(view))[view.name]
        where = self._plan.sources[view.stored[0].source].root
        return Segments(self._elems, digests, where)

    def of_part(self, part: Part) -> Segments:
        """Of one whole stored tensor. Raises CorruptionError."""
        planned = self._plan.sources[part.source]
        digests = self._of(planned.checkpoint_id)[part.entry.name]
        return Segments(self._elems, digests, f"{planned.root}, {part.entry.file}")

    def _of(self, owner_id: str) -> SegmentFiles:
        if owner_id not in self._files:
            files = SegmentFiles(self._home.catalog, owner_id, self._elems)
            self._files[owner_id] = self._stack.enter_context(files)
        return self._files[owner_id]

    def _opened(self, source: int) -> Checkpoint:
        planned = self._plan.sources[source]
        return open_checkpoint(planned.root, planned.name, probes=False)

    def _view_id(self, view: TensorView) -> str:
        parts = [(self._plan.sources[p.source].checkpoint_id, p.entry.name) for p in view.stored]
        return digest_json([parts, [asdict(r) for r in view.runs]])[:24]

    def _ensure_parts(self, source: int, names: Set[str], progress: Progress | None) -> None:
        checkpoint_id = self._plan.sources[source].checkpoint_id
        files = self._of(checkpoint_id)
        if missing := {name for name in names if name not in files}:
            known = Known(checkpoint_id, self._opened(source))
            take_segments(self._home, known, self._elems, missing, progress)
            del self._files[checkpoint_id]

    def _ensure_view(self, view: TensorView) -> None:
        """Take the segments of rows in another order, from tensors that are verified meanwhile."""
        view_id = self._view_id(view)
        if view.name in self._of(view_id):
            return
        from mergepipe_pipeline.analysis.digests import digest_view

        checkpoints = {p.source: self._opened(p.source) for p in view.stored}
        taken = digest_view(view, checkpoints, self._elems, self)
        put_taken(self._home, view_id, {view.name: (taken,)})
        del self._files[view_id]


def _views(layers: tuple[LayerTask, ...]) -> Iterator[TensorView]:
    for task in (task for layer in layers for task in layer.tasks):
        if task.base:
            yield task.base.view
        yield from (e.view for e in task.experts if e.read)


def _parts(view: TensorView) -> Iterator[Part]:
    yield from view.stored
    if view.low_rank:
        yield from (view.low_rank.a, view.low_rank.b)
