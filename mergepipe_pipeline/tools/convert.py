"""Pickled checkpoints as safetensors: a child process reads them, and nothing of them is run.

The parent takes nothing from the child but names, types, shapes and bytes, each within bounds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from threading import Timer
from typing import IO, Any

from mergepipe_pipeline.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from mergepipe_pipeline.checkpoints.header import Described
from mergepipe_pipeline.checkpoints.open_checkpoint import ADAPTER_WEIGHTS
from mergepipe_pipeline.digest import digest_json
from mergepipe_pipeline.domain.layers import is_post, tied_partner
from mergepipe_pipeline.domain.plan import Source
from mergepipe_pipeline.domain.snapshot import LineageEntry
from mergepipe_pipeline.dtypes import ITEMSIZE, TORCH_NAME
from mergepipe_pipeline.errors import (
    CheckpointChangedError,
    CheckpointError,
    IncompleteCheckpointError,
)
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.snapshots.model_folder import shard_name
from mergepipe_pipeline.storage.hashing import file_sha256
from mergepipe_pipeline.storage.json_text import load_object
from mergepipe_pipeline.storage.regular import text_of, too_large
from mergepipe_pipeline.storage.side_files import CONFIG, MAX_JSON_NBYTES, side_files
from mergepipe_pipeline.storage.source import CheckpointSource, open_source
from mergepipe_pipeline.tools.result import Draft, Made, Origin, check_place, drafted
from mergepipe_pipeline.warehouse import Warehouse

_CODE = {name: code for code, name in TORCH_NAME.items()}
_SCRIPT = Path(__file__).with_name("unpickle.py")
_INDEX = "pytorch_model.bin.index.json"
#: The usual names of weights, the first that is there counts.
_WHOLE = ("pytorch_model.bin", "adapter_model.bin")
_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: What trainers write beside the weights.
_OTHERS = re.compile(r"(training_args|optimizer|scheduler|scaler|random_states|rng_state).*")
#: Tensors that share memory are written each; more bytes than this times the file's are a bomb.
_MOST_TIMES = 4
_SPARE_NBYTES = 16 << 20
#: A child may read so slowly, in bytes per second, after so many seconds for its start.
_SLOWEST, _START_S = 5_000_000, 120
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


@dataclass(frozen=True, slots=True)
class Pickled:
    """One weight file that a child has open: its tensors, and what it holds beside them.

    `shared` are tensors with the memory of another: name to that one's name.
    """

    tensors: tuple[Described, ...]
    shared: dict[str, str]
    left_out: tuple[str, ...]
    _child: subprocess.Popen[bytes]
    _path: Path
    _numbers: dict[str, int]

    def read(self, name: str) -> bytes:
        """The little-endian bytes of a tensor. Raises CheckpointError if the child dies."""
        number = self._numbers[name]
        _, dtype, shape = self.tensors[number]
        nbytes = prod(shape) * ITEMSIZE[dtype]
        try:
            assert self._child.stdin is not None
            self._child.stdin.write(b"%d\n" % number)
            self._child.stdin.flush()
            data = _stdout(self._child).read(nbytes)
        except BrokenPipeError:
            data = b""
        if len(data) != nbytes:
            raise _ended(self._path, self._child)
        return data


def pickled_files(source: CheckpointSource, uri: str) -> tuple[list[str], frozenset[str]]:
    """The pickled weight files of a folder, or the one given, and the tensors that an index names.

    Raises CheckpointError if there are none, or several that no index puts together.
    """
    present = source.list()
    if _INDEX in present:
        nbytes = source.size(_INDEX)
        if nbytes > MAX_JSON_NBYTES:
            raise too_large(f"{uri}, {_INDEX}", MAX_JSON_NBYTES, nbytes)
        text = source.read_range(_INDEX, 0, nbytes).decode(errors="replace")
        weight_map = load_object(text, f"{uri}, {_INDEX}", "A shard index").get("weight_map")
        if isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values()):
            return sorted(set(weight_map.values())), frozenset(weight_map)
    whole = [f for f in _WHOLE if f in present]
    if whole:
        return whole[:1], frozenset()
    candidates = [f for f in present if f.endswith(_SUFFIXES) and not _OTHERS.match(f)]
    if len(candidates) == 1:
        return candidates, frozenset()
    raise CheckpointError(
        "Which pickled weights are meant cannot be told"
        if candidates
        else "No pickled weights here",
        where=uri,
        expected=f"{_INDEX}, {' or '.join(_WHOLE)}, or one file that ends in "
        + ", ".join(_SUFFIXES),
        found=text_of(", ".join((candidates or present)[:5])) or "an empty folder",
        next_step="give the file itself" if candidates else "give the folder with the weight files",
    )


@contextmanager
def unpickled(path: Path) -> Iterator[Pickled]:
    """The tensors of a pickled file, read by a child process that runs nothing of it.

    Raises CheckpointError for a file that names code, holds no tensors, or asks for too much.
    """
    nbytes = path.stat().st_size
    limit_s = _START_S + nbytes // _SLOWEST
    environment = {k: os.environ[k] for k in ("PATH", "LD_LIBRARY_PATH") if k in os.environ}
    child = subprocess.Popen(
        [sys.executable, "-I", str(_SCRIPT), str(path), str(limit_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd="/",
        start_new_session=True,
    )
    timer = Timer(limit_s, child.kill)
    timer.start()
    try:
        with child:
            try:
                yield _opened(path, nbytes, child)
            finally:
                child.kill()
    finally:
        timer.cancel()


def _opened(path: Path, nbytes: int, child: subprocess.Popen[bytes]) -> Pickled:
    line = _stdout(child).readline(MAX_JSON_NBYTES)
    if not line.endswith(b"\n"):
        raise _ended(path, child)
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise _refused(path, str(answer["error"]))
    tensors = tuple(
        (str(n), str(d), tuple(map(int, shape))) for n, d, shape, _ in answer["tensors"]
    )
    for name, dtype, _ in tensors:
        if dtype not in _CODE:
            raise _refused(path, f"tensor {name} is of type {dtype}")
    coded = tuple((name, _CODE[dtype], shape) for name, dtype, shape in tensors)
    total = sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in coded)
    if total > _MOST_TIMES * nbytes + _SPARE_NBYTES:
        raise _refused(path, f"its {nbytes} bytes unfold to {total} bytes")
    shared = {str(name): str(first) for name, _, _, first in answer["tensors"] if first}
    left_out = tuple(map(str, answer["left_out"]))
    numbers = {name: i for i, (name, *_) in enumerate(coded)}
    return Pickled(coded, shared, left_out, child, path, numbers)


def _stdout(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdout is not None
    return child.stdout


def _refused(path: Path, message: str) -> CheckpointError:
    named = _REFUSED.search(message)
    parts = [part.strip() for part in message.split("\n\n") if part.strip()]
    cause = parts[1] if len(parts) > 1 else message  # torch's first advice is to run the pickle
    return CheckpointError(
        "A pickled file asks for code, and nothing of it was run"
        if named
        else "A pickled file cannot be read as weights",
        where=str(path),
        expected="tensors by name, and nothing else",
        found=f"the name {named[1]}, which loading would call" if named else cause[:300],
        next_step="do not load it with anything that runs pickles before you know who made it"
        if named
        else "get the file again, or save the model as safetensors with what wrote it",
    )


def _ended(path: Path, child: subprocess.Popen[bytes]) -> CheckpointError:
    child.kill()
    return CheckpointError(
        "The process that reads a pickled file ended",
        where=str(path),
        expected="its tensors, within the memory and time that a file of its size needs",
        found=f"exit status {child.wait()}",
        next_step="the file is damaged or hostile: get it again",
    )


def convert_pickles(
    warehouse: Warehouse, given: Path, out: str | Path | None, progress: Progress
) -> Made:
    """Write a folder or file of pickles as the folder `out`, or as a snapshot of the warehouse."""
    place = None if out is None else check_place(out, warehouse.root, ("convert", given.name))
    _refuse_other(given)
    folder = given if given.is_dir() else given.parent
    with open_source(str(given)) as weights, open_source(str(folder)) as beside:
        files, named = pickled_files(weights, str(given))
        sizes = {file: beside.size(file) for file in files}
        side = dict(side_files(beside, str(folder)))
        if ADAPTER_CONFIG in beside.list():
            side[ADAPTER_CONFIG] = beside.size(ADAPTER_CONFIG)
        copies = {name: beside.read_range(name, 0, nbytes) for name, nbytes in side.items()}
    with drafted(warehouse, "convert", place) as draft:
        draft.side_files |= copies
        with unchanged([folder / file for file in files]):
            with progress.task(f"read {folder.name}", sum(sizes.values())) as advance:
                digests = {file: file_sha256(folder / file, advance) for file in files}
            conversion = convert_files(draft, folder, files, named, progress)
        origin = converted_origin("pickled", given, digests, {})
        return draft.finish(origin, {"files": digests, **asdict(conversion)})


def converted_origin(
    kind: str, given: Path, digests: Mapping[str, str], parameters: Mapping[str, Any]
) -> Origin:
    """The origin of what was converted from files of these digests."""
    inputs = (LineageEntry(kind, given.name, digest_json(dict(digests))),)
    return Origin("convert", parameters, inputs, (Source(given.name, str(given), "", ""),))


@contextmanager
def unchanged(paths: Sequence[Path]) -> Iterator[None]:
    """Raise CheckpointChangedError if a file has another size or time when the context ends.

    What is digested and what is converted are two readings.
    """
    before = [_stamp(path) for path in paths]
    yield
    for path, stamp in zip(paths, before, strict=True):
        if (now := _stamp(path)) != stamp:
            raise CheckpointChangedError(
                "A file changed while it was converted",
                where=str(path),
                expected=stamp,
                found=now,
                next_step="run the same command again when nothing writes to it",
            )


def _stamp(path: Path) -> str:
    with open_source(str(path)) as source:
        return f"{source.size(path.name)} bytes, mtime {source.mtime_ns(path.name)}"


def _refuse_other(given: Path) -> None:
    """Raise CheckpointError for what is not there, or needs no conversion."""
    if not given.exists():
        raise CheckpointError(
            "There is nothing to convert",
            where=str(given),
            expected="a local folder with pickled weights or a GGUF file, or one such file",
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


@dataclass(frozen=True, slots=True)
class Converted:
    """The fate of the tensors: how many, which share memory, and what is no tensor."""

    tensors: int
    shared: dict[str, str]
    tied: tuple[str, ...]
    left_out: tuple[str, ...]


def convert_files(
    draft: Draft, folder: Path, files: Sequence[str], named: Set[str], progress: Progress
) -> Converted:
    """Write each pickled file as a weight file of the draft, whose side files are there already.

    Raises CheckpointError for a file that is not weights alone, IncompleteCheckpointError if the
    files lack a tensor that is `named`.
    """
    is_adapter = ADAPTER_CONFIG in draft.side_files
    is_tied = _config(draft).get("tie_word_embeddings") is True
    shared: dict[str, str] = {}
    tied: list[str] = []
    left_out: list[str] = []
    names: set[str] = set()
    for number, file in enumerate(files, 1):
        whole = ADAPTER_WEIGHTS if is_adapter else "model.safetensors"
        name = whole if len(files) == 1 else shard_name(number, len(files))
        with unpickled(folder / file) as pickled:
            heads = _tied_heads(pickled) if is_tied else []
            tensors = [t for t in pickled.tensors if t[0] not in heads]
            total = sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors)
            with progress.task(f"convert {file}", total) as advance:
                draft.shard(name, tensors, pickled.read, advance)
            shared |= {t: first for t, first in pickled.shared.items() if t not in heads}
            tied += heads
            left_out += pickled.left_out
            names |= {t[0] for t in tensors}
    if lost := sorted(named - names - set(tied)):
        raise IncompleteCheckpointError(
            "The files lack a tensor that their index names",
            where=f"{folder}, tensor {lost[0]}",
            expected=f"all {len(named)} tensors of the index",
            found=f"{len(lost)} of them in no file",
            next_step="let the copy finish, or get the checkpoint again",
        )
    return Converted(len(names), shared, tuple(tied), tuple(left_out))


def _config(draft: Draft) -> dict[str, Any]:
    return load_object(draft.side_files.get(CONFIG, b"{}"), CONFIG, "A model's config")


def _tied_heads(pickled: Pickled) -> list[str]:
    """Heads with the memory of the embedding: the config ties them, so that they are not stored."""
    pairs = pickled.shared.items()
    embedding_first = [sorted(pair, key=is_post) for pair in pairs]
    return [
        head
        for embedding, head in embedding_first
        if is_post(head) and tied_partner(head, [embedding]) == embedding
    ]
