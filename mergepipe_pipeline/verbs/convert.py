"""The verb `convert`: a checkpoint in pickles becomes one in safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from mergepipe_pipeline.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.plan import Source
from mergepipe_pipeline.domain.snapshot import LineageEntry
from mergepipe_pipeline.errors import CheckpointChangedError, CheckpointError
from mergepipe_pipeline.progress import Progress, Silent
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.side_files import side_files
from mergepipe_pipeline.storage.source import CheckpointSource, open_source
from mergepipe_pipeline.tools.convert import convert_files, pickled_files
from mergepipe_pipeline.tools.result import Made, Origin, check_place, drafted
from mergepipe_pipeline.warehouse import Warehouse

VERB = "convert"


def convert(
    warehouse: Warehouse,
    path: str,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Made:
    """Write the weights of a folder or file of pickles as safetensors, config and tokenizer beside.

    The result is the folder `out`, or a snapshot of the warehouse; if it is there, it is left as it
    is. Raises CheckpointError for what is no local path, holds safetensors already, or is not
    weights alone; CheckpointChangedError for a file that changes meanwhile.
    """
    given = Path(path).expanduser().resolve()
    place = None if out is None else check_place(out, warehouse.root, (VERB, given.name))
    _refuse_other(given)
    folder = given if given.is_dir() else given.parent
    progress = progress or Silent()
    with open_source(str(given)) as weights, open_source(str(folder)) as beside:
        files, named = pickled_files(weights, str(given))
        sizes = {file: beside.size(file) for file in files}
        side = dict(side_files(beside, str(folder)))
        if ADAPTER_CONFIG in beside.list():
            side[ADAPTER_CONFIG] = beside.size(ADAPTER_CONFIG)
        copies = {name: beside.read_range(name, 0, nbytes) for name, nbytes in side.items()}
    with drafted(warehouse, VERB, place) as draft:
        draft.side_files |= copies
        with _unchanged(folder, files):
            with progress.task(f"read {folder.name}", sum(sizes.values())) as advance:
                digests = {file: file_sha256(folder / file, advance) for file in files}
            conversion = convert_files(draft, folder, files, named, progress)
        origin = Origin(
            VERB,
            {},
            (LineageEntry("pickled", given.name, digest_json(digests)),),
            (Source(given.name, str(given), "", ""),),
        )
        return draft.finish(origin, {"files": digests, **asdict(conversion)})


@contextmanager
def _unchanged(folder: Path, files: Sequence[str]) -> Iterator[None]:
    """Raise CheckpointChangedError if a file has another size or time when the context ends.

    What is digested and what is converted are two readings.
    """
    with open_source(str(folder)) as source:
        before = {file: _stamp(source, file) for file in files}
        yield
        for file, stamp in before.items():
            if (now := _stamp(source, file)) != stamp:
                raise CheckpointChangedError(
                    "A pickled file changed while it was converted",
                    where=str(folder / file),
                    expected=stamp,
                    found=now,
                    next_step="run the same command again when nothing writes to it",
                )


def _stamp(source: CheckpointSource, file: str) -> str:
    return f"{source.size(file)} bytes, mtime {source.mtime_ns(file)}"


def _refuse_other(given: Path) -> None:
    """Raise CheckpointError for what is not there, or needs no conversion."""
    if not given.exists():
        raise CheckpointError(
            "There is nothing to convert",
            where=str(given),
            expected="a local folder with pickled weights, or one such file",
            found="nothing at this path",
            next_step="check the path; models elsewhere must be downloaded first",
        )
    done = sorted(given.glob("*.safetensors")) if given.is_dir() else []
    if done:
        raise CheckpointError(
            "The folder holds safetensors already",
            where=str(given),
            expected="pickled weights alone",
            found=done[0].name,
            next_step="use the folder as it is, or give the pickled file itself",
        )
