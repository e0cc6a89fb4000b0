"""Opens a checkpoint by its headers: which tensors, where, and whether it is whole.

Full checkpoints (one file or shards, or a step of a training run, as `training_run` reads it), PEFT
adapters (adapter_config.json beside adapter_model.safetensors) and delta checkpoints (as full ones,
with `"mergepipe": "delta"` in the metadata of every file's header). Nothing that a file names is
ever run: pickled weights get an error that says how to convert. `adapter` interprets an adapter's
config.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from mergepipe_pipeline.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from mergepipe_pipeline.checkpoints.adapter_config import KIND as ADAPTER_CONFIG_KIND
from mergepipe_pipeline.checkpoints.adapter_config import refuse_mlx
from mergepipe_pipeline.checkpoints.dcp import METADATA
from mergepipe_pipeline.checkpoints.header import LENGTH_NBYTES, header_nbytes, parse_header
from mergepipe_pipeline.checkpoints.second_form import NATIVE, refuse_another_model
from mergepipe_pipeline.checkpoints.training_run import TrainingRun, refuse_run
from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.domain.checkpoint import (
    Checkpoint,
    CheckpointKind,
    FileEntry,
    TensorEntry,
)
from mergepipe_pipeline.domain.model_config import refuse_stated_apart
from mergepipe_pipeline.domain.tensor_names import plain_name
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from mergepipe_pipeline.storage.json_text import load_object
from mergepipe_pipeline.storage.regular import text_of, too_large
from mergepipe_pipeline.storage.side_files import CARD, CONFIG, MAX_JSON_NBYTES, side_files
from mergepipe_pipeline.storage.source import CheckpointSource, open_source

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: Key and value in a safetensors file's metadata that make its tensors differences from a base.
KIND_KEY, KIND_DELTA = "mergepipe", "delta"
#: Bytes of one sample, and samples of one file: what makes up a file's probe.
_SAMPLE_NBYTES, _MAX_SAMPLES = 256, 1024
#: NUL, newline, ESC and their like, which act on terminals and split lines.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_WEIGHTS = ".safetensors"
#: How dtypes of codes begin.
_CODES = ("F8", "U8", "I8")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".gguf")


def open_checkpoint(uri: str, name: str, *, probes: bool = True) -> Checkpoint:
    """The checkpoint at a path, known from headers; of the weights only a few bytes are read.

    Without `probes` not even these, and only the checkpoint's stamp tells it from others. Its kind
    is "adapter" or "delta" where its files say so, else "full". Of several files its weights are
    those that transformers would load; the others are its `ignored_files`.

    Raises CheckpointError for what is missing, damaged or of another format,
    IncompleteCheckpointError for one that is still being written.
    """
    _refuse_what_is_not_there(uri)
    with open_source(uri, "exact") as source:
        present = source.list()
        adapter_config = None
        if isinstance(source, TrainingRun):
            entries, tensors, kind = _run_weights(source, uri, probes=probes)
        else:
            adapter_config = _adapter_config(source, present, uri)
            is_adapter = adapter_config is not None
            entries, tensors, kind = _weights(source, present, uri, is_adapter, probes=probes)
        if kind != "adapter":
            tensors = _plainly_named(tensors, uri)
        if not tensors:
            raise _empty(kind, uri)
        refuse_ungathered(tensors, kind, uri)
        files = {e.path for e in entries}
        ignored = sorted(text_of(f) for f in present if f.endswith(_WEIGHTS) and f not in files)
        refuse_another_model(source, tensors, [*_second_form(source, ignored, uri)], uri)
        config = None
        if CONFIG in side_files(source, uri):
            config = _json_text(source, CONFIG, uri)
            stated = load_object(config, f"{uri}, {CONFIG}", "A model's config")
            if any(t.dtype[:2] in _CODES for t in tensors):
                refuse_stated_apart(present, stated, uri)
    return Checkpoint(
        name,
        uri,
        tuple(entries),
        tuple(tensors),
        config,
        kind,
        adapter_config,
        ignored_files=tuple(ignored),
    )


def _second_form(source: CheckpointSource, ignored: list[str], uri: str) -> Iterator[TensorEntry]:
    """The tensors of files in Mistral's names beside the model; a pointer to one holds none."""
    for file in ignored:
        if file.startswith(NATIVE):
            with suppress(CheckpointError):
                yield from _read_header(source, file, uri, probes=False)[1]


