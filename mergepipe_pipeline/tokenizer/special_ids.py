"""The ids of tokens that a config and a generation config state, for the output's vocabulary.

Ids follow their tokens' texts. Where the tokenizer is another model's, that model's statements
count; the model whose chat template the output has says which tokens end a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mergepipe_pipeline.errors import IncompatibleCheckpointsError
from mergepipe_pipeline.tokenizer.model_tokenizer import (
    CONFIG,
    SPECIAL_MAP,
    ModelTokenizer,
    json_object,
)

EOS, GENERATION = "eos_token_id", "generation_config.json"
#: Keys whose value is an id or a list of such; of codecs' codes there is no token.
_ID_KEY = re.compile(r"^(?!codec|codebook).*_token_(?:ids?|index)$")
#: Keys of generation configs whose values are made of ids in forms of their own.
_LISTS = frozenset({"suppress_tokens", "begin_suppress_tokens"})
_SEQUENCES = frozenset({"bad_words_ids", "force_words_ids"})
_BY_TEXT = frozenset({"lang_to_id", "task_to_id"})
_FORCED, _BIAS = "forced_decoder_ids", "sequence_bias"
#: Keys whose ids a model can do without.
_SPARE = frozenset(
    {f"{kind}_token_id" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    | {"eos_token_ids", *_LISTS, *_SEQUENCES, *_BY_TEXT, _FORCED, _BIAS}
)
#: Ids that a config states for a generation config that does not.
_ALSO_GENERATION = frozenset({"bos_token_id", EOS, "pad_token_id"})
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Statement:
    """One model's statement of its tokens' ids, and its vocabulary.

    `generation` is None for a model without generation_config.json; `eos` is the token that its
    tokenizer names as the end.
    """

    name: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any] | None
    vocab: Mapping[str, int]
    eos: str | None = None

    def of(self, key: str) -> Any:
        """The value of a key in its config or the config's text part; `_MISSING` if in neither."""
        part = self.config.get("text_config")
        inner = part.get(key, _MISSING) if isinstance(part, dict) else _MISSING
        found = self.config.get(key, _MISSING)
        return inner if found in (_MISSING, None) and inner is not _MISSING else found

    def ends(self) -> Any:
        """The ids that it states to end its texts; None if it states none."""
        said = (self.generation or {}).get(EOS)
        said = self.of(EOS) if said is None else said
        return None if said is _MISSING else said


def statement_of(
    tokenizer: ModelTokenizer, name: str, config: Mapping[str, Any], files: Mapping[str, bytes]
) -> Statement:
    """The statement of a model's config and its other files. Raises CheckpointError."""
    generation = json_object(files, GENERATION, name) if GENERATION in files else None
    eos: Any = None
    for file in (CONFIG, SPECIAL_MAP):
        eos = eos or json_object(tokenizer.files, file, name).get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    named = eos if isinstance(eos, str) else None
    return Statement(name, config, generation, tokenizer.vocab, named)


@dataclass
class Followed:
    """Changes of a config as (dotted key, value), the generation config (None: as it is), and
    a warning per id that is lost.
    """

    config: list[tuple[str, Any]] = field(default_factory=list)
    generation: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


class _Ids:
    """The ids of one model's tokens in the output's vocabulary."""

    def __init__(self, of: Statement, vocab: Mapping[str, int], n_rows: int) -> None:
        self._texts = {i: token for token, i in of.vocab.items()}
        self._vocab = vocab
        self._taken = frozenset(vocab.values())
        # Rows without a token stay where all others do.
        stays = all(vocab.get(token, i) == i for token, i in of.vocab.items())
        self._n_rows = n_rows if stays else 0

    def __call__(self, old: Any) -> int | None:
        """The new id of a token, None if the output has no such token."""
        if type(old) is not int or old < 0:
            return old if type(old) is int else None
        if old in self._texts:
            return self._vocab.get(self._texts[old])
        return old if old < self._n_rows and old not in self._taken else None


