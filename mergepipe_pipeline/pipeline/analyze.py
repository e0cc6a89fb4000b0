"""The verb `analyze`: one streaming pass per expert and base, remembered for later merges.

`ensure_*` do only what the catalog does not know yet; planning calls them, so a recipe over unknown
checkpoints works in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import MergePipeError, RecipeError
from mergepipe_pipeline.pipeline.models import open_models
from mergepipe_pipeline.pipeline.progress import Progress, Silent
from mergepipe_pipeline.pipeline.register import resolve
from mergepipe_pipeline.spec.blocks import BlockGrid
from mergepipe_pipeline.spec.checkpoint import Checkpoint
from mergepipe_pipeline.spec.model import Model
from mergepipe_pipeline.spec.recipe import ModelRef
from mergepipe_pipeline.spec.stats import ExpertStats
from mergepipe_pipeline.warehouse import Warehouse

#: (expert's tensor, base's tensor).
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Analysis:
    """What `analyze` did for one checkpoint; `norm` is ‖δ‖₂ over the whole checkpoint."""

    name: str
    base: str | None
    content_sha256: str
    fresh: bool
    norm: float | None
    zero_blocks: int
    blocks: int


def analyze(
    home: Warehouse,
    names: Sequence[str] = (),
    *,
    base: str | None = None,
    block_elems: int | None = None,
    progress: Progress | None = None,
) -> tuple[Analysis, ...]:
    """Analyse the named checkpoints (default: all that have a base) against their bases.

    Without a base only the tensors' digests are taken. Raises what opening the checkpoints raises.
    """
    catalog = Catalog(home.catalog)
    out = []
    for name in names or catalog.names():
        registration = resolve(home, name)
        checkpoint = registration.checkpoint
        base_name = base or registration.base
        fresh = catalog.digests(checkpoint.checkpoint_id) is None
        if base_name is None:
            ensure_digests(home, checkpoint, progress)
            content = catalog.content_sha256(checkpoint.checkpoint_id)
            out.append(Analysis(registration.name, None, content, fresh, None, 0, 0))
            continue
        against = resolve(home, base_name)
        expert, below = open_pair(home, registration.name, against.name)
        pairs = common_pairs(expert, below)
        grid = grid_for(below, block_elems)
        fresh = bool(missing_pairs(home, expert, below, pairs, grid)) or fresh
        stats = ensure_stats(home, expert, below, pairs, grid, progress)
        ensure_digests(home, checkpoint, progress)
        out.append(
            Analysis(
                registration.name,
                against.name,
                catalog.content_sha256(checkpoint.checkpoint_id),
                fresh,
                sum(t.l2sq for t in stats.tensors) ** 0.5,
                sum(int((t.block_nonzero == 0).sum()) for t in stats.tensors),
                sum(len(t.block_nonzero) for t in stats.tensors),
            )
        )
    return tuple(out)


def open_pair(home: Warehouse, expert: str, base: str) -> tuple[Model, Model]:
    """Two registered checkpoints as models, the first on the second. Raises as opening does."""
    problems: list[MergePipeError] = []
    references = [ModelRef(expert, expert), ModelRef(base, base)]
    models = open_models(home, references, 1, None, {}, problems)
    if problems:
        raise problems[0]
    return models[0], models[1]


def common_pairs(expert: Model, base: Model) -> list[Pair]:
    """The tensors that both have with equal shape and floating dtypes, in the base's order."""
    return [
        (name, name)
        for name, theirs in base.views.items()
        if (mine := expert.views.get(name)) is not None
        and mine.shape == theirs.shape
        and mine.dtype in FLOATING
        and theirs.dtype in FLOATING
    ]


def grid_for(base: Model, block_elems: int | None) -> BlockGrid:
    """The block grid of a base: as asked for, or from the model's size. Raises RecipeError."""
    if block_elems is not None:
        try:
            return BlockGrid(block_elems)
        except ValueError as error:
            raise RecipeError(
                "A block size cannot be used",
                where="block size",
                expected=str(error).removeprefix("block_elems must be "),
                found=str(block_elems),
                next_step="leave it out for a size that fits the model",
            ) from None
    return BlockGrid.for_numel(sum(v.numel for v in base.views.values()))


def ensure_digests(
    home: Warehouse, checkpoint: Checkpoint, progress: Progress | None = None
) -> Mapping[str, str]:
    """SHA-256 of every tensor of a checkpoint, from the catalog or by one pass over it."""
    catalog = Catalog(home.catalog)
    known = catalog.digests(checkpoint.checkpoint_id)
    if known is not None:
        return known
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    with (progress or Silent()).task(f"digest {checkpoint.name}", checkpoint.nbytes) as advance:
        digests = digest_checkpoint(checkpoint, advance)
    catalog.put_digests(checkpoint.checkpoint_id, digests)
    return digests


def missing_pairs(
    home: Warehouse, expert: Model, base: Model, pairs: Sequence[Pair], grid: BlockGrid
) -> list[Pair]:
    """Those of `pairs` (expert's tensor, base's tensor) that have no statistics yet."""
    known = Catalog(home.catalog).stats(base.model_id, expert.model_id, grid.block_elems)
    return [pair for pair in pairs if known is None or pair not in known.by_pair]


def ensure_stats(
    home: Warehouse,
    expert: Model,
    base: Model,
    pairs: Sequence[Pair],
    grid: BlockGrid,
    progress: Progress | None = None,
) -> ExpertStats:
    """Statistics of an expert's tensors against a base's, from the catalog or by one pass.

    The pass also yields the digests of checkpoints of which it sees every tensor.
    """
    catalog = Catalog(home.catalog)
    missing = missing_pairs(home, expert, base, pairs, grid)
    if missing:
        from mergepipe_pipeline.analysis.statistics import analyze_expert

        nbytes = sum(expert.views[mine].stored_nbytes for mine, _ in missing)
        with (progress or Silent()).task(f"analyze {expert.name}", nbytes) as advance:
            stats = analyze_expert(expert, base, missing, grid, progress=advance)
        catalog.put_stats(stats)
        _put_digests(catalog, expert, {t.tensor: t.sha256 for t in stats.tensors})
        _put_digests(catalog, base, {t.base_tensor: t.base_sha256 for t in stats.tensors})
    found = catalog.stats(base.model_id, expert.model_id, grid.block_elems)
    return found or ExpertStats(base.model_id, expert.model_id, grid.block_elems, ())


def _put_digests(catalog: Catalog, model: Model, found: Mapping[str, str]) -> None:
    """Remember digests if they are those of all tensors of a model's one checkpoint."""
    known = {name: sha256 for name, sha256 in found.items() if sha256}
    (checkpoint, *others) = model.checkpoints
    if not others and known.keys() == checkpoint.by_name.keys():
        catalog.put_digests(checkpoint.checkpoint_id, known)
