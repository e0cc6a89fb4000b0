"""Copies a snapshot out into a plain model folder that its owner may edit, or to an address.

Whether a folder can take an export is judged before the merge, so that no work is lost. Every byte
is hashed on the way, and an earlier export is compared file by file: what is there after a success
is the snapshot, or nothing is. Weights may be cut into shards of another size.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.open_checkpoint import INDEX, open_checkpoint
from mergepipe_pipeline.checkpoints.reader import BlockReader, open_reader
from mergepipe_pipeline.checkpoints.writer import ShardWriter
from mergepipe_pipeline.digest import seal, sha256_hex, unseal
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.snapshot import (
    MANIFEST,
    PROVENANCE,
    Manifest,
    ShardEntry,
    SideFile,
    Snapshot,
)
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.remote.address import SCHEMES
from mergepipe_pipeline.remote.listing import OutgoingFile
from mergepipe_pipeline.snapshots.commit import present, wrong_bytes
from mergepipe_pipeline.snapshots.find import files_below, read_manifest
from mergepipe_pipeline.snapshots.model_folder import (
    MEASURED,
    RECIPE_FILE,
    exported_card,
    grouped,
    has_own_card,
    index_json,
    shard_name,
)
from mergepipe_pipeline.storage.atomic import (
    copy_file,
    make_dirs,
    publish_dir,
    remove_tree,
    write_atomic,
)
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.locks import locked_there, probed
from mergepipe_pipeline.storage.side_files import CARD, CONFIG
from mergepipe_pipeline.text import listed

#: As long as any name in an exported folder.
_LONGEST_NAME = "model-00000-of-00000.safetensors.index.json"


def staging_name(out: Path, run: str) -> str:
    """The name beside `out` of a folder that becomes it; `run` tells exports apart."""
    return f".{out.name}.{run}.tmp"


def check_out(out: str | Path, warehouse: Path) -> Path:
    """The absolute path of an output folder, `~` expanded, if a folder can be made there.

    Raises MergePipeError for an address, for a folder that cannot be, that is a link or the current
    one, that holds something else, or where one of it and the warehouse would be inside the other.
    Makes nothing.
    """
    if not str(out):
        raise _refused(str(out), "an empty name")
    scheme, is_after, _ = str(out).partition(":/")  # a path keeps one slash of two
    if is_after and scheme in SCHEMES:
        raise _refused(str(out), "an address: `mergepipe push` sends a snapshot there")
    try:
        path = Path(out).expanduser()
        if path.is_symlink():
            raise _refused(str(path), "a link")
        chosen, home = path.resolve(), warehouse.resolve()
        if chosen == Path.cwd():
            raise _refused(str(chosen), "the current folder")
        if chosen.is_relative_to(home) or home.is_relative_to(chosen):
            raise _refused(str(chosen), f"the warehouse at {home}, in it or around it")
        check_folder(chosen)
        _try(chosen)
    except OSError as error:
        raise _refused(str(out), error.strerror or str(error)) from error
    except RuntimeError as error:  # from pathlib, for ~ of a user that is not there, and loops
        raise _refused(str(out), str(error)) from error
    return chosen


def check_folder(out: Path) -> str | None:
    """The id of the snapshot that the folder says it holds; None if it is empty or not there.

    Raises MergePipeError if it holds anything else.
    """
    if not os.path.lexists(out):
        return None
    if out.is_dir() and not out.is_symlink():
        if not any(out.iterdir()):
            return None
        try:
            if (out / MANIFEST).is_file():  # a pipe would keep its reader waiting
                return read_manifest(out).snapshot_id
        except CorruptionError:
            pass
    is_folder = out.is_dir()
    raise MergePipeError(
        "The output folder is not empty"
        if is_folder
        else "Something else is in the output folder's place",
        where=str(out),
        expected="no such folder, an empty one, or one written by mergepipe",
        found="other files" if is_folder else "no folder",
        next_step="choose another --out" + (", or empty the folder" if is_folder else ""),
    )


def refuse_full(out: Path) -> None:
    """Raise MergePipeError for a folder that holds anything, also an earlier export."""
    existing = check_folder(out)
    if existing is not None:
        raise MergePipeError(
            "The output folder holds a result already",
            where=str(out),
            expected="no such folder, or an empty one",
            found=f"snapshot {existing}",
            next_step="choose another --out, or remove the folder",
        )


def _try(out: Path) -> None:
    """Make and remove a folder where the first new one would be. Raises OSError if it cannot be."""
    run = uuid.uuid4().hex[:8]
    (out.parent / staging_name(out, run) / _LONGEST_NAME).exists()  # raises for names too long
    (out / _LONGEST_NAME).exists()
    above = out.parent
    while not above.exists():
        above = above.parent
    for part in out.relative_to(above).parts:
        (above / part).exists()
    probe = above / staging_name(out, run)
    probe.mkdir()
    probe.rmdir()


def _refused(where: str, found: str) -> MergePipeError:
    return MergePipeError(
        "The output folder cannot be there",
        where=f"--out {where}".rstrip(),
        expected="a folder of its own that can be made, outside the warehouse, by no link",
        found=found,
        next_step="choose another --out; nothing was merged",
    )


_SINGLE = "model.safetensors"
_PIECE_ELEMS = 1 << 22


def repack(snapshot: Snapshot, folder: Path, shard_nbytes: int | None) -> Manifest:
    """Write a snapshot's weights to `folder` in shards of at most `shard_nbytes`; None: in one.

    A tensor larger than that has a shard of its own. Returns the manifest of what was written: of
    one file there is no index. Raises CorruptionError for a damaged file, StorageFullError.
    """
    checkpoint = open_checkpoint(snapshot.path, snapshot.snapshot_id[:12], probes=False)
    for shard in snapshot.manifest.shards:
        _refuse_damaged(Path(snapshot.path) / shard.file, shard.sha256)
    groups = grouped(checkpoint.tensors, lambda tensor: tensor.nbytes, shard_nbytes)
    shards = []
    with open_reader(checkpoint) as reader:
        for number, group in enumerate(groups, 1):
            name = _SINGLE if len(groups) == 1 else shard_name(number, len(groups))
            shards.append(_write(reader, group, folder, name))
    sides = [s for s in snapshot.manifest.side_files if s.file != INDEX]
    if len(groups) > 1:
        raw = index_json(shards, checkpoint.nbytes)
        write_atomic(folder / INDEX, raw)
        sides.append(SideFile(INDEX, sha256_hex(raw), len(raw)))
    old = snapshot.manifest
    return Manifest(
        old.plan_id,
        old.method,
        old.inputs,
        old.operators,
        tuple(shards),
        tuple(sorted(sides, key=lambda s: s.file)),
    )


def _write(
    reader: BlockReader, group: Sequence[TensorEntry], folder: Path, name: str
) -> ShardEntry:
    by_name = {t.name: t for t in group}
    described = [(t.name, t.dtype, t.shape) for t in group]
    with ShardWriter(folder / name, described, {"format": "pt"}) as writer:
        for tensor in map(by_name.__getitem__, writer.order):
            size = tensor.nbytes // max(1, tensor.numel)
            for start in range(0, tensor.numel, _PIECE_ELEMS):
                stop = min(tensor.numel, start + _PIECE_ELEMS)
                piece = memoryview(bytearray((stop - start) * size))
                reader.read_into(tensor, start, stop, piece)
                writer.write(piece)
        sha256, nbytes = writer.finish()
    digests = tuple(writer.prefix_digests)
    return ShardEntry(name, name, sha256, sha256, nbytes, digests)


@dataclass(frozen=True, slots=True)
class Shards:
    """The cut of an export's weights: files of at most `nbytes`, None for one file."""

    nbytes: int | None


