"""A model with another's tokenizer: a row for every token of the donor, all else as it is.

Rows of tokens that both have are copied; those of other tokens are sums of such rows, with the
coefficients that give the token from the same tokens in the donor's space. Embedding and head
have coefficients of their own where both models have both. Byte-level BPE writes bytes as letters
(` hello` is `Ġhello`), sentencepiece writes a blank as `▁` and single bytes as `<0x0A>`; both are
compared as the bytes that they mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.checkpoints.header import Described
from mergepipe_pipeline.domain.layers import (
    embedding_like,
    is_embedding,
    is_post,
    layer_index,
    vocabulary_axis,
)
from mergepipe_pipeline.domain.model_config import ties_head
from mergepipe_pipeline.domain.plan import ConfigValue
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.resolution.vocabulary import changed_sizes, refuse_left_tables
from mergepipe_pipeline.snapshots.model_folder import config_json, shard_name
from mergepipe_pipeline.storage.json_text import json_bytes
from mergepipe_pipeline.storage.side_files import CONFIG
from mergepipe_pipeline.tokenizer.model_tokenizer import CONFIG as TOKENIZER_CONFIG
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    SPECIAL_KEYS,
    SPECIAL_MAP,
    TOKENIZER,
    ModelTokenizer,
    json_object,
    of_tokenizer,
    read_tokenizer,
)
from mergepipe_pipeline.tokenizer.special_ids import GENERATION, followed, statement_of
from mergepipe_pipeline.tools.approximation import combine
from mergepipe_pipeline.tools.models import Input, stored
from mergepipe_pipeline.tools.result import Draft


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How rows are made: the method, its k, and where fallback bytes and prefixes stand in.

    `bytes_` and `prefixes` are "no", "embed", "lm_head" or "yes", for both.
    """

    method: str
    k: int
    bytes_: str = "no"
    prefixes: str = "no"


