"""Opens a checkpoint from its headers alone: which tensors, where, and whether it is whole.

Full checkpoints in safetensors only, in one file or in shards. Nothing is ever unpickled: other
formats get an error that says how to convert.
"""

from __future__ import annotations

import json
from pathlib import Path

from mergepipe_pipeline.digest import sha256_hex
from mergepipe_pipeline.errors import CheckpointError, IncompleteCheckpointError
from mergepipe_pipeline.spec.checkpoint import Checkpoint, FileEntry, TensorEntry
from mergepipe_pipeline.storage.header import LENGTH_NBYTES, header_nbytes, parse_header
from mergepipe_pipeline.storage.source import CheckpointSource, open_source

INDEX = "model.safetensors.index.json"
_MAX_JSON_NBYTES = 64 << 20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".gguf")
_SIDE_PREFIXES = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "chat_template",
    "generation_config",
    "preprocessor_config",
    "processor_config",
    "spiece",
    "sentencepiece",
    "video_preprocessor",
)


def open_checkpoint(uri: str, name: str) -> Checkpoint:
    """The checkpoint at a path, known from headers; reads no weight.

    Raises CheckpointError for what is missing, damaged or of another format,
    IncompleteCheckpointError for one that is still being written.
    """
    _refuse_what_is_not_there(uri)
    with open_source(uri) as source:
        present = source.list()
        weight_map = _weight_map(source, present, uri)
        files = sorted(set(weight_map.values())) if weight_map else _weight_files(present, uri)
        entries: list[FileEntry] = []
        tensors: list[TensorEntry] = []
        for file in files:
            if file not in present and "/" not in file and ".." not in file:
                raise IncompleteCheckpointError(
                    "A shard is not there yet",
                    where=f"{uri}, {file}",
                    expected=f"all {len(files)} files that {INDEX} names",
                    found="no such file",
                    next_step="let the copy finish, or copy the missing file",
                )
            entry, found = _read_header(source, file, uri)
            entries.append(entry)
            tensors += found
        _check_names(tensors, weight_map, uri)
        config = None
        if "config.json" in present:
            config = _json_text(source, "config.json", uri)
    return Checkpoint(name, uri, tuple(entries), tuple(tensors), config)


def is_complete(uri: str) -> str | None:
    """None if the checkpoint is whole and readable, else one sentence that says why not."""
    try:
        open_checkpoint(uri, "checkpoint")
    except CheckpointError as error:
        return str(error)
    return None


def side_files(uri: str) -> list[str]:
    """Names of the files that a model folder needs beside weights."""
    with open_source(uri) as source:
        return [
            f
            for f in source.list()
            if f == "config.json"
            or (f.startswith(_SIDE_PREFIXES) and not f.endswith(".safetensors"))
        ]


def _refuse_what_is_not_there(uri: str) -> None:
    if "://" not in uri and not Path(uri).exists():
        raise CheckpointError(
            "A checkpoint is not there",
            where=uri,
            expected="a folder with safetensors files",
            found="nothing at this path",
            next_step="check the path; hub models must be downloaded first",
        )


def _weight_files(present: list[str], uri: str) -> list[str]:
    files = [f for f in present if f.endswith(".safetensors")]
    if "adapter_config.json" in present:
        raise CheckpointError(
            "An adapter is not a full checkpoint",
            where=uri,
            expected="full weights in safetensors",
            found="adapter_config.json",
            next_step="merge the adapter into its base and save that: this version "
            "reads full checkpoints only",
        )
    if files:
        return files
    pickles = [f for f in present if f.endswith(_PICKLES)]
    if pickles:
        raise CheckpointError(
            "This format is never read: loading it can run code",
            where=f"{uri}, {pickles[0]}",
            expected="*.safetensors",
            found=", ".join(pickles[:3]),
            next_step="convert it with transformers: "
            "model.save_pretrained(folder, safe_serialization=True)",
        )
    raise IncompleteCheckpointError(
        "A folder holds no weights",
        where=uri,
        expected="*.safetensors",
        found=", ".join(present[:5]) or "an empty folder",
        next_step="give the folder that holds the model's weight files",
    )


def _weight_map(source: CheckpointSource, present: list[str], uri: str) -> dict[str, str]:
    if INDEX not in present or "model.safetensors" in present:
        return {}
    where = f"{uri}, {INDEX}"
    try:
        weight_map = json.loads(_json_text(source, INDEX, uri))["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items()):
            raise TypeError("weight_map holds something else than names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IncompleteCheckpointError(
            "A shard index cannot be read",
            where=where,
            expected="an object with weight_map",
            found=str(error)[:200],
            next_step="copy the index again",
        ) from error
    assert isinstance(weight_map, dict)
    return weight_map


def _json_text(source: CheckpointSource, file: str, uri: str) -> str:
    nbytes = source.size(file)
    if nbytes > _MAX_JSON_NBYTES:
        raise CheckpointError(
            "A JSON file is absurdly large",
            where=f"{uri}, {file}",
            expected=f"at most {_MAX_JSON_NBYTES} bytes",
            found=f"{nbytes} bytes",
            next_step="get the checkpoint again",
        )
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
    source: CheckpointSource, file: str, uri: str
) -> tuple[FileEntry, list[TensorEntry]]:
    where = f"{uri}, {file}"
    nbytes = source.size(file)
    first8 = source.read_range(file, 0, min(LENGTH_NBYTES, nbytes))
    raw = source.read_range(file, LENGTH_NBYTES, header_nbytes(first8, nbytes, where))
    try:
        tensors, _ = parse_header(raw, nbytes, file)
    except CheckpointError as error:
        error.where = f"{uri}, {error.where}"
        raise
    return FileEntry(file, nbytes, source.mtime_ns(file), sha256_hex(raw)), tensors


def _check_names(tensors: list[TensorEntry], weight_map: dict[str, str], uri: str) -> None:
    seen: dict[str, str] = {}
    for t in tensors:
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
            next_step="copy the index and the shards again",
        )
