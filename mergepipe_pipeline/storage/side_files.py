"""The files that a model folder needs beside its weights: by known names, each of a sane size.

Files of other names are never copied: a folder may hold anything. Of folders in it two kinds are
looked into: the modules of sentence-transformers that `modules.json` lists, and chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.storage.json_text import parse_json
from mergepipe_pipeline.storage.regular import too_large
from mergepipe_pipeline.storage.source import CheckpointSource

CONFIG = "config.json"
#: A model's card, which says its licence; results get one of their own.
CARD = "README.md"
MAX_JSON_NBYTES = 64 << 20
_MAX_TOKENIZER_NBYTES = 256 << 20
_MAX_MODULE_NBYTES = 256 << 20
_PIECE_NBYTES = 1 << 20
_MODULES = "modules.json"
_PICKLE = "pytorch_model.bin"
#: A folder with a model's chat templates besides its own.
TEMPLATES = "additional_chat_templates"
#: Names of folders and of templates that are looked at, and how many of each.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST_NESTED = 64

#: As transformers writes them, with the most bytes that each may have.
_MOST_NBYTES = dict.fromkeys(
    (
        "added_tokens.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "sentencepiece.model",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer.model.v3",
        "vocab.bpe",
        "vocab.json",
        "vocab.txt",
    ),
    _MAX_TOKENIZER_NBYTES,
) | dict.fromkeys(
    (
        CONFIG,
        "chat_template.jinja",
        "chat_template.json",
        "config_sentence_transformers.json",
        "generation_config.json",
        _MODULES,
        "preprocessor_config.json",
        "processor_config.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    ),
    MAX_JSON_NBYTES,
)

#: Files of a module's folder.
_MODULE_NBYTES = {CONFIG: MAX_JSON_NBYTES, "model.safetensors": _MAX_MODULE_NBYTES}

#: Names of files that may lie beside weights, for sources that cannot list a folder.
SIDE_NAMES = tuple(_MOST_NBYTES)


class SideStamp(NamedTuple):
    """A side file as last seen: name, size in bytes, time of its last change; or `gone`."""

    file: str
    nbytes: int
    mtime_ns: int


def gone(file: str) -> SideStamp:
    """The stamp of a side file that there was before and is not any more."""
    return SideStamp(file, -1, 0)


def is_module(file: str) -> bool:
    """Whether a side file belongs to a module of sentence-transformers beside the model."""
    return "/" in file and not file.startswith(f"{TEMPLATES}/")


def module_folders(source: CheckpointSource) -> list[str]:
    """The folders of modules that modules.json lists; none where there is no such file."""
    return _modules(source, source.size(_MODULES)) if _MODULES in source.list() else []


def pickled_modules(source: CheckpointSource, folders: Sequence[str]) -> list[str]:
    """Weights in folders of modules that are there as pickles alone, which are not copied."""
    there = source.list()
    found = {folder: source.list(folder) for folder in folders if folder in there}
    return [
        f"{folder}/{_PICKLE}"
        for folder, names in found.items()
        if _PICKLE in names and "model.safetensors" not in names
    ]


def side_stamps(source: CheckpointSource, uri: str) -> list[SideStamp]:
    """The side files there are, by name. Raises as `side_files`."""
    sizes = side_files(source, uri)
    return [SideStamp(name, nbytes, source.mtime_ns(name)) for name, nbytes in sizes.items()]


def side_sha256(source: CheckpointSource, stamp: SideStamp) -> str:
    """SHA-256 of a side file, read a piece at a time. Raises CheckpointError."""
    digest = new_hash()
    for _ in pieces(source, stamp.file, stamp.nbytes, digest.update):
        pass
    return digest.hexdigest()


def side_files(source: CheckpointSource, uri: str) -> dict[str, int]:
    """Name to size in bytes of the side files there are, by name.

    Raises CheckpointError for one of an absurd size, or that may not be opened.
    """
    there = source.list()
    most = {name: _MOST_NBYTES[name] for name in there if name in _MOST_NBYTES}
    sizes = _sane_sizes(source, uri, most)
    nested = _nested(source, there, sizes)
    return sizes | _sane_sizes(source, uri, nested) if nested else sizes


def _sane_sizes(source: CheckpointSource, uri: str, most: dict[str, int]) -> dict[str, int]:
    sizes = {name: source.size(name) for name in most}
    for name, nbytes in sizes.items():
        if nbytes > most[name]:
            raise too_large(f"{uri}, {name}", most[name], nbytes)
    return sizes


def _nested(source: CheckpointSource, there: list[str], sizes: dict[str, int]) -> dict[str, int]:
    """Files in folders of the folder that are copied with it, with the most bytes of each."""
    out: dict[str, int] = {}
    if TEMPLATES in there:
        names = [n for n in source.list(TEMPLATES) if n.endswith(".jinja")]
        plain = [n for n in names if _PLAIN.fullmatch(n.removesuffix(".jinja"))]
        out |= {f"{TEMPLATES}/{n}": MAX_JSON_NBYTES for n in plain[:_MOST_NESTED]}
    for folder in _modules(source, sizes[_MODULES]) if _MODULES in sizes else ():
        found = source.list(folder) if folder in there else []
        out |= {f"{folder}/{n}": most for n, most in _MODULE_NBYTES.items() if n in found}
    return out


def _modules(source: CheckpointSource, nbytes: int) -> list[str]:
    """The folders that modules.json lists and that lie beside it; none if it cannot be read."""
    try:
        entries = parse_json(source.read_range(_MODULES, 0, nbytes))
    except ValueError:
        return []
    entries = entries if isinstance(entries, list) else []
    paths = [e.get("path") for e in entries if isinstance(e, dict)]
    plain = [p for p in paths if isinstance(p, str) and _PLAIN.fullmatch(p)]
    return list(dict.fromkeys(plain))[:_MOST_NESTED]


def pieces(
    source: CheckpointSource, name: str, nbytes: int, on_piece: Callable[[bytes], object]
) -> Iterator[bytes]:
    """The first `nbytes` bytes of a file, a piece at a time; `on_piece` gets each (to hash it)."""
    for start_byte in range(0, nbytes, _PIECE_NBYTES):
        piece = source.read_range(name, start_byte, min(_PIECE_NBYTES, nbytes - start_byte))
        on_piece(piece)
        yield piece
