"""The verb `pull-pack`: experts whose packs lie at an address can be merged here, from their tiers.

An expert that comes is one whose files are away, as after `pack --replace`: merges read its tiers,
and `unpack` makes its files. Its base must be here, and be the one that it was packed against.
Whoever made the pack is not believed: all of it is decoded and compared before it gets its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.contents.away_files import refuse_other_base
from mergepipe_pipeline.contents.input_segments import checkpoint_inputs
from mergepipe_pipeline.contents.tensor_digests import ensure_digests
from mergepipe_pipeline.domain.view import view_of
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import (
    CorruptionError,
    MergePipeError,
    NotFoundError,
    PackVersionError,
)
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.packs.bombs import refuse_bombs
from mergepipe_pipeline.packs.compared import refuse_forged
from mergepipe_pipeline.packs.index import damaged_pack, frames_nbytes, read_contents, read_index
from mergepipe_pipeline.packs.replaced import Replaced, put_record
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.packs.travelling import (
    EXPERT,
    PACKS,
    Travelling,
    TravellingFile,
    from_bytes,
    refuse_odd,
)
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.remote.address import parse_address
from mergepipe_pipeline.remote.source import Folder, folder_at
from mergepipe_pipeline.resolution.locate import locate_registered
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.storage.atomic import make_dirs, remove_tree, replace_dir
from mergepipe_pipeline.storage.forms import MAX_NBYTES
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.replace import Original
from mergepipe_pipeline.warehouse import Warehouse

_REST, _FRAMES = ".rest", ".frames"


@dataclass(frozen=True, slots=True)
class PulledPack:
    """An expert that came with its pack: its name and base here, and the bytes that came."""

    name: str
    base: str
    pack_id: str
    nbytes: int
    fresh: bool


def pull_packs(
    warehouse: Warehouse,
    source: str,
    names: Sequence[str] = (),
    *,
    base: str | None = None,
    progress: Progress | None = None,
) -> tuple[PulledPack, ...]:
    """Take the packs at an address, of the named experts or of all, and register their experts.

    `base` is the registered name of their base here, by default the one that it had where they were
    packed. Raises NotFoundError for an expert that has no pack there, CorruptionError for another
    base or what is damaged, MergePipeError for a name that is taken, and RemoteError.
    """
    progress = progress or Silent()
    folder = folder_at(parse_address(source))
    by_name: dict[str, tuple[str, Travelling]] = {}
    for place, travelling in _travelling(folder, source):
        name = travelling.record.name
        if name in by_name and (name in names or not names):
            raise _several(source, name, by_name[name][0], place)
        by_name[name] = place, travelling
    if missing := [name for name in names if name not in by_name] or not by_name:
        raise NotFoundError(
            "There is no such pack at the address",
            where=source,
            expected=", ".join(sorted(by_name))
            or f"{PACKS}/ID/{EXPERT}, as `push --pack` makes it",
            found=", ".join(missing) if isinstance(missing, list) else "none",
            next_step="choose one that is there, or push it with `mergepipe push --pack`",
        )
    chosen = [by_name[name] for name in names or sorted(by_name)]
    return tuple(
        _pulled(warehouse, folder, place, t, source, base or t.record.base, progress)
        for place, t in chosen
    )


def _several(source: str, name: str, *places: str) -> MergePipeError:
    return MergePipeError(
        "Two packs of an expert are at the address, and nothing says which is the newer one",
        where=f"{name}, {source}",
        expected="one",
        found=" and ".join(places),
        next_step="remove the folder of the one that nobody wants there",
    )


def _travelling(folder: Folder, source: str) -> list[tuple[str, Travelling]]:
    """The folders at an address that have packs, and what each tells."""
    travelling = []
    for name in folder.names(PACKS):
        place, _, file = name.rpartition("/")
        if file == EXPERT and (data := folder.read(name, MAX_NBYTES)) is not None:
            travelling.append((place, from_bytes(data, f"{source}/{name}")))
    return travelling


def _pulled(
    warehouse: Warehouse,
    folder: Folder,
    place: str,
    travelling: Travelling,
    source: str,
    base_name: str,
    progress: Progress,
) -> PulledPack:
    record = _record_here(warehouse, travelling.record, base_name, source)
    known = warehouse.replaced.find(record.checkpoint_id)
    done = PulledPack(record.name, record.base, record.pack_id, travelling.nbytes, fresh=False)
    if known is not None and known.name != record.name:
        raise MergePipeError(
            "The expert that is to come is here under another name",
            where=f"{record.name}, {source}",
            expected="an expert that is not here",
            found=known.name,
            next_step=f"merge {known.name}",
        )
    if record.name in warehouse.catalog and known is not None:
        if not warehouse.catalog.has_content(record.name):  # the one before was interrupted
            analyze(warehouse, [record.name], base=record.base, progress=progress)
        return replace(done, nbytes=0)
    need = Need(pack_ids=frozenset([record.pack_id]))
    with warehouse.leases.hold(need, "pull"), staging(warehouse, "pull") as staged:
        with progress.task(f"pull pack of {record.name}", travelling.nbytes) as advance:
            frames = [f for f in travelling.own if f.name.endswith(_FRAMES)]
            others = [f for f in travelling.own if f not in frames]
            pack_root = staged / PACKS / record.pack_id
            _get(folder, place, others, staged, record, advance)
            refuse_bombs(pack_root)
            _refuse_other_base(warehouse, record, staged, progress)
            _refuse_other_frames(pack_root, frames)
            _get(folder, place, frames, staged, record, advance)
        pack = Pack(record.pack_id, pack_root, read_index(pack_root))
        refuse_odd(record, pack)
        _refuse_forged(warehouse, record, pack, progress)
        _keep(warehouse, record, staged, progress)
    # Standing recipes wait for what is known of an expert, and nothing indexes one that is away.
    analyze(warehouse, [record.name], base=record.base, progress=progress)
    return replace(done, fresh=True)


def _record_here(warehouse: Warehouse, record: Replaced, base_name: str, source: str) -> Replaced:
    """The record of an expert that is away from the inbox, where `unpack` would make its files.

    Raises MergePipeError if another checkpoint has its name.
    """
    base: Registration = locate_registered(warehouse, base_name)
    root = warehouse.inbox / record.name
    if record.name in warehouse.catalog:
        registered = warehouse.catalog.get(record.name)
        if registered.checkpoint.checkpoint_id != record.checkpoint_id or root.exists():
            raise MergePipeError(
                "Another checkpoint has the name of the expert that is to come",
                where=f"{record.name}, {registered.checkpoint.root}",
                expected=f"checkpoint {record.checkpoint_id[:16]}, away, or none",
                found=f"checkpoint {registered.checkpoint.checkpoint_id[:16]}",
                next_step="merge that one; or take the pack into another warehouse, with --home",
            )
    return replace(record, root=str(root), cold=source, base=base.name)


def _get(
    folder: Folder,
    place: str,
    files: Sequence[TravellingFile],
    staged: Path,
    record: Replaced,
    advance: Callable[[int], None],
) -> None:
    """Download files to their places in staging. Raises CorruptionError."""
    for file in files:
        path = staged / _place(record, file)
        make_dirs(path.parent)
        name = f"{place}/{file.name}"
        if not folder.download(name, path, file.sha256, file.nbytes, advance):
            raise CorruptionError(
                "A file of a pack is not at the address",
                where=f"{record.cold}, {place}/{file.name}",
                expected=f"{file.nbytes} bytes",
                found="no such file",
                next_step="push the pack again: `mergepipe push --pack`",
            )


def _place(record: Replaced, file: TravellingFile) -> str:
    """Where a file lies in staging; seals cover the names of the folders that it will be in."""
    is_rest = file.name.endswith(_REST)
    return f"rest/{file.name}" if is_rest else f"{PACKS}/{record.pack_id}/{file.name}"


def _keep(warehouse: Warehouse, record: Replaced, staged: Path, progress: Progress) -> None:
    """Give pack and record their places and register the expert; if that fails, nothing stays."""
    rest, added = staged / "rest", warehouse.replaced.path(record.checkpoint_id)
    is_new = warehouse.packs.find(record.pack_id) is None
    if is_new:
        replace_dir(staged / PACKS / record.pack_id, warehouse.packs.path(record.pack_id))
    make_dirs(rest)
    put_record(rest, record, warehouse.roots)
    replace_dir(rest, added)
    try:
        _refuse_other_files(warehouse, record, progress)
        _register(warehouse, record)
    except BaseException:
        warehouse.replaced.forget(record.checkpoint_id)
        if is_new:
            remove_tree(warehouse.packs.path(record.pack_id))
        raise


def _refuse_other_files(warehouse: Warehouse, record: Replaced, progress: Progress) -> None:
    """Raise CorruptionError unless every file of the expert can be made, with its SHA-256.

    The one of a file without packed tensors is its rest's, as `from_bytes` has seen.
    """
    with Original(warehouse, record, progress) as original:
        for number, file in enumerate(record.files):
            if file.tensors:
                original.compare(number)


def _refuse_forged(warehouse: Warehouse, record: Replaced, pack: Pack, progress: Progress) -> None:
    """Raise CorruptionError unless the pack is that of the contents which it names.

    Its id is of these: a local expert of such contents would be merged from it.
    """
    base = locate_registered(warehouse, record.base).checkpoint
    known = checkpoint_inputs(warehouse, [base], progress)
    nbytes = sum(prod(c.shape) * itemsize(c.dtype) for c in pack.contents.values())
    with (
        open_source(base.root) as source,
        progress.task(f"compare pack of {record.name}", nbytes) as advance,
    ):
        reader = BlockReader(source, base, None)
        refuse_forged(
            pack, lambda t: view_of(base.by_name[t.base_name]), lambda _: reader, known, advance
        )


def _refuse_other_base(
    warehouse: Warehouse, record: Replaced, staged: Path, progress: Progress
) -> None:
    base = locate_registered(warehouse, record.base).checkpoint
    digests = ensure_digests(warehouse, base, progress)
    try:
        contents = read_contents(staged / "packs" / record.pack_id)
    except PackVersionError as error:
        error.where = f"{record.name}, {record.cold}"
        error.next_step = "push it again with this release, or pull it with the one that wrote it"
        raise
    for content in contents:
        refuse_other_base(record, base, digests, content.base_name, content.base_digest)
        tensor = base.by_name[content.base_name]
        if (content.dtype, content.shape) != (tensor.dtype, tensor.shape):
            raise damaged_pack(
                staged / PACKS / record.pack_id,
                f"{tensor.dtype} {tensor.shape} of {content.name}, as its base's tensor",
                f"{content.dtype} {content.shape}",
            )


def _refuse_other_frames(root: Path, frames: Sequence[TravellingFile]) -> None:
    """Raise CorruptionError before files of frames come that the index does not account for."""
    said = {file.name: file.nbytes for file in frames}
    expected = frames_nbytes(root)
    if said != expected:
        raise damaged_pack(root, f"frames of {expected} bytes", f"{said}")


def _register(warehouse: Warehouse, record: Replaced) -> None:
    address = warehouse.replaced.address(record.checkpoint_id)
    checkpoint = open_checkpoint(address, record.name)
    if checkpoint.checkpoint_id != record.checkpoint_id:
        raise CorruptionError(
            "What came is not the expert that it is said to be",
            where=f"{record.name}, {record.cold}",
            expected=f"checkpoint {record.checkpoint_id[:16]}",
            found=f"checkpoint {checkpoint.checkpoint_id[:16]}",
            next_step="push the pack again",
        )
    warehouse.catalog.register(replace(checkpoint, root=record.root), record.base)
