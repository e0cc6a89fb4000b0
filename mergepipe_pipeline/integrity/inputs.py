"""The scope *inputs* of `verify`: checkpoints are those that were registered, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from mergepipe_pipeline.catalog.catalog import Catalog
from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import PACKED, Checkpoint
from mergepipe_pipeline.domain.snapshot import Snapshot
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CorruptionError,
    MergePipeError,
)
from mergepipe_pipeline.execution.lookup import provenance_of
from mergepipe_pipeline.facts.offline import present_root
from mergepipe_pipeline.facts.side_file_digests import missing_files, refuse_changed_file
from mergepipe_pipeline.integrity.auditor import Auditor
from mergepipe_pipeline.progress import Advance, Progress
from mergepipe_pipeline.storage.side_files import SideStamp, side_sha256, side_stamps
from mergepipe_pipeline.storage.source import CheckpointSource, open_source
from mergepipe_pipeline.warehouse import Warehouse

#: Name, root, the id that its files had.
_Input = tuple[str, str, str]
_AWAY_NOTE = "in cold storage, and compared as packs and bases give them: "


def verify_inputs(
    warehouse: Warehouse, audit: Auditor, progress: Progress, of: Snapshot | None = None
) -> None:
    """Hash every file of what is registered, or of what a snapshot was merged from.

    What was moved to cold storage is hashed as its pack gives it. Every finding names the file and
    the tensor. Contents that nobody has analysed cannot be compared; they are notes.
    """
    catalog = warehouse.catalog
    recorded = _sources(of) if of else list(_registered(catalog))
    inputs = _where_they_are(warehouse, recorded, audit)
    if of is None:
        inputs = _present(warehouse, inputs, audit)
    contents = [(c, catalog.digests(c.checkpoint_id)) for c in _opened(catalog, inputs, audit)]
    for checkpoint, _ in contents:
        root = _root(checkpoint)
        audit.check("inputs", root, partial(_verify_side_files, warehouse, checkpoint, audit))
    unknown = [c.name for c, digests in contents if digests is None]
    if unknown:
        names = ", ".join(unknown)
        audit.notes.append(f"no content is known of {names}: `mergepipe analyze` finds it")
    analysed = [(c, digests) for c, digests in contents if digests is not None]
    with progress.task("verify inputs", sum(c.nbytes for c, _ in analysed)) as advance:
        for checkpoint, digests in analysed:
            _verify(warehouse, checkpoint, digests, audit, advance)
    _pass_over_returned(inputs, audit)


def _pass_over_returned(inputs: Sequence[_Input], audit: Auditor) -> None:
    """Make notes of those that `unpack` gave their files back while they were read from packs."""
    folders = {name: Path(root.removeprefix(PACKED)) for name, root, _ in inputs if PACKED in root}
    returned = {name: folder for name, folder in folders.items() if not folder.exists()}
    for folder in returned.values():
        audit.withdraw(folder)
    if returned:
        audit.notes.append(f"came back meanwhile, and not compared: {', '.join(returned)}")


def _registered(catalog: Catalog) -> Iterator[_Input]:
    current: dict[str, _Input] = {}
    with suppress(MergePipeError):  # a damaged name is structure's finding
        for name, _, checkpoint_id, _, root in catalog.registrations():
            current[name] = (name, root, checkpoint_id)
    yield from current.values()


def _where_they_are(warehouse: Warehouse, inputs: Sequence[_Input], audit: Auditor) -> list[_Input]:
    """The inputs with their present roots; a note names those in cold storage."""
    present: list[_Input] = []
    for name, root, checkpoint_id in inputs:
        record = warehouse.offline.path(checkpoint_id)
        now = audit.check("inputs", record, partial(present_root, warehouse, checkpoint_id, root))
        if now is not None:
            present.append((name, now, checkpoint_id))
    if moved := dict.fromkeys(name for name, root, _ in present if root.startswith(PACKED)):
        audit.notes.append(_AWAY_NOTE + ", ".join(moved))
    return present


def _present(warehouse: Warehouse, inputs: Sequence[_Input], audit: Auditor) -> list[_Input]:
    """The inputs but those that left the inbox, which anyone may take theirs from."""
    present: list[_Input] = []
    left_inbox: list[str] = []
    for recorded in inputs:
        name, root, _ = recorded
        if Path(root).is_relative_to(warehouse.inbox) and not os.path.lexists(root):
            left_inbox.append(name)
        else:
            present.append(recorded)
    if left_inbox:
        audit.notes.append(
            f"left the inbox, so that no merge of them can be replayed: {', '.join(left_inbox)}"
        )
    return present


def _sources(snapshot: Snapshot) -> list[_Input]:
    sources = provenance_of(snapshot)["sources"]  # pickles that were converted have no id
    return [(s["name"], s["root"], s["checkpoint_id"]) for s in sources if s["checkpoint_id"]]


def _opened(catalog: Catalog, inputs: list[_Input], audit: Auditor) -> Iterator[Checkpoint]:
    """The checkpoints whose files are those that were recorded."""
    for recorded in dict.fromkeys(inputs):
        root = Path(recorded[1].removeprefix(PACKED))
        checkpoint = audit.check("inputs", root, partial(_as_recorded, catalog, *recorded))
        if checkpoint is not None:
            yield checkpoint


def _as_recorded(catalog: Catalog, name: str, root: str, checkpoint_id: str) -> Checkpoint:
    """The checkpoint as it was recorded, if its files have the sizes, times and headers of then."""
    checkpoint = open_checkpoint(root, name)
    if checkpoint.checkpoint_id != checkpoint_id:
        recorded = catalog.checkpoint(checkpoint_id, name, root)
        if recorded is not None and recorded.stamp == checkpoint.stamp:
            return recorded
        raise CheckpointChangedError(
            "An input's files are not those that were recorded",
            where=f"{name}, {root}",
            expected=f"checkpoint {checkpoint_id[:8]}",
            found=f"checkpoint {checkpoint.checkpoint_id[:8]}",
            next_step=f"if the change is meant: `mergepipe register {root} --name {name}`",
        )
    return checkpoint


def _verify(
    warehouse: Warehouse,
    checkpoint: Checkpoint,
    digests: Mapping[str, str],
    audit: Auditor,
    advance: Advance,
) -> None:
    from mergepipe_pipeline.analysis.digests import digest_checkpoint

    root = _root(checkpoint)
    for file in checkpoint.files:
        path = root if root.is_file() else root / file.path
        tensors = tuple(t for t in checkpoint.tensors if t.file == file.path)
        part = replace(checkpoint, tensors=tensors, files=(file,))
        by_tensor = audit.check("inputs", path, partial(digest_checkpoint, part, advance))
        if by_tensor is None:
            continue
        wrong = {t: s for t, (s,) in by_tensor.items() if s.content != digests.get(t)}
        for tensor, segments in wrong.items():
            known = warehouse.catalog.contents(checkpoint.checkpoint_id)
            elements = known.wrong_elements(checkpoint.by_name[tensor], segments)
            place = f"{path}, tensor {tensor}{elements}"
            error = _changed(place, digests.get(tensor), segments.content)
            audit.report("inputs", path, error)
        if not wrong:
            audit.hashed(file.nbytes)


def _root(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint.root.removeprefix(PACKED))


def _verify_side_files(warehouse: Warehouse, checkpoint: Checkpoint, audit: Auditor) -> None:
    """Compare the files beside the weights with what was registered; a file each is a check."""
    root = _root(checkpoint)
    with open_source(checkpoint.root) as source:
        stamps = side_stamps(source, checkpoint.root)
        for stamp in stamps:
            act = partial(_verify_side_file, warehouse, checkpoint, source, stamp)
            audit.check("inputs", root / stamp.file, act)
    for name in missing_files(warehouse, checkpoint.checkpoint_id, (s.file for s in stamps)):
        error = CorruptionError(
            "A file beside an input's weights is missing",
            where=str(root / name),
            expected="the file that was registered",
            found="no such file",
            next_step="copy the file again from where it came; if it is not needed any more: "
            f"`mergepipe register {checkpoint.root} --name {checkpoint.name}`",
        )
        audit.report("inputs", root / name, error)


def _verify_side_file(
    warehouse: Warehouse, checkpoint: Checkpoint, source: CheckpointSource, stamp: SideStamp
) -> None:
    sha256 = side_sha256(source, stamp)
    refuse_changed_file(warehouse, checkpoint.checkpoint_id, checkpoint.root, stamp, sha256)


def _changed(where: str, expected: str | None, found: str) -> CorruptionError:
    return CorruptionError(
        "An input's bytes are not those that were analysed, though size and time are",
        where=where,
        expected=f"blake3 {expected[:16]}" if expected else "no such tensor",
        found=f"blake3 {found[:16]}",
        next_step="copy the file again from where it came; if these bytes are meant, `touch` it "
        "and register it again",
    )
