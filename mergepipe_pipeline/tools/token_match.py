"""Matches the tokens of two vocabularies: by their bytes, by their part, by their first bytes.

Byte-level BPE writes bytes as letters (` hello` is `Ġhello`), sentencepiece writes a blank as `▁`
and single bytes as `<0x0A>`; both are compared as the bytes that they mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergepipe_pipeline.tokenizer.model_tokenizer import (
    CONFIG,
    SPECIAL_MAP,
    TOKENIZER,
    ModelTokenizer,
    json_object,
)

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
#: The parts that special tokens play, by the keys of tokenizer_config.json.
_PARTS = tuple(f"{part}_token" for part in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


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
        **json_object(tokenizer.files, CONFIG, tokenizer.name),
    }
    tokens = {part: named.get(part) for part in _PARTS}
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
