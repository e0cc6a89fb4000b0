"""The verb `pack`: write experts' deltas once as tiers, so that merges read a part of the bytes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod

from mergepipe_pipeline.checkpoints.reader import open_reader
from mergepipe_pipeline.deploy.recipe_files import bases_read
from mergepipe_pipeline.domain.model import Model, grid_for
from mergepipe_pipeline.domain.pack import (
    PACKED_DTYPES,
    TIERS_OF,
    X20_DENSITY,
    PackedTensor,
    TensorContent,
    Tier,
)
from mergepipe_pipeline.domain.view import moved
from mergepipe_pipeline.errors import CorruptionError, IncompatibleCheckpointsError, MergePipeError
from mergepipe_pipeline.execution.packing import contents_of, pays_back_after
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.facts.analysed import AnalysedExpert, Sparsified
from mergepipe_pipeline.facts.input_segments import checkpoint_inputs
from mergepipe_pipeline.packs.frame_files import FrameFiles
from mergepipe_pipeline.packs.index import pack_id_of
from mergepipe_pipeline.packs.store import PackStore
from mergepipe_pipeline.packs.writer import Origin, Packing, write_pack
from mergepipe_pipeline.planner.parts import TensorFacts
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.resolution.locate import Places, locate_registered, names_here
from mergepipe_pipeline.resolution.open_models import open_pair
from mergepipe_pipeline.storage.atomic import replace_dir
from mergepipe_pipeline.storage.source import Reading
from mergepipe_pipeline.storage.uncached import fits_page_cache
from mergepipe_pipeline.text import percent
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Packed:
    """An expert's pack: bytes per tier, beside the expert's own.

    `fresh`: it was made now, in `seconds`; `taken_over` of its tensors came from older packs.
    `pays_back_after`: exact merges after which it has saved what packing takes; None if never.
    """

    name: str
    base: str
    pack_id: str
    fresh: bool
    tier_nbytes: Mapping[Tier, int]
    expert_nbytes: int
    tensors: int
    taken_over: int
    seconds: float
    pays_back_after: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tiers."""
        return sum(self.tier_nbytes.values())

    @property
    def summary(self) -> str:
        """Sizes and pay-back in a sentence."""
        sizes = ", ".join(
            f"{tier} {percent(nbytes / self.expert_nbytes)}"
            for tier, nbytes in self.tier_nbytes.items()
        )
        after = f"; pays back after {self.pays_back_after} exact merges"
        return sizes + (after if self.pays_back_after else "")


def pack(
    warehouse: Warehouse,
    names: Sequence[str] = (),
    *,
    base: str | None = None,
    progress: Progress | None = None,
) -> tuple[Packed, ...]:
    """Pack the named experts (default: all with a base); analyses first what is not known.

    A pack that is there is reported and left; tensors that an older pack has are taken over. Raises
    MergePipeError for an expert without tensors to pack, and what opening and reading the
    checkpoints raise.
    """
    if not names:
        based = [n for n in names_here(warehouse) if warehouse.catalog.get(n).base]
        names = with_levels(warehouse, based)
    read = bases_read(warehouse)
    pairs = [_pair(warehouse, name, base, read) for name in names]
    for base_name in dict.fromkeys(b for _, b in pairs):
        analyze(
            warehouse, [n for n, b in pairs if b == base_name], base=base_name, progress=progress
        )
    packed = tuple(_packed(warehouse, *pair, progress or Silent()) for pair in pairs)
    if base is not None:  # it has shown that it is one: later commands need not be told again
        for name, base_name in pairs:
            known = warehouse.catalog.get(name)
            if known.base is None:
                warehouse.catalog.register(known.checkpoint, base_name, is_meant=True)
    return packed


def with_levels(warehouse: Warehouse, names: Iterable[str]) -> list[str]:
    """The registered names with full weights as plain numbers: packs are made of these."""
    known = map(warehouse.catalog.get, names)
    return [r.name for r in known if r.checkpoint.kind == "full" and r.checkpoint.form is None]


def repack(
    warehouse: Warehouse, models: tuple[Model, Model], wanted: Collection[str], progress: Progress
) -> None:
    """Make the pack of an expert against a base, `models`, if its id is `wanted`.

    Analyses first what is not known.
    """
    contents = contents_of(warehouse, *models, progress)
    if pack_id_of(contents) in wanted and warehouse.packs.of(contents) is None:
        packings = _packings(warehouse, *models, contents, progress)
        _make(warehouse, models, packings, progress)


def _pair(
    warehouse: Warehouse, name: str, base: str | None, read: Mapping[str, Collection[str]]
) -> tuple[str, str]:
    """The registered names of an expert and of its base: given, registered, or the only one that
    it is `read` with by standing recipes. Raises MergePipeError without one.
    """
    registration = locate_registered(warehouse, name)
    bases = read.get(registration.name, ())
    base_name = base or registration.base or (next(iter(bases)) if len(bases) == 1 else None)
    if base_name is None:
        raise MergePipeError(
            "An expert is packed against its base, and none is known",
            where=registration.name,
            expected="the base that it was tuned from",
            found="none",
            next_step=f"give it: `mergepipe pack {name} --base BASE`",
        )
    if registration.checkpoint.kind != "full":
        raise IncompatibleCheckpointsError(
            "Adapters and deltas have no pack: they are small already",
            where=f"{registration.name}, {registration.checkpoint.root}",
            expected="a checkpoint with full weights",
            found=f"one of kind {registration.checkpoint.kind}",
            next_step="leave it out",
        )
    base_name = locate_registered(warehouse, base_name).name
    return registration.name, base_name