def _weights(
    source: CheckpointSource, present: list[str], uri: str, is_adapter: bool, *, probes: bool
) -> tuple[list[FileEntry], list[TensorEntry], CheckpointKind]:
    """The weight files with what is in them, by their headers."""
    weight_map = {} if is_adapter else _weight_map(source, present, uri)
    if is_adapter:
        files = [ADAPTER_WEIGHTS]
    else:
        files = sorted(set(weight_map.values())) or _weight_files(present, uri)
        _refuse_a_part(files, present, uri, INDEX if weight_map else None)
    entries: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    marks: dict[str, str | None] = {}
    for file in files:
        entry, file_tensors, metadata = _read_header(source, file, uri, probes=probes)
        entries.append(entry)
        marks[file] = metadata.get(KIND_KEY)
        tensors += file_tensors
    _check_names(tensors, weight_map, uri)
    return entries, tensors, "adapter" if is_adapter else _full_or_delta(marks, uri)


def _run_weights(
    source: TrainingRun, uri: str, *, probes: bool
) -> tuple[list[FileEntry], list[TensorEntry], CheckpointKind]:
    """The files of a training run's step that hold its model, with what is in them."""
    tensors = list(source.layout.tensors)
    _check_names(tensors, {}, uri)
    probe = _probe(source, tensors) if probes else ""
    entries = [source.entry(METADATA, probe), *map(source.entry, source.layout.files)]
    return entries, tensors, "full"


def model_files(source: CheckpointSource, checkpoint: Checkpoint) -> dict[str, int]:
    """Name to size in bytes of all files that go with a checkpoint where it is copied, by the list.

    Weights come first, then the files that say what they are, then side files. Raises
    CheckpointError for one that may not be opened, or of an absurd size.
    """
    there = source.list()
    own = [name for name in (INDEX, ADAPTER_CONFIG, CARD) if name in there]
    sizes = {name: source.size(name) for name in (*(f.path for f in checkpoint.files), *own)}
    for name in own:
        if sizes[name] > MAX_JSON_NBYTES:
            raise too_large(f"{checkpoint.root}, {name}", MAX_JSON_NBYTES, sizes[name])
    return sizes | side_files(source, checkpoint.root)


def is_complete(uri: str) -> str | None:
    """None if the checkpoint is whole and readable, else one sentence that says why not."""
    try:
        open_checkpoint(uri, "checkpoint", probes=False)
    except CheckpointError as error:
        return str(error)
    return None


def _refuse_what_is_not_there(uri: str) -> None:
    if text_of(uri) != uri:
        raise CheckpointError(
            "A checkpoint's path is no text",
            where=text_of(uri),
            expected="a path in UTF-8",
            found="bytes that are no UTF-8",
            next_step="rename it",
        )
    if "://" not in uri and not os.path.exists(uri):
        raise CheckpointError(
            "A checkpoint is not there",
            where=uri,
            expected="a folder with safetensors files",
            found="nothing at this path that may be read",
            next_step="check the path",
        )


