"""The tokenizer of one model: its files and the vocabulary that they mean.

Read from `tokenizer.json`, or from `vocab.json` or `vocab.txt`. Not a tokenizer: it cannot encode
text. `build` makes the output's tokenizer from several of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.json_text import load_object

TOKENIZER, CONFIG, SPECIAL_MAP = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
ADDED, VOCAB_JSON, VOCAB_TXT, MERGES = "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"
SENTENCEPIECE, TEMPLATE = "tokenizer.model", "chat_template.jinja"
#: Every file of a model folder that belongs to its tokenizer.
FILE_NAMES = (
    TOKENIZER,
    CONFIG,
    SPECIAL_MAP,
    ADDED,
    VOCAB_JSON,
    VOCAB_TXT,
    MERGES,
    SENTENCEPIECE,
    TEMPLATE,
)
#: Special tokens in the order in which transformers adds those that a vocabulary lacks.
SPECIAL_KEYS = tuple(f"{k}_token" for k in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA_KEYS = ("extra_special_tokens", "additional_special_tokens")


def of_tokenizer(name: str) -> bool:
    """Whether a file of a model folder belongs to its tokenizer."""
    return name in FILE_NAMES or name.startswith("additional_chat_templates/")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before the tokenizer's model sees it."""

    content: str
    id: int
    special: bool = False
    normalized: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A model's tokenizer files with the tokens in them.

    `plain` are the tokens of the tokenizer's model, `added` those added to it, by id; a token may
    be both. `n_rows` is the number of rows of the model's embedding. All empty: the model brings no
    tokenizer.
    """

    name: str
    files: Mapping[str, bytes]
    n_rows: int
    plain: Mapping[str, int]
    added: tuple[AddedToken, ...]

    @property
    def vocab(self) -> dict[str, int]:
        """Token to id, of all tokens."""
        return {**self.plain, **{t.content: t.id for t in self.added}}

    @property
    def vocab_in_rows(self) -> dict[str, int]:
        """Token to id, of the tokens whose id is a row of the embedding."""
        return {token: id_ for token, id_ in self.vocab.items() if id_ < self.n_rows}


def read_tokenizer(name: str, files: Mapping[str, bytes], n_rows: int) -> ModelTokenizer:
    """The tokenizer in a model's files (file name to content; files of other kinds are left out).

    Ids are those that Hugging Face `tokenizers` gives when it loads the files: an added token that
    the model's vocabulary lacks gets the next free number, whatever number the file states.
    Raises CheckpointError if the files are damaged or hold only a sentencepiece model.
    """
    kept = {n: files[n] for n in (*FILE_NAMES, *files) if n in files and of_tokenizer(n)}
    if TOKENIZER in kept:
        document = json_object(kept, TOKENIZER, name)
        plain = _plain_of(document, name)
        stated = _added_of(document.get("added_tokens") or [], name)
    elif VOCAB_JSON in kept:
        plain = _ids(json_object(kept, VOCAB_JSON, name), f"{name}/{VOCAB_JSON}")
        stated = []
    elif VOCAB_TXT in kept:
        plain = {t: i for i, t in enumerate(_text(kept, VOCAB_TXT, name).splitlines())}
        stated = []
    elif SENTENCEPIECE in kept:
        raise CheckpointError(
            "A model's tokenizer is there only as a sentencepiece file, which is not read",
            where=f"{name}/{SENTENCEPIECE}",
            expected=TOKENIZER,
            next_step="convert it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    else:
        return ModelTokenizer(name, kept, n_rows, {}, ())
    config = json_object(kept, CONFIG, name)
    added = number(plain, stated, _configured(kept, config, name))
    if not plain and not added:
        raise damaged(f"{name}, its tokenizer", "a vocabulary with tokens", "none")
    return ModelTokenizer(name, kept, n_rows, plain, added)


def number(plain: Mapping[str, int], *batches: Iterable[AddedToken]) -> tuple[AddedToken, ...]:
    """The added tokens as a loader numbers them, by id; the first statement of a token counts.

    A token of the vocabulary keeps its id. The others of a batch count up from the number after
    the highest token added before, or from the size of the vocabulary if that is larger; where the
    vocabulary has gaps, two tokens can so share an id. Source: tokenizers 0.23 `add_tokens`.
    """
    out: dict[str, AddedToken] = {}
    for batch in batches:
        next_id = max([len(plain), *(token.id + 1 for token in out.values())])
        for token in batch:
            if not token.content or token.content in out:
                continue
            out[token.content] = replace(token, id=plain.get(token.content, next_id))
            next_id += token.content not in plain
    return tuple(sorted(out.values(), key=lambda token: token.id))


def json_object(files: Mapping[str, bytes], file: str, name: str) -> dict[str, Any]:
    """The JSON object in a file, empty if the file is not there. Raises CheckpointError."""
    if file not in files:
        return {}
    return load_object(files[file], f"{name}/{file}", "A tokenizer file")


def _text(files: Mapping[str, bytes], file: str, name: str) -> str:
    try:
        return files[file].decode()
    except UnicodeDecodeError as error:
        raise damaged(f"{name}/{file}", "UTF-8 text", str(error)) from error


def _plain_of(document: dict[str, Any], name: str) -> dict[str, int]:
    """The vocabulary of the tokenizer's model: an object, or a list of (token, score)."""
    model = document.get("model")
    where = f"{name}/{TOKENIZER}, model.vocab"
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return _ids(vocab, where)
    if isinstance(vocab, list) and all(
        isinstance(e, list) and e and isinstance(e[0], str) for e in vocab
    ):
        return _ids({e[0]: i for i, e in enumerate(vocab)}, where)
    raise damaged(where, "an object of ids or a list of (token, score)", type(vocab).__name__)


