"""Tokenizer files with another vocabulary: one model's files, less some tokens, plus others.

Edits JSON only where the vocabulary differs, so that a tokenizer that is taken over stays byte for
byte the same. Which tokens the output has is decided in `build`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.json_text import json_bytes
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    ADDED,
    CONFIG,
    MERGES,
    SENTENCEPIECE,
    TOKENIZER,
    VOCAB_JSON,
    VOCAB_TXT,
    AddedToken,
    ModelTokenizer,
    damaged,
    json_object,
    number,
)

#: Files that hold the vocabulary a second time, and would contradict a changed tokenizer.json.
_SECOND_COPIES = (ADDED, MERGES, SENTENCEPIECE, VOCAB_JSON, VOCAB_TXT)


def output_files(
    source: ModelTokenizer, plain: Mapping[str, int], added: Sequence[AddedToken]
) -> dict[str, bytes]:
    """The files of `source` with the vocabulary (`plain`, `added`) in place of its own.

    `plain` is a part of the source's. Raises CheckpointError if the source has no tokenizer.json
    and tokens would have to be taken out or get an id that its files cannot state.
    """
    added = sorted(added, key=lambda token: token.id)
    if plain == source.plain and tuple(added) == source.added:
        return dict(source.files)
    if TOKENIZER not in source.files:
        return _with_added_file(source, plain, added)
    document = json_object(source.files, TOKENIZER, source.name)
    model = document["model"]
    if plain != source.plain:
        _cut(model, plain, source.name)
    _pin(model, plain, added)
    document["added_tokens"] = [_entry(token) for token in added]
    out = {n: b for n, b in source.files.items() if n not in _SECOND_COPIES}
    out[TOKENIZER] = json_bytes(document)
    return _with_decoder(out, source.name, added)


def _cut(model: dict[str, Any], plain: Mapping[str, int], name: str) -> None:
    """Take tokens that are not in `plain` out of a tokenizer's model, and merges that need them."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [entry for entry in vocab if entry[0] in plain]
    else:
        model["vocab"] = {t: i for t, i in vocab.items() if t in plain}
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] or [] if _possible(m, plain, name)]


def _possible(merge: Any, plain: Mapping[str, int], name: str) -> bool:
    """Whether both parts and the whole of a merge (a pair, or text with a blank) are tokens."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
        raise damaged(f"{name}/{TOKENIZER}, model.merges", "pairs of tokens", repr(merge)[:80])
    return all(token in plain for token in (*parts, "".join(parts)))


def _pin(model: dict[str, Any], plain: Mapping[str, int], added: Sequence[AddedToken]) -> None:
    """Put added tokens into the vocabulary where a loader would number them otherwise.

    Loaders ignore the id in an added token's entry; the vocabulary is the only place that binds.
    """
    if tuple(added) == number(plain, added):
        return
    if not isinstance(model["vocab"], dict):
        raise CheckpointError(
            "Added tokens cannot keep their ids in a tokenizer whose vocabulary is a list",
            where=f"{TOKENIZER}, added_tokens",
            expected=f"ids without a gap from {len(plain)}",
            found=", ".join(f"{t.content!r}: {t.id}" for t in added[:3]),
            next_step="take another model's tokenizer as the source",
        )
    model["vocab"] = {**model["vocab"], **{t.content: t.id for t in added}}


def _entry(token: AddedToken) -> dict[str, Any]:
    """A token as tokenizer.json lists it."""
    names = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
    fields = asdict(token)
    return {name: fields[name] for name in names}


def _with_decoder(
    files: dict[str, bytes], name: str, added: Sequence[AddedToken]
) -> dict[str, bytes]:
    """The files, with tokenizer_config.json's list of added tokens renewed if it has one."""
    config = json_object(files, CONFIG, name)
    if "added_tokens_decoder" not in config:
        return files
    entries = [_entry(token) for token in added]
    config["added_tokens_decoder"] = {str(entry.pop("id")): entry for entry in entries}
    return {**files, CONFIG: json_bytes(config)}


def _with_added_file(
    source: ModelTokenizer, plain: Mapping[str, int], added: Sequence[AddedToken]
) -> dict[str, bytes]:
    """The files of a tokenizer without tokenizer.json, with its added tokens listed anew."""
    if plain != source.plain or tuple(added) != number(plain, added):
        raise CheckpointError(
            "The output's vocabulary cannot be stated without tokenizer.json",
            where=source.name,
            expected=TOKENIZER,
            found=", ".join(sorted(source.files)),
            next_step="convert it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    listed = json_bytes({t.content: t.id for t in added if t.content not in plain})
    return _with_decoder({**source.files, ADDED: listed}, source.name, added)