def _adapter_config(source: CheckpointSource, present: list[str], uri: str) -> str | None:
    """Text of an adapter's config; None if the folder holds no adapter."""
    if ADAPTER_CONFIG not in present and ADAPTER_WEIGHTS not in present:
        return None
    text = _json_text(source, ADAPTER_CONFIG, uri) if ADAPTER_CONFIG in present else None
    if text is not None and ADAPTER_WEIGHTS not in present:
        refuse_mlx(text, uri)
    other_weights = [f for f in present if f.endswith(_WEIGHTS) and f != ADAPTER_WEIGHTS]
    if other_weights:
        raise CheckpointError(
            "A folder holds an adapter and other weights",
            where=uri,
            expected=f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} alone, or no adapter",
            found=text_of(", ".join(other_weights[:3])),
            next_step="move the adapter into a folder of its own"
            if ADAPTER_WEIGHTS in present
            else f"remove {ADAPTER_CONFIG}: its adapter is not here",
        )
    missing = ADAPTER_CONFIG if ADAPTER_WEIGHTS in present else ADAPTER_WEIGHTS
    if "adapter_model.bin" in present and missing == ADAPTER_WEIGHTS:
        raise pickled(["adapter_model.bin"], ADAPTER_WEIGHTS, uri)
    if text is None or ADAPTER_WEIGHTS not in present:
        raise IncompleteCheckpointError(
            "Half of an adapter is not there yet",
            where=f"{uri}, {missing}",
            expected=f"a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}",
            found="no such file",
            next_step="let the copy finish, or copy the missing file",
        )
    load_object(text, f"{uri}, {ADAPTER_CONFIG}", ADAPTER_CONFIG_KIND)
    return text


def _full_or_delta(marks: dict[str, str | None], uri: str) -> CheckpointKind:
    """By the mark in each file's metadata; all must agree."""
    kinds = set(marks.values())
    if kinds == {KIND_DELTA}:
        return "delta"
    if kinds <= {None}:
        return "full"
    file, mark = next((f, m) for f, m in marks.items() if m != KIND_DELTA)
    raise CheckpointError(
        "The files of a checkpoint disagree on what they hold",
        where=f"{uri}, {file}, __metadata__",
        expected=f'"{KIND_KEY}": "{KIND_DELTA}" in every file, or in none',
        found=f'"{KIND_KEY}": "{mark}"' if mark is not None else f"no {KIND_KEY}",
        next_step="keep full weights and deltas in folders of their own",
    )


def _empty(kind: CheckpointKind, uri: str) -> CheckpointError:
    return CheckpointError(
        f"There is nothing in this {'checkpoint' if kind == 'full' else kind}",
        where=uri,
        expected="at least one tensor",
        found="0 tensors",
        next_step="save it again: training or copying it went wrong",
    )


def _weight_files(present: list[str], uri: str) -> list[str]:
    """The one file that transformers reads, or all there are but a second form of the same."""
    if SINGLE in present:
        return [SINGLE]
    files = [f for f in present if f.endswith(_WEIGHTS)]
    files = [f for f in files if not f.startswith(NATIVE)] or files
    for file in files:
        if text_of(file) != file:
            raise CheckpointError(
                "A weight file's name is no text",
                where=f"{uri}, {text_of(file)}",
                expected="a name in UTF-8",
                found="bytes that are no UTF-8",
                next_step="rename it",
            )
    if files:
        return files
    refuse_run(present, uri)
    pickles = [f for f in present if f.endswith(_PICKLES)]
    if pickles:
        raise pickled(pickles, "*.safetensors", uri)
    raise IncompleteCheckpointError(
        "A folder holds no weights",
        where=uri,
        expected="*.safetensors",
        found=text_of(", ".join(present[:5])) or "an empty folder",
        next_step="give the folder that holds the model's weight files",
    )


def _refuse_a_part(files: list[str], present: list[str], uri: str, index: str | None) -> None:
    """Refuse files of which the index, or the names of those present, say that there are more."""
    # The source finds or refuses files that an index names in other folders.
    missing = [f for f in files if f not in present and "/" not in f and ".." not in f]
    if missing:
        first, there, count = missing[0], len(files) - len(missing), len(files)
    else:
        nested = [f.rpartition("/")[2] for f in files if "/" in f]  # an index may name folders
        part = missing_shard(set(files).intersection(present), [*present, *nested])
        if part is None:
            return
        first, there, count = part
    raise IncompleteCheckpointError(
        "A shard is not there yet",
        where=f"{uri}, {index}" if index else uri,
        expected=f"{count} files, as the {'index says' if missing else 'names of some say'}",
        found=f"{there} of them; the first missing is {first}",
        next_step="let the copy finish, or copy the missing files",
    )