def _mismatch(expert: Model, base: Model) -> str:
    """Why no tensor of an expert can be packed, by its first one that the base has, too."""
    for name, mine in expert.views.items():
        if name in base.views:
            theirs = base.views[name]
            layouts = (f"{v.dtype} {list(v.shape)}" for v in (mine, theirs))
            return f"{name} of {' against '.join(layouts)}"
    return "no name that both have"


def _packed(warehouse: Warehouse, name: str, base: str, progress: Progress) -> Packed:
    expert, base_model = open_pair(*map(Places(warehouse).locate, (name, base)))
    contents = contents_of(warehouse, expert, base_model, progress)
    if not contents:
        raise IncompatibleCheckpointsError(
            "Nothing of this expert can be packed",
            where=f"{name} against {base}",
            expected=f"tensors of one name, shape and dtype ({', '.join(PACKED_DTYPES)}) in both",
            found=_mismatch(expert, base_model),
            next_step="check that this is its base, or convert it to the base's dtype; without a "
            "pack it is merged from its own files",
        )
    known, taken_over, seconds = warehouse.packs.of(contents), 0, 0.0
    is_fresh = known is None
    if known is None:
        packings = _packings(warehouse, expert, base_model, contents, progress)
        began_s = time.monotonic()
        taken_over = _make(warehouse, (expert, base_model), packings, progress)
        seconds = time.monotonic() - began_s
        known = warehouse.packs.open(pack_id_of(contents))
    views = [expert.views[c.name] for c in contents]
    totals = sum(v.numel for v in views), sum(v.stored_nbytes for v in views)
    exact_nbytes = sum(known.tier_nbytes[tier] for tier in TIERS_OF["X"])
    return Packed(
        name,
        base,
        known.pack_id,
        is_fresh,
        known.tier_nbytes,
        expert.checkpoint.nbytes,
        len(contents),
        taken_over,
        seconds,
        pays_back_after(*totals, exact_nbytes) if is_fresh else None,
    )


def _packings(
    warehouse: Warehouse,
    expert: Model,
    base: Model,
    contents: Sequence[TensorContent],
    progress: Progress,
) -> tuple[Packing, ...]:
    """The tensors of a pack with their units and thresholds; analyses what the catalog lacks.

    These are of whole tensors as the catalog knows them, so a pack does not depend on when or with
    what it was made. Sources of the views are the expert's checkpoints, then the base's.
    """
    grid = grid_for(base, None)
    pairs = [(c.name, c.base_name) for c in contents]
    analysed, tables = AnalysedExpert(warehouse, expert, base, grid, pairs, progress), TensorFacts()
    analysed.complete()
    stats = analysed.stats(without=("sample", "hist"))
    # A trim to the density of X20, which a recipe might ask for as well.
    trimmed = [
        Sparsified(
            place=(content.name, 0),
            pair=(content.name, content.base_name),
            position=0,
            seed=0,
            params=(),
            model_params=(("density", X20_DENSITY),),
            shape=content.shape,
            numel=prod(content.shape),
        )
        for content in contents
    ]
    analysed.add("trim", trimmed, tables, in_full=True)
    return tuple(
        Packing(
            content,
            expert.views[content.name],
            moved(base.views[content.base_name], len(expert.checkpoints)),
            tensor_stats.l2sq,
            tensor_stats.nonzero,
            tables.trims[s.place].threshold_bits,
        )
        for content, s in zip(contents, trimmed, strict=True)
        for tensor_stats in (stats.by_pair[s.pair],)
    )


def _make(
    warehouse: Warehouse,
    models: tuple[Model, Model],
    packings: Sequence[Packing],
    progress: Progress,
) -> int:
    """Write a pack and give it its name; how many tensors were taken over from older ones."""
    final = warehouse.packs.path(pack_id_of([p.content for p in packings]))
    checkpoints = [c for model in models for c in model.checkpoints]
    nbytes = sum(p.expert.stored_nbytes for p in packings)
    with ExitStack() as stack:
        staged = stack.enter_context(staging(warehouse, "pack"))
        advance = stack.enter_context(progress.task(f"pack {models[0].name}", nbytes))
        reading: Reading = "ahead" if fits_page_cache(2 * nbytes) else "once"
        readers = [stack.enter_context(open_reader(c, reading)) for c in checkpoints]
        older = _older(warehouse.packs, packings, stack)
        known = checkpoint_inputs(warehouse, checkpoints, progress)
        origin = Origin(readers.__getitem__, known, older)
        write_pack(staged, final, packings, origin, advance)
        for reader in readers:
            reader.verify_unchanged()
        replace_dir(staged, final)
    return len(older)


def _older(
    store: PackStore, packings: Sequence[Packing], stack: ExitStack
) -> dict[TensorContent, tuple[FrameFiles, PackedTensor]]:
    """The tensors of packs that are there, with their files, by contents; any name will do."""
    older: dict[TensorContent, tuple[FrameFiles, PackedTensor]] = {}
    wanted = {_key(p.content): p for p in packings}
    for known in filter(None, map(store.find, store.ids())):
        names = {_key(c): c.name for c in known.contents.values()}
        if not (shared := wanted.keys() & names.keys()):
            continue
        files = stack.enter_context(FrameFiles(known.root, "once"))
        with suppress(CorruptionError):  # of a damaged pack what is left serves
            for key in shared:
                packing, tensor = wanted[key], known.tensors[names[key]]
                if packing.threshold_bits == tensor.threshold_bits:
                    older[packing.content] = files, tensor
    return older


def _key(content: TensorContent) -> tuple[object, ...]:
    return (content.digest, content.base_digest, content.dtype, content.shape)
