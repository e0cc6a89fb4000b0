"""The files that a model folder needs beside its weights: by known names, each of a sane size.

Files of other names are never copied: a folder may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mergepipe_pipeline.digest import new_hash
from mergepipe_pipeline.storage.regular import too_large
from mergepipe_pipeline.storage.source import CheckpointSource

CONFIG = "config.json"
MAX_JSON_NBYTES = 64 << 20
_MAX_TOKENIZER_NBYTES = 256 << 20
_PIECE_NBYTES = 1 << 20

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
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    ),
    MAX_JSON_NBYTES,
)

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
    sizes = {name: source.size(name) for name in source.list() if name in _MOST_NBYTES}
    for name, nbytes in sizes.items():
        if nbytes > _MOST_NBYTES[name]:
            raise too_large(f"{uri}, {name}", _MOST_NBYTES[name], nbytes)
    return sizes


def pieces(
    source: CheckpointSource, name: str, nbytes: int, on_piece: Callable[[bytes], object]
) -> Iterator[bytes]:
    """The first `nbytes` bytes of a file, a piece at a time; `on_piece` gets each (to hash it)."""
    for start_byte in range(0, nbytes, _PIECE_NBYTES):
        piece = source.read_range(name, start_byte, min(_PIECE_NBYTES, nbytes - start_byte))
        on_piece(piece)
        yield piece