def _weight_map(source: CheckpointSource, present: list[str], uri: str) -> dict[str, str]:
    """Tensor to file as the index says; empty without one, and where one file holds the model."""
    if INDEX not in present:
        return {}
    where = f"{uri}, {INDEX}"
    weight_map = load_object(_json_text(source, INDEX, uri), where, "A shard index").get(
        "weight_map"
    )
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise IncompleteCheckpointError(
            "A shard index cannot be read",
            where=where,
            expected="an object with weight_map, of tensors to files",
            found=f"{type(weight_map).__name__} of something else",
            next_step="copy the index again",
        )
    if SINGLE not in present:
        return weight_map
    shards = sorted({f for f in weight_map.values() if f in present and f != SINGLE})
    if shards:
        raise CheckpointError(
            "A folder holds a model twice",
            where=uri,
            expected=f"{SINGLE}, or {INDEX} with the files that it names",
            found=text_of(f"{SINGLE} and {', '.join(shards[:3])}"),
            next_step=f"remove {SINGLE}, or {INDEX} and the files that it names: whichever is not "
            "the model that you mean",
        )
    return {}


def _json_text(source: CheckpointSource, file: str, uri: str) -> str:
    nbytes = source.size(file)
    if nbytes > MAX_JSON_NBYTES:
        raise too_large(f"{uri}, {file}", MAX_JSON_NBYTES, nbytes)
    try:
        return source.read_range(file, 0, nbytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            "A JSON file is not UTF-8",
            where=f"{uri}, {file}",
            found=str(error),
            next_step="get the checkpoint again",
        ) from error


def _read_header(
    source: CheckpointSource, file: str, uri: str, *, probes: bool
) -> tuple[FileEntry, list[TensorEntry], dict[str, str]]:
    where = f"{uri}, {file}"
    nbytes = source.size(file)
    first8 = source.read_range(file, 0, min(LENGTH_NBYTES, nbytes))
    raw = source.read_range(file, LENGTH_NBYTES, header_nbytes(first8, nbytes, where))
    try:
        tensors, metadata = parse_header(raw, nbytes, file)
    except CheckpointError as error:
        error.where = f"{uri}, {error.where}"
        raise
    probe = _probe(source, tensors) if probes else ""
    entry = FileEntry(file, nbytes, source.mtime_ns(file), sha256_hex(raw), probe)
    return entry, tensors, metadata


def _probe(source: CheckpointSource, tensors: list[TensorEntry]) -> str:
    """The digest of some bytes; of a file at an address its server's own tag tells it."""
    return "" if source.is_far else sha256_hex(_samples(source, tensors))