#: Differences that an error names.
_MOST_NAMED = 5


def export_snapshot(
    snapshot: Snapshot,
    out: Path,
    evaluations: Sequence[Mapping[str, Any]] = (),
    shards: Shards | None = None,
) -> None:
    """Make `out` a copy of the snapshot with the recipe beside it, by one rename at the end.

    `evaluations`, what was measured of it, go to the copy's provenance and card. With `shards` its
    weights lie in files of that size, and the copy has a manifest of its own.
    A folder that holds the same snapshot, whole, is left as it is; one that differs in a file or
    holds anything else is refused with MergePipeError. Raises CorruptionError if a file of the
    snapshot is damaged (then nothing appears at `out`), StorageFullError.
    """
    if shards is None and _is_there(snapshot, out):
        return
    if shards is not None:
        refuse_full(out)
    folder = Path(snapshot.path)
    provenance = exported_provenance(folder, evaluations)
    with staging_beside(out) as staged:
        digests = _digests(snapshot)
        if shards is not None:
            manifest = repack(snapshot, staged, shards.nbytes)
            write_atomic(staged / MANIFEST, seal(manifest.to_json()))
            digests = {s.file: s.sha256 for s in manifest.side_files if s.file != INDEX}
        for name, sha256 in digests.items():
            _copy(folder / name, staged / name, sha256)
        if (card := staged / CARD).is_file():
            write_atomic(card, exported_card(card.read_bytes(), provenance))
        write_atomic(staged / PROVENANCE, seal(provenance))
        write_atomic(staged / RECIPE_FILE, recipe_of(provenance))
        if not publish_dir(staged, out) and shards is None:
            _is_there(snapshot, out)


