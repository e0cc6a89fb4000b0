"""The verb `pull-pack`: experts whose packs lie at an address can be merged here, from their tiers.

The expert's files are made from the pack and its base, which must be here, and be the one that it
was packed against; they are packed here, and then the pack stands for the weights as after `pack
--replace`. So what comes is not believed, and while it comes there must be room for the files.

Up to a rung only directions come, for some thousandths or hundredths of the bytes. What is made of
them is another expert, near to the one that was packed, with a name and contents of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mergepipe_pipeline.checkpoints.open_checkpoint import model_files, open_checkpoint
from mergepipe_pipeline.domain.bounds import NAME, NAME_FORM
from mergepipe_pipeline.domain.checkpoint import Checkpoint
from mergepipe_pipeline.domain.pack import FACTORED, Level, Tier
from mergepipe_pipeline.errors import CorruptionError, MergePipeError, NotFoundError
from mergepipe_pipeline.execution.plan_leases import staging
from mergepipe_pipeline.facts.contents import Contents
from mergepipe_pipeline.facts.pack_source import Near, PackFiles, refuse_other_base
from mergepipe_pipeline.packs.offline import OfflineExpert
from mergepipe_pipeline.packs.portable import (
    BESIDE,
    CHUNKS,
    EXPERT,
    PACKS,
    VECTORS,
    PortableFile,
    PortablePack,
    unfit,
)
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.remote.address import parse_address
from mergepipe_pipeline.remote.source import Folder, folder_at
from mergepipe_pipeline.resolution.locate import locate_registered
from mergepipe_pipeline.storage.atomic import make_dirs, publish_dir
from mergepipe_pipeline.storage.forms import MAX_NBYTES
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.side_files import pieces
from mergepipe_pipeline.storage.source import LocalSource
from mergepipe_pipeline.verbs.pack import pack
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.verbs.replace import replace_weights, write_weights
from mergepipe_pipeline.warehouse import Warehouse


class _Place(NamedTuple):
    """Where a pack lies: in a folder at the address `source`."""

    folder: Folder
    source: str
    name: str


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
    rung: Tier | None = None,
    progress: Progress | None = None,
) -> tuple[PulledPack, ...]:
    """Take the packs at an address, of the named experts or of all, and register their experts.

    `base` is the registered name of their base here, by default the one that it had where they were
    packed. With a `rung`, other experts are made of their directions up to there. Raises
    NotFoundError for an expert that has no pack there, CorruptionError for another base or what is
    damaged, MergePipeError for a name that is taken, and RemoteError. A pack that cannot be read,
    as of another version, keeps no other from being taken.
    """
    progress = progress or Silent()
    folder = folder_at(parse_address(source))
    by_name: dict[str, tuple[str, PortablePack]] = {}
    unreadable: list[CorruptionError] = []
    for place, portable in _portable(folder, source):
        if isinstance(portable, CorruptionError):
            unreadable.append(portable)
            continue
        name = portable.expert.name
        if name in by_name and (name in names or not names):
            raise _several(source, name, by_name[name][0], place)
        by_name[name] = place, portable
    missing = [name for name in names if name not in by_name]
    if missing or not by_name:
        if unreadable:  # which may be of that expert
            raise unreadable[0]
        raise NotFoundError(
            "There is no such pack at the address",
            where=source,
            expected=", ".join(sorted(by_name))
            or f"{PACKS}/ID/{EXPERT}, as `push --pack` makes it",
            found=", ".join(missing) or "none",
            next_step="choose one that is there, or push it with `mergepipe push --pack`",
        )
    chosen = [by_name[name] for name in names or sorted(by_name)]
    pulled = _pulled if rung is None else partial(_made_near, rung=rung)
    done = tuple(
        pulled(warehouse, _Place(folder, source, place), p, base or p.expert.base, progress)
        for place, p in chosen
    )
    if unreadable and not names:
        raise unreadable[0]
    return done


def _several(source: str, name: str, *places: str) -> MergePipeError:
    return MergePipeError(
        "Two packs of an expert are at the address, and nothing says which is the newer one",
        where=f"{name}, {source}",
        expected="one",
        found=" and ".join(places),
        next_step="remove the folder of the one that nobody wants there",
    )


def _portable(folder: Folder, source: str) -> Iterator[tuple[str, PortablePack | CorruptionError]]:
    """The folders at an address that have packs, and what each tells, or why it tells nothing."""
    for name in folder.names(PACKS):
        place, _, file = name.rpartition("/")
        if file == EXPERT and (data := folder.read(name, MAX_NBYTES)) is not None:
            try:
                yield place, PortablePack.from_bytes(data, f"{source}/{name}")
            except CorruptionError as error:
                yield place, error


def _pulled(
    warehouse: Warehouse, place: _Place, portable: PortablePack, base: str, progress: Progress
) -> PulledPack:
    base = locate_registered(warehouse, base).name
    root = warehouse.inbox / portable.expert.name
    expert = replace(portable.expert, root=str(root), cold=place.source, base=base)
    if _is_here(warehouse, expert):
        return PulledPack(expert.name, base, expert.pack_id, nbytes=0, fresh=False)
    with (
        staging(warehouse, "pull") as staged,
        progress.task(f"pull pack of {expert.name}", portable.nbytes_of("X")) as advance,
    ):
        got = _IncomingPack(warehouse, place, portable, expert, staged)
        with got.files_at("X", advance, progress) as source:
            for file in expert.files:
                write_weights(source, file, got.files / file.path, lambda nbytes: None)
        checkpoint = _made(expert, got.files)
        if checkpoint.checkpoint_id != expert.checkpoint_id:
            raise _other_expert(expert, checkpoint)
        if not publish_dir(got.files, root):
            raise _name_taken(expert, str(root), "another folder")
    checkpoint = register(warehouse, root, expert.name, base).checkpoint
    (packed,) = pack(warehouse, [expert.name], base=base, progress=progress)
    replace_weights(warehouse, packed, checkpoint, place.source, progress)
    return PulledPack(expert.name, base, packed.pack_id, portable.nbytes_of("X"), fresh=True)


def _made_near(
    warehouse: Warehouse,
    place: _Place,
    portable: PortablePack,
    base: str,
    progress: Progress,
    *,
    rung: Tier,
) -> PulledPack:
    """Register what the directions of an expert up to a rung make of the base."""
    base = locate_registered(warehouse, base).name
    name, pack_id = f"{portable.expert.name}-{rung}", portable.expert.pack_id
    root = warehouse.inbox / name
    expert = replace(portable.expert, name=name, root=str(root), cold=place.source, base=base)
    if not NAME.fullmatch(name):
        raise _name_taken(expert, str(root), f"{len(name)} characters", NAME_FORM)
    if name in warehouse.catalog and (at := warehouse.catalog.root(name)) != str(root):
        raise _name_taken(expert, at, "another", "none")
    nbytes = portable.nbytes_of(rung)
    with (
        staging(warehouse, "pull") as staged,
        progress.task(f"pull pack of {name}", nbytes) as advance,
    ):
        got = _IncomingPack(warehouse, place, portable, expert, staged)
        with got.files_at(rung, advance, progress) as source:
            for file in expert.files:
                path = got.files / file.path
                make_dirs(path.parent)
                with path.open("xb") as out:
                    out.writelines(pieces(source, file.path, file.nbytes, lambda piece: None))
        _made(expert, got.files)
        fresh = publish_dir(got.files, root)
        if not fresh and not all(_is_equal(f.path, got.files, root) for f in expert.files):
            raise _name_taken(expert, str(root), "other files", "the files that its pack makes")
    register(warehouse, root, name, base)
    return PulledPack(name, base, pack_id, nbytes, fresh)


def _is_equal(path: str, *folders: Path) -> bool:
    files = [folder / path for folder in folders]
    return all(map(Path.is_file, files)) and len({*map(file_sha256, files)}) == 1


@dataclass(frozen=True, slots=True)
class _IncomingPack:
    """A pack that comes into `staged`, and the files that are made of it."""

    warehouse: Warehouse
    place: _Place
    portable: PortablePack
    expert: OfflineExpert
    staged: Path

    @property
    def files(self) -> Path:
        """The folder of the files."""
        return self.staged / "files"

    def files_at(
        self, level: Level, advance: Callable[[int], None], progress: Progress
    ) -> PackFiles:
        """The expert's weight files, as a level gives them, after all that it needs has come.

        Raises CorruptionError for another base, before frames come, or what is damaged.
        """
        portable, pack_root = self.portable, self.staged / "pack"
        _get(self.place, portable.beside_frames(level), self.staged, advance)
        _refuse_other_base(self.warehouse, portable, self.expert, progress)
        tensors = portable.packed((pack_root / CHUNKS).read_bytes(), self.place.source)
        _get(self.place, portable.frames_for(level), self.staged, advance)
        make_dirs(self.files)
        here, near = replace(self.expert, root=str(self.files)), None
        if level in FACTORED:
            near = Near(level, portable.vectors((pack_root / VECTORS).read_bytes()))
        return PackFiles(
            self.warehouse, here, pack_root, pack_root=pack_root, tensors=tensors, near=near
        )


def _is_here(warehouse: Warehouse, expert: OfflineExpert) -> bool:
    """Whether an expert is here under its name, with weights or a pack.

    Raises MergePipeError if another checkpoint has the name, or the expert another one.
    """
    known = warehouse.offline.find(expert.checkpoint_id)
    if known is not None and known.name != expert.name:
        raise MergePipeError(
            "The expert that is to come is here under another name",
            where=f"{expert.name}, {expert.cold}",
            expected="an expert that is not here",
            found=known.name,
            next_step=f"merge {known.name}",
        )
    if expert.name not in warehouse.catalog:
        return False
    checkpoint = warehouse.catalog.get(expert.name).checkpoint
    if checkpoint.checkpoint_id != expert.checkpoint_id:
        found = f"checkpoint {checkpoint.checkpoint_id[:16]}"
        raise _name_taken(expert, checkpoint.root, found)
    return Path(checkpoint.root).exists()


def _name_taken(
    expert: OfflineExpert, root: str, found: str, expected: str | None = None
) -> MergePipeError:
    return MergePipeError(
        "Another checkpoint has the name of the expert that is to come",
        where=f"{expert.name}, {root}",
        expected=expected or f"checkpoint {expert.checkpoint_id[:16]}, or none",
        found=found,
        next_step="merge that one; or take the pack into another warehouse, with --home",
    )


def _get(
    place: _Place, files: Sequence[PortableFile], staged: Path, advance: Callable[[int], None]
) -> None:
    """Download files to their places in staging. Raises CorruptionError."""
    for file in files:
        inside = file.name.removeprefix(f"{BESIDE}/")
        path = staged / ("pack" if inside == file.name else "files") / inside
        make_dirs(path.parent)
        name = f"{place.name}/{file.name}"
        if not place.folder.download(name, path, file.sha256, file.nbytes, advance):
            raise CorruptionError(
                "A file of a pack is not at the address",
                where=f"{place.source}, {name}",
                expected=f"{file.nbytes} bytes",
                found="no such file",
                next_step="push the pack again: `mergepipe push --pack`",
            )


def _refuse_other_base(
    warehouse: Warehouse, portable: PortablePack, expert: OfflineExpert, progress: Progress
) -> None:
    base = locate_registered(warehouse, expert.base).checkpoint
    digests = Contents(warehouse, base, progress).learn()
    for content in portable.tensors:
        refuse_other_base(expert, base, digests, content)


def _other_expert(expert: OfflineExpert, found: Checkpoint) -> CorruptionError:
    return CorruptionError(
        "What came is not the expert that it is said to be",
        where=f"{expert.name}, {expert.cold}",
        expected=f"checkpoint {expert.checkpoint_id[:16]}",
        found=f"checkpoint {found.checkpoint_id[:16]}",
        next_step="push the pack again",
    )


def _made(expert: OfflineExpert, files: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises CorruptionError for files that go with no model."""
    checkpoint = open_checkpoint(str(files), expert.name)
    with LocalSource(files) as source:
        known = model_files(source, checkpoint)
    there = (p.relative_to(files).as_posix() for p in files.rglob("*") if not p.is_dir())
    if others := sorted(set(there).difference(known)):
        raise unfit(expert.cold, f"the file {others[0]!r}, which goes with no model")
    return checkpoint
