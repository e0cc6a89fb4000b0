"""The verb `push --pack`: an expert's pack goes beside a model, with what gives the expert back.

What travels are tier X, those of directions, and what is in no pack of the model's files,
by the list that merges have. Who has the base makes each file from them again, bit for bit, or near
to it from directions alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Registration
from mergepipe_pipeline.checkpoints.open_checkpoint import model_files
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.errors import MergePipeError, NotFoundError
from mergepipe_pipeline.execution.lookup import plan_of
from mergepipe_pipeline.execution.packing import contents_of
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.facts.side_file_digests import refuse_changed_files
from mergepipe_pipeline.integrity.packs import refuse_damaged_frames
from mergepipe_pipeline.packs.contents import packed_as
from mergepipe_pipeline.packs.index import frames_path
from mergepipe_pipeline.packs.offline import OfflineExpert, leftover, sound_leftover, weight_files
from mergepipe_pipeline.packs.portable import (
    BESIDE,
    CHUNKS,
    EXPERT,
    PACKS,
    SENT,
    VECTORS,
    PortableFile,
    PortablePack,
    chunks_of,
    is_vector,
)
from mergepipe_pipeline.packs.store import Pack
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.remote.listing import OutgoingFile
from mergepipe_pipeline.remote.push import Parcel, PushResult, push_parcel
from mergepipe_pipeline.resolution.locate import Places, locate_registered
from mergepipe_pipeline.resolution.open_models import open_pair
from mergepipe_pipeline.snapshots.leases import Need
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.source import open_source
from mergepipe_pipeline.verbs.push import writable
from mergepipe_pipeline.warehouse import Warehouse


def push_pack(
    warehouse: Warehouse,
    name: str,
    to: str,
    *,
    public: bool = False,
    replace: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PushResult:
    """Put the pack of a registered expert, and what else gives it back, below `to`/packs.

    The options are those of `push`. Raises MergePipeError for an expert without a pack,
    CorruptionError, before anything is sent, if the pack is not what was written or the expert's
    files are not what was packed, and as `push`.
    """
    address, progress = writable(to), progress or Silent()
    registration = locate_registered(warehouse, name)
    pack = _pack_of(warehouse, registration, progress)
    with (
        warehouse.leases.hold(Need(pack_ids=frozenset([pack.pack_id])), "push"),
        _expert_of(warehouse, registration, pack, progress) as (expert, folder),
    ):
        files = list(_outgoing_files(registration.checkpoint, expert, pack, folder))
        names = [PortableFile(f.name, f.nbytes, f.sha256) for f in files]
        contents, units = tuple(pack.contents.values()), tuple(row.unit for row in pack.rows)
        claim = _of_bytes(EXPERT, PortablePack(expert, contents, units, tuple(names)).to_bytes())
        parcel = Parcel(
            (claim, *files),
            f"Push the pack of {name} by MergePipe",
            (EXPERT,),
            PACKS,
            folder=f"{PACKS}/{pack.pack_id}",
        )
        total = 0 if dry_run else parcel.nbytes
        with progress.task(f"push pack of {name}", total) as advance:
            options = {"public": public, "replace": replace, "dry_run": dry_run}
            return push_parcel(address, parcel, **options, advance=advance)


def packed_experts(warehouse: Warehouse, what: str, progress: Progress) -> list[str]:
    """The experts of a snapshot's plan that have packs which can be pushed; warns of others.

    Raises NotFoundError where the plan is not here.
    """
    plan, packed = plan_of(warehouse, what), []
    for role, source in zip(plan.roles, plan.sources, strict=True):
        if role != "expert":
            continue
        try:
            registration = locate_registered(warehouse, source.name)
            _refuse_other_version(warehouse, registration, source.checkpoint_id)
            if registration.checkpoint.kind == "full":  # of adapters and deltas there are no packs
                _pack_of(warehouse, registration, progress)
                packed.append(source.name)
        except MergePipeError as error:
            progress.warn(f"the pack of an expert is not sent: {error}")
    return packed


def _refuse_other_version(
    warehouse: Warehouse, registration: Registration, checkpoint_id: str
) -> None:
    """Raise NotFoundError if what has a name now has other contents than what was merged.

    Also where nobody knows the contents of both.
    """
    content_of, now = warehouse.catalog.content_sha256, registration.checkpoint.checkpoint_id
    if now != checkpoint_id and content_of(now) != content_of(checkpoint_id):
        raise NotFoundError(
            "What has the name of an expert now is not what was merged",
            where=registration.name,
            expected=f"checkpoint {checkpoint_id[:16]}",
            found=f"checkpoint {now[:16]}, version {registration.version}",
            next_step="register what was merged once more, under this name or in another warehouse",
        )


def _pack_of(warehouse: Warehouse, registration: Registration, progress: Progress) -> Pack:
    """The pack that gives an expert back. Raises MergePipeError if there is none."""
    record = warehouse.offline.find(registration.checkpoint.checkpoint_id)
    if registration.checkpoint.is_offline and record is not None:
        return warehouse.packs.open(record.pack_id)
    pack = None
    if registration.base is not None and registration.checkpoint.kind == "full":
        base = Places(warehouse).locate(registration.base)
        models = open_pair(registration.checkpoint, base)
        pack = warehouse.packs.of(contents_of(warehouse, *models, progress))
    if pack is None:
        raise MergePipeError(
            "An expert has no pack",
            where=registration.name,
            expected="a pack, which gives it back",
            found="none",
            next_step=f"make it: `mergepipe pack {registration.name}`",
        )
    return pack


@contextmanager
def _expert_of(
    warehouse: Warehouse, registration: Registration, pack: Pack, progress: Progress
) -> Iterator[tuple[OfflineExpert, Path]]:
    """An expert as if it were offline, and the folder with its leftovers, for a while.

    Raises CorruptionError for a pack or a file that is not what was packed.
    """
    refuse_damaged_frames(pack, progress)
    checkpoint, store = registration.checkpoint, warehouse.offline
    known = store.find(checkpoint.checkpoint_id)
    if checkpoint.is_offline and known is not None:
        folder = store.path(checkpoint.checkpoint_id)
        for number, _ in enumerate(known.files):
            sound_leftover(folder, known, number)
        yield known, folder
        return
    if "://" in checkpoint.root or registration.base is None:
        raise MergePipeError(
            "A pack is pushed with the files of its expert, and these are not here",
            where=registration.name,
            expected="a folder on this machine",
            found=checkpoint.root,
            next_step="download the expert, and pack it here",
        )
    refuse_changed_files(warehouse, checkpoint)
    Contents(warehouse, checkpoint, progress).verify_tensors()
    with staging(warehouse, "push") as staged:
        digests = warehouse.catalog.digests(checkpoint.checkpoint_id) or {}
        expert = OfflineExpert(
            checkpoint.checkpoint_id,
            registration.name,
            checkpoint.root,
            "",
            registration.base,
            pack.pack_id,
            weight_files(checkpoint, packed_as(pack.contents.values(), digests), staged),
        )
        yield expert, staged


def _outgoing_files(
    checkpoint: Checkpoint, expert: OfflineExpert, pack: Pack, folder: Path
) -> Iterator[OutgoingFile]:
    """All files of a portable pack but the one that describes it."""
    yield _of_bytes(CHUNKS, chunks_of([pack.tensors[name] for name in pack.contents]))
    vectors = [t.digest for t in pack.contents.values() if is_vector(t)]
    places = {
        pack.contents[tensor].digest: (file.path, start_byte, nbytes)
        for file in expert.files
        for tensor, start_byte, nbytes in file.tensors
    }
    with open_source(checkpoint.root) as source:
        stored = b"".join(source.read_range(*places[digest]) for digest in vectors)
    yield _of_bytes(VECTORS, stored)
    for path in (
        *(frames_path(pack.root, tier) for tier in SENT),
        *(leftover(folder, number) for number, _ in enumerate(expert.files)),
    ):
        yield _outgoing(path, path.name)
    with open_source(checkpoint.root) as source:
        weights = {file.path for file in expert.files}
        for name in model_files(source, checkpoint):
            if name not in weights:
                yield _outgoing(Path(expert.root) / name, f"{BESIDE}/{name}")


def _of_bytes(name: str, data: bytes) -> OutgoingFile:
    return OutgoingFile(name, sha256_hex(data), len(data), data)


def _outgoing(path: Path, name: str) -> OutgoingFile:
    return OutgoingFile(name, file_sha256(path), path.stat().st_size, path)