def _digests(snapshot: Snapshot) -> dict[str, str]:
    """File name to SHA-256 of all that the snapshot's id covers."""
    manifest = snapshot.manifest
    return {
        MANIFEST: sha256_hex(seal(manifest.to_json())),
        **{shard.file: shard.sha256 for shard in manifest.shards},
        **{side.file: side.sha256 for side in manifest.side_files},
    }


def _provenance(folder: Path) -> dict[str, Any]:
    """The folder's provenance. Raises CorruptionError."""
    path = present(folder / PROVENANCE)
    return unseal(path.read_bytes(), str(path))


def exported_provenance(folder: Path, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A snapshot's provenance with what was measured of it. Raises CorruptionError."""
    measured = {MEASURED: list(evaluations)} if evaluations else {}
    return _provenance(folder) | measured


def recipe_of(provenance: Mapping[str, Any]) -> bytes:
    """The recipe's text in a provenance, as a file."""
    return str(provenance.get("recipe", "")).encode()


def _copy(source: Path, target: Path, sha256: str) -> None:
    # The copy is hashed, not the source: the kernel may copy without a byte passing through here.
    make_dirs(target.parent)
    copy_file(present(source), target)
    _refuse_damaged(target, sha256, source)


def _refuse_damaged(path: Path, sha256: str, source: Path | None = None) -> None:
    """Raise CorruptionError if a file, or the copy of a `source`, has another digest."""
    if (digest := file_sha256(path)) != sha256:
        raise wrong_bytes(source or path, sha256, digest)


def _is_there(snapshot: Snapshot, out: Path) -> bool:
    """Whether `out` is the whole snapshot already. Raises MergePipeError if it is something else.

    Provenance is of the run that wrote the folder: its seal counts, and the recipe that it holds.
    """
    existing = check_folder(out)
    if existing is None:
        return False
    if existing != snapshot.snapshot_id:
        raise MergePipeError(
            "The output folder holds another snapshot",
            where=str(out),
            expected=snapshot.snapshot_id,
            found=existing,
            next_step="run the same command with another --out, or remove the folder first: the "
            "merge is kept in the warehouse, and is not made again",
        )
    wrong = list(_differences(snapshot, out))
    if wrong:
        raise MergePipeError(
            "The output folder is not what was exported there",
            where=str(out),
            expected=f"snapshot {snapshot.snapshot_id} unchanged",
            found=listed(wrong, _MOST_NAMED),
            next_step="choose another --out, or remove the folder",
        )
    return True


def _differences(snapshot: Snapshot, out: Path) -> Iterator[str]:
    """Each file that is missing, edited, or not of the snapshot."""
    expected = _digests(snapshot)
    try:
        provenance = _provenance(out)
        expected[RECIPE_FILE] = sha256_hex(recipe_of(provenance))
        if CARD in expected:
            card = present(Path(snapshot.path) / CARD).read_bytes()
            expected[CARD] = sha256_hex(exported_card(card, provenance))
    except CorruptionError:  # then the recipe has nothing to be compared with
        if (out / PROVENANCE).is_file():
            yield f"{PROVENANCE} is edited"
    names = {*expected, PROVENANCE, RECIPE_FILE}
    entries = files_below(out, names)
    for name in sorted(names):
        if name not in entries:
            yield f"{name} is missing"
        elif (out / name).is_symlink() or not (out / name).is_file():
            yield f"{name} is no file of its own"
        elif name in expected and file_sha256(out / name) != expected[name]:
            yield f"{name} is edited"
    yield from (f"{name} is not of it" for name in sorted(entries - names))


@contextmanager
def staging_beside(out: Path) -> Iterator[Path]:
    """A fresh folder beside `out`, gone afterwards; those of killed exports to `out` go first.

    An export that lives holds a lock on its folder, which the system takes from one that is killed.
    """
    make_dirs(out.parent)
    staged = out.parent / staging_name(out, uuid.uuid4().hex[:8])
    with ExitStack() as ours:
        with locked_there(out.parent):  # none is seen between its making and its locking
            for old in out.parent.glob(f"{staging_name(Path(escape(out.name)), '?' * 8)}/"):
                with probed(old) as held:
                    if held is False:
                        remove_tree(old)
            staged.mkdir()
            ours.enter_context(locked_there(staged))
        try:
            yield staged
        finally:
            remove_tree(staged)


#: What readers open first, in the order in which it is made.
FIRST_OPENED = (CONFIG, INDEX)


def outgoing_files(
    snapshot: Snapshot, evaluations: Sequence[Mapping[str, Any]], *, with_provenance: bool
) -> tuple[OutgoingFile, ...]:
    """The manifest, then weights and side files, then what readers open first.

    The card is that of `--out`. Provenance and recipe, which name folders
    of this machine, go only `with_provenance`. Raises CorruptionError.
    """
    files = {file.name: file for file in _files(snapshot, evaluations, with_provenance)}
    last = [files.pop(name) for name in FIRST_OPENED if name in files]
    return (files.pop(MANIFEST), *files.values(), *last)


def files_named(manifest: Manifest) -> list[str]:
    """The files of a pushed snapshot, by its manifest."""
    own = [MANIFEST, PROVENANCE, RECIPE_FILE]
    return [*own, *(s.file for s in manifest.shards), *(f.file for f in manifest.side_files)]


def _files(
    snapshot: Snapshot, evaluations: Sequence[Mapping[str, Any]], with_provenance: bool
) -> Iterator[OutgoingFile]:
    manifest, folder = snapshot.manifest, Path(snapshot.path)
    yield _made(MANIFEST, seal(manifest.to_json()))
    for shard in manifest.shards:
        yield OutgoingFile(shard.file, shard.sha256, shard.nbytes, folder / shard.file)
    provenance = exported_provenance(folder, evaluations)
    for side in manifest.side_files:
        if side.file == CARD and has_own_card(provenance):
            yield _made(CARD, exported_card((folder / CARD).read_bytes(), provenance))
        else:
            yield OutgoingFile(side.file, side.sha256, side.nbytes, folder / side.file)
    if with_provenance:
        yield _made(PROVENANCE, seal(provenance))
        yield _made(RECIPE_FILE, recipe_of(provenance))


def _made(name: str, data: bytes) -> OutgoingFile:
    return OutgoingFile(name, sha256_hex(data), len(data), data)