def _samples(source: CheckpointSource, tensors: list[TensorEntry]) -> bytes:
    """A few bytes from the middle of every tensor; of many, of some that are spread evenly."""
    step = -(-len(tensors) // _MAX_SAMPLES)
    places = []
    for t in tensors[::step] if tensors else ():
        start = max(0, t.nbytes - _SAMPLE_NBYTES) // 2
        places.append((t.file, t.start_byte + start, min(_SAMPLE_NBYTES, t.nbytes)))
    for place in places:  # all at once: the disk's latency is waited for once, not for each
        source.will_need(*place)
    return b"".join(source.read_range(*place) for place in places)


def _plainly_named(tensors: list[TensorEntry], uri: str) -> list[TensorEntry]:
    """The tensors without what wrappers of training put into their names."""
    names = [plain_name(t.name) for t in tensors]
    if len(set(names)) == len(names):
        return [
            t if t.name == n else replace(t, name=n) for t, n in zip(tensors, names, strict=True)
        ]
    first = next(n for n, count in Counter(names).items() if count > 1)
    raise CheckpointError(
        "A checkpoint holds a tensor twice, with and without the name of what wrapped its module",
        where=uri,
        expected=f"one tensor {first}",
        found=", ".join(t.name for t, n in zip(tensors, names, strict=True) if n == first),
        next_step="remove the copy that is not meant, and save the model again",
    )


def _check_names(tensors: list[TensorEntry], weight_map: dict[str, str], uri: str) -> None:
    seen: dict[str, str] = {}
    for t in tensors:
        if _CONTROL.search(t.name):
            raise CheckpointError(
                "A tensor's name holds control characters",
                where=f"{uri}, {t.file}",
                expected="a name that can be printed, like model.layers.0.mlp.up_proj.weight",
                found=repr(t.name)[:80],
                next_step="rename the tensor, or get the checkpoint from somebody you trust",
            )
        if t.name in seen:
            raise CheckpointError(
                "Two files hold the same tensor",
                where=f"{uri}, tensor {t.name}",
                expected="one file",
                found=f"{seen[t.name]} and {t.file}",
                next_step="remove the stale file",
            )
        seen[t.name] = t.file
    if weight_map and seen != weight_map:
        name = sorted(set(seen.items()) ^ set(weight_map.items()))[0][0]
        raise CheckpointError(
            "The shard index disagrees with the shards",
            where=f"{uri}, tensor {name}",
            expected=f"in {weight_map.get(name, 'no file')} as the index says",
            found=f"in {seen.get(name, 'no file')}",
            next_step="copy the index and the shards again; if they are so where they come from, "
            "load the model with transformers and save it",
        )


def pickled(files: Sequence[str], expected: str, uri: str) -> CheckpointError:
    """The error for files that unpickling or another program would read."""
    return CheckpointError(
        "This format is not merged as it is"
        if files[0].endswith(".gguf")
        else "This format is never read: loading it can run code",
        where=f"{uri}, {text_of(files[0])}",
        expected=expected,
        found=text_of(", ".join(files[:3])),
        next_step=("download it, then " if "://" in uri else "")
        + (
            "`mergepipe convert FILE.gguf` decodes it and writes safetensors; "
            "better is the model that it was made from"
            if files[0].endswith(".gguf")
            else "`mergepipe convert` writes it as safetensors, and runs nothing of it"
        ),
    )


def refuse_ungathered(tensors: Sequence[TensorEntry], kind: CheckpointKind, uri: str) -> None:
    """Raise CheckpointError if weights are the empty places that ZeRO-3 leaves of them."""
    empty = [t for t in tensors if t.shape == (0,) and t.name.endswith(".weight")]
    if not empty:
        return
    raise CheckpointError(
        f"The weights of {'an adapter' if kind == 'adapter' else 'a checkpoint'} were not gathered "
        "when it was saved",
        where=f"{uri}, {empty[0].file}, tensor {empty[0].name}",
        expected="tensors with elements",
        found=f"{len(empty)} of {len(tensors)} tensors of shape [0], as DeepSpeed ZeRO-3 leaves "
        "them on each process",
        next_step="run `python zero_to_fp32.py . OUT --safe_serialization` in the folder that "
        "training saved it in, and give OUT; or save again with "
        "`stage3_gather_16bit_weights_on_model_save: true`",
    )


_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def is_shard(name: str) -> bool:
    """Whether a file's name says that it is one of several."""
    return _SHARD.fullmatch(name) is not None


def missing_shard(names: Iterable[str], present: Iterable[str]) -> tuple[str, int, int] | None:
    """The first file that the names of other shards imply and that is not present.

    With it, how many of its set are present and how many there must be. None if all are.
    """
    present_names = set(present)
    sets = {(m["stem"], m["count"]) for name in names if (m := _SHARD.fullmatch(name))}
    for stem, count in sorted(sets):
        expected = (f"{stem}-{n:05d}-of-{count}.safetensors" for n in range(1, int(count) + 1))
        missing = [name for name in expected if name not in present_names]
        if missing:
            return missing[0], int(count) - len(missing), int(count)
    return None
