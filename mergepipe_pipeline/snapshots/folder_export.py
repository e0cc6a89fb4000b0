"""Copies a snapshot out into a plain model folder that its owner may edit.

Every byte is hashed on the way, and an earlier export is compared file by file: what is there after
a success is the snapshot, or nothing is.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from mergepipe_pipeline.checkpoints.open_checkpoint import INDEX
from mergepipe_pipeline.digest import seal, sha256_hex, unseal
from mergepipe_pipeline.domain.snapshot import MANIFEST, PROVENANCE, Snapshot
from mergepipe_pipeline.errors import CorruptionError, MergePipeError
from mergepipe_pipeline.snapshots.find import files_below
from mergepipe_pipeline.snapshots.model_folder import MEASURED, RECIPE_FILE, exported_card
from mergepipe_pipeline.snapshots.out_folder import check_folder, refuse_full, staging_name
from mergepipe_pipeline.snapshots.repack import repack
from mergepipe_pipeline.storage.atomic import (
    copy_file,
    make_dirs,
    publish_dir,
    remove_tree,
    write_atomic,
)
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.locks import locked_there, probed
from mergepipe_pipeline.storage.permissions import make_removable
from mergepipe_pipeline.storage.side_files import CARD
from mergepipe_pipeline.text import listed


@dataclass(frozen=True, slots=True)
class Shards:
    """How an export's weights are cut: files of at most `nbytes`, None for one file."""

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
    path = _present(folder / PROVENANCE)
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
    copy_file(_present(source), target)
    if (digest := file_sha256(target)) != sha256:
        raise CorruptionError(
            "A file of the snapshot is damaged, and nothing was written",
            where=str(source),
            expected=f"sha256 {sha256[:16]}",
            found=f"sha256 {digest[:16]}",
            next_step="merge its recipe again: it is made anew, and the damaged one is set aside",
        )


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
            card = _present(Path(snapshot.path) / CARD).read_bytes()
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


def _present(path: Path) -> Path:
    if not path.is_file():
        raise CorruptionError(
            "A file of the snapshot is missing, and nothing was written",
            where=str(path),
            expected="a file",
            found="none",
            next_step="merge its recipe again: it is made anew, and layers are reused",
        )
    return path


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
                        make_removable(old)
                        remove_tree(old)
            staged.mkdir()
            ours.enter_context(locked_there(staged))
        try:
            yield staged
        finally:
            remove_tree(staged)