def followed(
    own: Statement, source: Statement, ending: Statement, vocab: Mapping[str, int], n_rows: int
) -> Followed:
    """Follow the ids in the files of the model `own`.

    `source` is the model whose tokenizer the output builds on, `ending` the one whose template it
    has; `vocab` is the output's, with `n_rows` rows. Raises IncompatibleCheckpointsError for an id
    whose token the output has not and that the model needs.
    """
    out = Followed()
    ids = {id(m): _Ids(m, vocab, n_rows) for m in (own, source, ending)}

    def moved(key: str, value: Any, of: Statement, file: str) -> Any:
        new, lost = _moved(key, value, ids[id(of)])
        if lost and key not in _SPARE:
            raise _needed(of.name, file, key, lost)
        if lost:
            which = ", ".join(map(str, lost))
            out.warnings.append(
                f"{file}, {key}: {of.name} states {which}, which is no token of the result: it is "
                "left out"
            )
        return new

    ends = moved(EOS, ending.ends(), ending, GENERATION)
    if ends is None:
        ends = moved(EOS, own.ends(), own, GENERATION)
        named = vocab.get(ending.eos or "")
        if ending is not own and named not in (None, *(ends if isinstance(ends, list) else [ends])):
            ends = named
    for place, key, value in _stated(own.config):
        theirs = source.of(key) if source is not own else _MISSING
        if key == EOS and ending is not own:
            said = ending.of(EOS)
            new = None if said is _MISSING else moved(key, said, ending, "config.json")
            new = ends if new is None else new
        elif theirs is not _MISSING:
            new = moved(key, theirs, source, "config.json")
        else:
            new = moved(key, value, own, "config.json")
        out.config += [(place, new)] if new != value else []
    if ending is not own and ends is not None and own.of(EOS) is _MISSING:
        out.config.append((EOS, ends))
    out.generation = _generation(own, source, ending, ends, moved)
    out.warnings = list(dict.fromkeys(out.warnings))
    return out


def _generation(
    own: Statement,
    source: Statement,
    ending: Statement,
    ends: Any,
    moved: Callable[[str, Any, Statement, str], Any],
) -> dict[str, Any] | None:
    """The output's generation config; None if it is the model's own, or none has one."""
    if all(m.generation is None for m in (own, source, ending)):
        return None
    before = own.generation or {}
    after = dict(before)
    said = source.generation or {} if source is not own else {}
    for key in dict.fromkeys([*before, *said]):
        if not _is_id(key):
            continue
        theirs = said.get(key, _MISSING)
        if theirs is _MISSING and source is not own and key in _ALSO_GENERATION:
            theirs = source.of(key)
        if key != EOS or ending is own:
            of = own if theirs is _MISSING else source
            after[key] = moved(key, before[key] if of is own else theirs, of, GENERATION)
    if ending is not own:
        after[EOS] = ends
    after = {k: v for k, v in after.items() if v is not None or k in before}
    return None if after == before and own.generation is not None else after


def _is_id(key: str) -> bool:
    return _ID_KEY.search(key) is not None or key in _SPARE


def _stated(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Place, key and value of each id in a config and in its text part."""
    part = config.get("text_config")
    for above, values in (("", config), ("text_config.", part if isinstance(part, dict) else {})):
        for key, value in values.items():
            if _is_id(key):
                yield f"{above}{key}", key, value


def _moved(key: str, value: Any, ids: _Ids) -> tuple[Any, list[Any]]:
    """A value with the ids of the output, and what of it the output has not."""
    if value is None or value is _MISSING:
        return None, []
    if not isinstance(value, list | dict):
        new = ids(value)
        return new, [value] if new is None else []
    if isinstance(value, dict):
        items: list[tuple[Any, Any]] = [(v, (k, ids(v))) for k, v in value.items()]
        kept = {k: i for _, (k, i) in items if i is not None}
        return kept, [v for v, (_, i) in items if i is None]
    news = [(v, _moved_entry(key, v, ids)) for v in value]
    kept_list = [new for _, new in news if new is not None]
    lost = [v for v, new in news if new is None]
    return kept_list or (None if value else value), lost


def _moved_entry(key: str, entry: Any, ids: _Ids) -> Any:
    """An entry of a list: an id, ids in a row, a forced [position, id], or [ids, bias]."""
    if not isinstance(entry, list):
        return ids(entry)
    if key == _FORCED and len(entry) == 2:
        new = ids(entry[1])
        return [entry[0], new] if new is not None or entry[1] is None else None
    if key == _BIAS and len(entry) == 2:
        sequence = _moved_entry("", entry[0], ids) if isinstance(entry[0], list) else None
        return None if sequence is None else [sequence, entry[1]]
    news = [_moved_entry("", part, ids) for part in entry]
    return None if None in news else news


def _needed(name: str, file: str, key: str, lost: list[Any]) -> IncompatibleCheckpointsError:
    return IncompatibleCheckpointsError(
        "A model needs a token that the result's tokenizer has not",
        where=f"{name}, {file}, {key}",
        expected="a token of the result",
        found=", ".join(map(str, lost)),
        next_step="use `tokenizer_source: union`, or the tokenizer of a model that has the token",
    )
