"""What inputs are compared with while they are read: the segments of all that is read.

The catalog has them from the pass that analysed or digested a checkpoint; what it lacks is taken
from the files first. A merge asks for segments that its plan's blocks are made of, planning reads
whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from threading import RLock

from mergepipe_pipeline.catalog.contents import SegmentFiles, refuse_changed
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import Model, view_digest
from mergepipe_pipeline.domain.plan import LayerTask, MergePlan, Source
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, Segments, segment_elems_for
from mergepipe_pipeline.domain.view import Part, TensorView, parts_of, sources_of, view_of_part
from mergepipe_pipeline.errors import CorruptionError
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.warehouse import Warehouse


def plan_inputs(warehouse: Warehouse, plan: MergePlan, layers: Sequence[LayerTask]) -> Inputs:
    """The inputs of some layers of a plan.

    Raises CorruptionError if what the catalog knows is not what the plan was made from.
    """
    catalog, views = warehouse.catalog, list(_views(layers))
    numbers = {p.source for view, _ in views for p in parts_of(view)}
    digests = [
        catalog.digests(s.checkpoint_id)
        or Contents(warehouse, open_checkpoint(s.root, s.name)).learn()
        if i in numbers
        else {}
        for i, s in enumerate(plan.sources)
    ]
    for view, digest in views:
        content = view_digest(view, digests)
        if content != digest:
            raise CorruptionError(
                "What is known of a tensor is not what the plan was made from",
                where=f"{plan.sources[min(sources_of(view))].root}, tensor {view.name}",
                expected=f"content {digest[:16]}",
                found=f"content {content[:16]}",
                next_step="copy the file again if it is damaged; then run the same command again: "
                "it plans anew",
            )
    inputs = Inputs(warehouse, plan.sources, segment_elems_for(plan.estimates.block_elems))
    inputs.ensure(view for view, _ in views)
    return inputs


def checkpoint_inputs(
    warehouse: Warehouse, checkpoints: Sequence[Checkpoint], progress: Progress | None = None
) -> Inputs:
    """The segments of checkpoints that planning reads; takes missing digests first."""
    for checkpoint in checkpoints:
        Contents(warehouse, checkpoint, progress).learn()
    return _coarse(warehouse, checkpoints)


def pass_inputs(
    warehouse: Warehouse, models: Sequence[Model], progress: Progress | None = None
) -> Inputs:
    """The segments of models that an analysis reads, which takes the digests of whole tensors.

    Missing digests of other parts (of adapters and deltas, rows in another order) are taken first.
    Raises CorruptionError as `Contents.verify`.
    """
    for model in models:
        in_parts = [v for v in model.views.values() if not v.whole]
        for number in sorted({p.source for view in in_parts for p in parts_of(view)}):
            Contents(warehouse, model.checkpoints[number], progress).learn()
    return _coarse(warehouse, [c for model in models for c in model.checkpoints])


def _coarse(warehouse: Warehouse, checkpoints: Sequence[Checkpoint]) -> Inputs:
    sources = [Source(c.name, c.root, c.checkpoint_id, c.stamp) for c in checkpoints]
    return Inputs(warehouse, sources, COARSE_ELEMS)


class Inputs:
    """The segments of checkpoints by number (`domain.segments.KnownSegments`). Safe for threads.

    Raises CorruptionError for what is not as it was analysed.
    """

    def __init__(self, warehouse: Warehouse, sources: Sequence[Source], segment_elems: int) -> None:
        self._warehouse, self._sources, self._elems = warehouse, sources, segment_elems
        self._files: dict[str, SegmentFiles] = {}
        self._lock = RLock()  # taking segments asks for others, which verify the read

    def ensure(self, views: Iterable[TensorView]) -> None:
        """Make the catalog have the segments of all that views read."""
        needed: dict[int, set[str]] = {}
        made = []
        for view in views:
            for part in parts_of(view):
                needed.setdefault(part.source, set()).add(part.entry.name)
            made += [view] if view.stored and view.is_made else []
        for source, names in sorted(needed.items()):
            self._ensure_parts(source, names)
        self._ensure_views(made)

    def of_view(self, view: TensorView) -> Segments:
        """The segments of the view's stored elements, in the view's order."""
        if not view.is_made:
            return self.of_part(view.stored[0])
        with self._lock:
            self._ensure_views([view])
            owner, name = self._place(view)
            digests = self._of(owner)[name]
        return Segments(self._elems, digests, self._sources[view.stored[0].source].root)

    def of_part(self, part: Part) -> Segments:
        """The segments of all values of a part."""
        if part.codes:
            return self.of_view(view_of_part(part, part.entry.name))
        source = self._sources[part.source]
        with self._lock:
            self._ensure_parts(part.source, {part.entry.name})
            digests = self._of(source.checkpoint_id)[part.entry.name]
        return Segments(self._elems, digests, f"{source.root}, {part.entry.file}")

    def _of(self, owner_id: str) -> SegmentFiles:
        if owner_id not in self._files:
            contents = self._warehouse.catalog.contents(owner_id)
            self._files[owner_id] = contents.segments(self._elems)
        return self._files[owner_id]

    def _opened(self, number: int) -> Checkpoint:
        source = self._sources[number]
        return open_checkpoint(source.root, source.name, probes=False)

    def _place(self, view: TensorView) -> tuple[str, str]:
        return made_place(view, [s.checkpoint_id for s in self._sources])

    def _ensure_parts(self, number: int, names: Set[str]) -> None:
        checkpoint_id = self._sources[number].checkpoint_id
        known = self._of(checkpoint_id)
        missing = {name for name in names if name not in known}
        if not missing:
            return
        from mergepipe_pipeline.analysis.digests import digest_checkpoint

        opened = self._opened(number)
        levels = tuple(dict.fromkeys((COARSE_ELEMS, self._elems)))
        taken = digest_checkpoint(opened, levels=levels, names=missing)
        files = self._warehouse.catalog.contents(checkpoint_id)
        digests = files.known()
        for name, (segments, *_) in taken.items():
            refuse_changed(digests, opened, name, segments.content)
        files.put(taken)
        del self._files[checkpoint_id]

    def _ensure_views(self, views: Iterable[TensorView]) -> None:
        """Take the segments of what is made, from tensors that are verified meanwhile."""
        missing: dict[str, dict[str, TensorView]] = {}
        for view in views:
            owner, name = self._place(view)
            if name not in self._of(owner):
                missing.setdefault(owner, {})[name] = view
        for owner, by_name in missing.items():
            taken = {name: (self._taken(view),) for name, view in by_name.items()}
            self._warehouse.catalog.contents(owner).put_made(taken)
            del self._files[owner]

    def _taken(self, view: TensorView) -> Segments:
        from mergepipe_pipeline.analysis.digests import digest_view

        checkpoints = {p.source: self._opened(p.source) for p in view.stored}
        return digest_view(view, checkpoints, self._elems, self)


def made_place(view: TensorView, checkpoint_ids: Sequence[str]) -> tuple[str, str]:
    """Where the catalog has the segments of a view that is made: an owner's id, and a name.

    `checkpoint_ids` are by source number.
    """
    parts = [
        (checkpoint_ids[p.source], p.entry.name, *(p.codes.rule if p.codes else ()))
        for p in view.stored
    ]
    owner = digest_json(["views", checkpoint_ids[view.stored[0].source]])[:24]
    return owner, digest_json([parts, [asdict(r) for r in view.runs]])[:24]


def _views(layers: Iterable[LayerTask]) -> Iterator[tuple[TensorView, str]]:
    """Yield the views that layers read, with the digests that the plan names."""
    for task in (task for layer in layers for task in layer.tasks):
        if task.base:
            yield task.base.view, task.base.digest
        yield from ((e.view, e.digest) for e in task.experts if e.read)