def _ids(value: dict[str, Any], where: str) -> dict[str, int]:
    for token, id_ in value.items():
        if not isinstance(token, str) or type(id_) is not int or not 0 <= id_ < 2**31:
            raise damaged(where, "ids from 0 to 2^31 - 1", f"{token!r:.80}: {id_!r:.80}")
    return value


def _added_of(entries: Any, name: str, file: str = TOKENIZER) -> list[AddedToken]:
    if not isinstance(entries, list):
        raise damaged(f"{name}/{file}, added tokens", "a list", type(entries).__name__)
    return [_added_token(e, f"{name}/{file}, added tokens") for e in entries]


def _added_token(entry: Any, where: str, *, special: bool = False) -> AddedToken:
    """An added token from its JSON form: an object with `content`, or the bare text."""
    if isinstance(entry, str):
        return AddedToken(entry, -1, special, normalized=not special)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise damaged(where, "a token, or an object with `content`", repr(entry)[:80])
    is_special = bool(entry.get("special", special)) or special
    return AddedToken(
        entry["content"],
        -1,
        is_special,
        bool(entry.get("normalized", not is_special)),
        bool(entry.get("single_word", False)),
        bool(entry.get("lstrip", False)),
        bool(entry.get("rstrip", False)),
    )


def _configured(files: Mapping[str, bytes], config: dict[str, Any], name: str) -> list[AddedToken]:
    """Tokens that the files beside the vocabulary add, in transformers' order."""
    out: list[AddedToken] = []
    named: dict[str, Any] = dict(config)
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        # Python reads no number of thousands of digits: longer ones are refused like other texts.
        numbers = {i: int(i) if i.isdecimal() and len(i) <= 10 else -1 for i in decoder}
        by_id = _ids(numbers, f"{name}/{CONFIG}")
        entries = [decoder[i] for i in sorted(decoder, key=by_id.__getitem__)]
        out += _added_of(entries, name, CONFIG)
    else:
        named |= json_object(files, SPECIAL_MAP, name)
        extra = _ids(json_object(files, ADDED, name), f"{name}/{ADDED}")
        specials = {t.content for t in _specials(named, name)}
        out += [
            AddedToken(t, -1, t in specials, normalized=t not in specials)
            for t in sorted(extra, key=extra.__getitem__)
        ]
    return out + _specials(named, name)


def _specials(named: Mapping[str, Any], name: str) -> list[AddedToken]:
    """The special tokens that a configuration names."""
    values: list[Any] = [named[k] for k in SPECIAL_KEYS if named.get(k)]
    for key in _EXTRA_KEYS:
        extra = named.get(key) or []
        if not isinstance(extra, list | dict):
            raise damaged(f"{name}/{CONFIG}, {key}", "a list or an object", repr(extra)[:80])
        values += list(extra.values()) if isinstance(extra, dict) else extra
    return [_added_token(v, f"{name}/{CONFIG}, special tokens", special=True) for v in values]


def damaged(where: str, expected: str, found: str) -> CheckpointError:
    """The error for a file that is no tokenizer's."""
    return CheckpointError(
        "A tokenizer file cannot be read",
        where=where,
        expected=expected,
        found=found,
        next_step="copy the model's tokenizer files again",
    )