class Transplant:
    """Finds the rows of the new vocabulary, and writes the model."""

    def __init__(self, recipient: Input, donor: Input, options: RowOptions) -> None:
        """Raises CheckpointError for a model without tokenizer or embedding,
        IncompatibleCheckpointsError for vocabularies that share no token.
        """
        self._recipient, self._donor, self._options = recipient, donor, options
        self._files = {n: data for n, data in donor.side_files().items() if of_tokenizer(n)}
        self._tokenizers = (
            _tokenizer(recipient, recipient.side_files()),
            _tokenizer(donor, self._files),
        )
        self._matches: Matches = match(*reversed(self._tokenizers))
        self._ids = sorted(self._tokenizers[1].vocab.values())
        if not self._matches.same:
            raise IncompatibleCheckpointsError(
                "The two vocabularies share no token",
                where=f"{recipient.checkpoint.root} and {donor.checkpoint.root}",
                expected="tokens with the same text, from which others can be made",
                found="none",
                next_step="give a donor whose tokenizer is for the same kind of text",
            )
        self._refuse_left()
        own, theirs = (
            statement_of(tokenizer, model.checkpoint.name, model.config, model.side_files())
            for tokenizer, model in zip(self._tokenizers, (recipient, donor), strict=True)
        )
        vocab = self._tokenizers[1].vocab
        self._token_ids = followed(own, theirs, theirs, vocab, self._ids[-1] + 1)

    def write(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Write all weights, the donor's tokenizer and the config; what became of the tokens."""
        tensors = self._recipient.tensors
        new_rows: dict[str, F32Array] = {}
        details: dict[str, Any] = {}
        for place, names in self._sides().items():
            rows, details[place] = self._rows(names, place, progress)
            new_rows |= rows
        groups: dict[int | None, list[str]] = {}
        for name in tensors:
            groups.setdefault(layer_index(name), []).append(name)
        with progress.task("write the model", self._recipient.checkpoint.nbytes) as advance:
            for number, names in enumerate(groups.values(), 1):
                described = [self._described(name, new_rows) for name in names]
                file = shard_name(number, len(groups)) if len(groups) > 1 else "model.safetensors"
                draft.shard(file, described, partial(self._bytes, new_rows), advance)
        progress.warn(*self._token_ids.warnings)
        draft.side_files |= self._side_files()
        return {"tokens": len(self._ids), "rows": self._ids[-1] + 1, **details}

    def _sides(self) -> dict[str, list[str]]:
        """The matrices of embedding and head; those of a tie are one side."""
        tables = [n for n in self._recipient.tensors if vocabulary_axis(n) is not None]
        matrices = sorted(tables, key=lambda name: (is_post(name), not is_embedding(name)))
        if ties_head(self._recipient.checkpoint.stated):
            return {"embed": matrices}
        sides = {"embed": [n for n in matrices if not is_post(n)]}
        sides["lm_head"] = [n for n in matrices if is_post(n)]
        return {place: names for place, names in sides.items() if names}

    def _rows(
        self, names: list[str], place: str, progress: Progress
    ) -> tuple[dict[str, F32Array], dict[str, Any]]:
        """The new matrices of one side, and how many of their rows came from where."""
        donor_rows = self._donor.floats(_partner(self._donor, names[0]))
        shapes = {name: self._recipient.tensors[name].shape for name in names}
        matrices = {
            name: self._recipient.floats(name).reshape(shape[vocabulary_axis(name) or 0], -1)
            for name, shape in shapes.items()
        }
        most = min(len(rows) for rows in matrices.values())
        same = {i: j for i, j in self._matches.same.items() if i < len(donor_rows) and j < most}
        fixed = dict(same)
        for where, pairs in (
            (self._options.bytes_, self._matches.bytes_),
            (self._options.prefixes, self._matches.prefixes),
        ):
            fixed |= {i: j for i, j in pairs.items() if where in ("yes", place) and j < most}
        missing = [i for i in self._ids if i not in fixed and i < len(donor_rows)]
        shared = sorted(same)
        with progress.task(f"approximate {place}", len(missing)) as advance:
            combination = combine(
                donor_rows[missing],
                donor_rows[shared],
                self._options.method,
                self._options.k,
                advance,
            )
        n_rows, anchors = self._ids[-1] + 1, [same[i] for i in shared]
        new_rows = {}
        for name, rows in matrices.items():
            new = np.broadcast_to(rows.mean(axis=0), (n_rows, *rows.shape[1:])).copy()
            new[list(fixed)] = rows[list(fixed.values())]
            new[missing] = combination.of(rows[anchors])
            axis = vocabulary_axis(name) or 0
            new_rows[name] = new.reshape(*shapes[name][:axis], n_rows, *shapes[name][axis + 1 :])
        residual = combination.residual
        return new_rows, {
            "same": len(same),
            "bytes_and_prefixes": len(fixed) - len(same),
            "approximated": len(missing),
            "without_row": len(self._ids) - len(fixed) - len(missing),
            "residual_mean": float(residual.mean()) if len(missing) else 0.0,
            "residual_most": float(residual.max()) if len(missing) else 0.0,
        }

    def _table_rows(self) -> dict[str, int]:
        """Rows of each table of the recipient's vocabulary."""
        shapes = {n: t.shape for n, t in self._recipient.tensors.items()}
        axes = {n: vocabulary_axis(n) for n in shapes}
        return {n: shapes[n][axis] for n, axis in axes.items() if axis is not None}

    def _refuse_left(self) -> None:
        """Raise IncompatibleCheckpointsError for a table that would keep its rows."""
        rows, root = self._table_rows(), self._recipient.checkpoint.root
        shapes = {n: t.shape for n, t in self._recipient.tensors.items()}
        n_rows = next((n for name, n in rows.items() if is_embedding(name)), None)
        refuse_left_tables(shapes, n_rows, self._recipient.config, root)
        self._sizes(self._recipient.config)

    def _sizes(self, config: Mapping[str, Any]) -> list[tuple[str, ConfigValue]]:
        rows = {name: (n, self._ids[-1] + 1) for name, n in self._table_rows().items()}
        return changed_sizes(rows, config, self._recipient.checkpoint.root)

    def _described(self, name: str, new_rows: Mapping[str, F32Array]) -> Described:
        entry = self._recipient.tensors[name]
        return name, entry.dtype, new_rows[name].shape if name in new_rows else entry.shape

    def _bytes(self, new_rows: Mapping[str, F32Array], name: str) -> bytes | bytearray:
        if name in new_rows:
            return stored(new_rows[name], self._recipient.tensors[name].dtype)
        return self._recipient.raw(name)

    def _side_files(self) -> dict[str, bytes]:
        """The recipient's files with the donor's tokenizer, its size and its token ids."""
        files = self._recipient.side_files()
        files = {n: data for n, data in files.items() if not of_tokenizer(n)} | self._files
        changes = (*self._sizes(self._recipient.config), *self._token_ids.config)
        files[CONFIG] = config_json(json_bytes(self._recipient.config), None, changes)
        if self._token_ids.generation is not None:
            files[GENERATION] = json_bytes(self._token_ids.generation)
        return files


def _partner(model: Input, name: str) -> str:
    """The model's matrix for the side of a tensor's name: its own, or what it is tied to."""
    weights = [n for n in model.tensors if embedding_like(n) and n.endswith(".weight")]
    same_side = [n for n in weights if is_post(n) == is_post(name)]
    tied = weights if ties_head(model.checkpoint.stated) else []
    matrix = next(iter((*same_side, *tied)), None)
    if matrix is None or model.tensors[matrix].dtype not in FLOATING:
        raise CheckpointError(
            f"A model has no {'head' if is_post(name) else 'embedding'} that is known",
            where=model.checkpoint.root,
            expected=f"a tensor as {name}",
            found=", ".join(list(model.tensors)[:3]),
            next_step="give a language model",
        )
    return matrix


def _tokenizer(model: Input, files: Mapping[str, bytes]) -> ModelTokenizer:
    n_rows = model.tensors[_partner(model, "model.embed_tokens.weight")].shape[0]
    tokenizer = read_tokenizer(model.checkpoint.name, files, n_rows)
    if not tokenizer.vocab:
        raise CheckpointError(
            "A model has no tokenizer",
            where=model.checkpoint.root,
            expected="tokenizer.json",
            found="no file with a vocabulary",
            next_step="put the tokenizer's files beside the weights",
        )
    return tokenizer


_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Matches:
    """Donor id to recipient id.

    `same` are the same token, by bytes or by part; `bytes_` stand for one byte in both, in one as a
    fallback; `prefixes` are the longest tokens of the recipient that begin the donor's.
    """

    same: dict[int, int]
    bytes_: dict[int, int]
    prefixes: dict[int, int]


def match(donor: ModelTokenizer, recipient: ModelTokenizer) -> Matches:
    """Every token of the donor with a row, as far as the recipient has it in a row."""
    recipient_forms, donor_forms = _Forms(recipient), _Forms(donor)
    same = {
        i: recipient_forms.plain[f]
        for f, i in donor_forms.plain.items()
        if f in recipient_forms.plain
    }
    same |= {
        i: recipient_forms.special[t]
        for t, i in donor_forms.special.items()
        if t in recipient_forms.special
    }
    for part, i in donor_forms.parts.items():
        if i not in same and part in recipient_forms.parts:
            same[i] = recipient_forms.parts[part]
    bytes_ = {
        i: recipient_forms.fallback[f]
        for f, i in donor_forms.plain.items()
        if f in recipient_forms.fallback
    }
    for form, i in donor_forms.fallback.items():
        row = recipient_forms.fallback.get(form, recipient_forms.plain.get(form))
        if row is not None:
            bytes_[i] = row
    prefixes = {
        i: p
        for f, i in donor_forms.plain.items()
        if (p := recipient_forms.longest_prefix(f)) is not None
    }
    return Matches(
        same,
        {i: j for i, j in bytes_.items() if i not in same},
        {i: j for i, j in prefixes.items() if i not in same and i not in bytes_},
    )


class _Forms:
    """A vocabulary's tokens in rows, by what they mean: bytes, a fallback byte, a special text."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.plain: dict[bytes, int] = {}
        self.fallback: dict[bytes, int] = {}
        vocab, added = tokenizer.vocab_in_rows, {t.content: t for t in tokenizer.added}
        self.special = {t: i for t, i in vocab.items() if t in added and added[t].special}
        letters = _byte_letters() if _is_byte_level(tokenizer) else None
        for token, i in vocab.items():
            if token in self.special:
                continue
            if hex_match := _FALLBACK.fullmatch(token):
                self.fallback[bytes.fromhex(hex_match[1])] = i
            elif token not in added and letters is not None:
                self.plain.setdefault(_from_letters(token, letters), i)
            else:
                self.plain.setdefault(token.replace("▁", " ").encode(errors="replace"), i)
        self.parts = {p: vocab[t] for p, t in _parts(tokenizer).items() if t in vocab}
        self._longest = max(map(len, self.plain), default=0)

    def longest_prefix(self, form: bytes) -> int | None:
        """The longest token that a form begins with, but the whole of it; None without any."""
        starts = (form[:n] for n in range(min(len(form) - 1, self._longest), 0, -1))
        return next((self.plain[start] for start in starts if start in self.plain), None)


def _parts(tokenizer: ModelTokenizer) -> dict[str, str]:
    """Special tokens by the part they play."""
    named: dict[str, Any] = {
        **json_object(tokenizer.files, SPECIAL_MAP, tokenizer.name),
        **json_object(tokenizer.files, TOKENIZER_CONFIG, tokenizer.name),
    }
    tokens = {part: named.get(part) for part in SPECIAL_KEYS}
    texts = {p: v.get("content") if isinstance(v, dict) else v for p, v in tokens.items()}
    return {part: text for part, text in texts.items() if isinstance(text, str)}


def _is_byte_level(tokenizer: ModelTokenizer) -> bool:
    """Whether the tokenizer's file names the byte-level step; GPT-2's older files have it, too."""
    if TOKENIZER not in tokenizer.files:
        return "vocab.json" in tokenizer.files
    document = json_object(tokenizer.files, TOKENIZER, tokenizer.name)
    steps = [document.get("pre_tokenizer"), document.get("decoder")]
    for step in steps:  # the list grows: a sequence holds further ones
        if isinstance(step, Mapping):
            if step.get("type") == "ByteLevel":
                return True
            for key in ("pretokenizers", "decoders"):
                inner = step.get(key)
                steps += inner if isinstance(inner, list) else []
    return False


def _byte_letters() -> dict[str, int]:
    """Letter to byte, as GPT-2 writes them: printable ones as themselves, the rest from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(unprintable)}


def _from_letters(token: str, letters: Mapping[str, int]) -> bytes:
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode(errors="replace")
