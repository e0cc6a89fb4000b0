"""The verb `analyze`: one streaming pass per expert and base, remembered for later merges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.model import grid_for
from mergepipe_pipeline.facts.analysed import AnalysedExpert, common_pairs
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.facts.passes import complete
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.resolution.locate import locate_registered, names_here
from mergepipe_pipeline.resolution.open_models import open_pair
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Analysis:
    """The analysis of one checkpoint; `norm` is ‖δ‖₂ over the whole checkpoint."""

    name: str
    base: str | None
    content_sha256: str
    fresh: bool
    norm: float | None
    zero_blocks: int
    blocks: int


def analyze(
    warehouse: Warehouse,
    names: Sequence[str] = (),
    *,
    base: str | None = None,
    block_elems: int | None = None,
    progress: Progress | None = None,
) -> tuple[Analysis, ...]:
    """Analyse the named checkpoints (default: all that are here) against their bases.

    Without a base only the tensors' digests are taken. Raises what opening the checkpoints raises.
    """
    out: dict[str, Analysis] = {}
    bases: dict[str, Checkpoint] = {}
    by_base: dict[str, list[Checkpoint]] = {}
    for name in names or names_here(warehouse):
        registration = locate_registered(warehouse, name)
        base_name = base or registration.base
        if base_name is None:
            out[registration.name] = _digested(warehouse, registration, progress)
            continue
        if base_name not in bases:
            bases[base_name] = locate_registered(warehouse, base_name).checkpoint
        by_base.setdefault(base_name, []).append(registration.checkpoint)
    for base_name, members in by_base.items():
        for analysis in _against(warehouse, members, bases[base_name], block_elems, progress):
            out[analysis.name] = analysis
    return tuple(out.values())


def _digested(
    warehouse: Warehouse, registration: Registration, progress: Progress | None
) -> Analysis:
    catalog, checkpoint = warehouse.catalog, registration.checkpoint
    fresh = catalog.digests(checkpoint.checkpoint_id) is None
    Contents(warehouse, checkpoint, progress).learn()
    content = catalog.content_sha256(checkpoint.checkpoint_id)
    return Analysis(registration.name, None, content, fresh, None, 0, 0)


def _against(
    warehouse: Warehouse,
    experts: Sequence[Checkpoint],
    base: Checkpoint,
    block_elems: int | None,
    progress: Progress | None,
) -> Iterator[Analysis]:
    catalog = warehouse.catalog
    analysed: list[AnalysedExpert] = []
    fresh = []
    for checkpoint in experts:
        expert, base_model = open_pair(checkpoint, base)
        pairs, grid = common_pairs(expert, base_model), grid_for(base_model, block_elems)
        analysed.append(AnalysedExpert(warehouse, expert, base_model, grid, pairs, progress))
        new = catalog.digests(expert.checkpoint.checkpoint_id) is None
        fresh.append(new or bool(analysed[-1].missing()))
    complete(analysed)
    for number, e in enumerate(analysed):
        Contents(warehouse, e.expert.checkpoint, progress).learn()
        stats = e.stats(without=("sample", "hist"))
        yield Analysis(
            experts[number].name,
            base.name,
            catalog.content_sha256(e.expert.checkpoint.checkpoint_id),
            fresh[number],
            sum(t.l2sq for t in stats.tensors) ** 0.5,
            sum(int((t.block_nonzero == 0).sum()) for t in stats.tensors),
            sum(len(t.block_nonzero) for t in stats.tensors),
        )
