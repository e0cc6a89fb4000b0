"""What vocabulary files mean: as the libraries that load them number the tokens."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.tokenizer.model_tokenizer import read_tokenizer
from tests.support.laws import examples
from tests.tokenizer.models import document, entry, files_of

EXTRA = ("extra_special_tokens", "additional_special_tokens", "added_tokens_decoder")


@given(
    st.lists(st.sampled_from("abcdef"), unique=True, min_size=1),
    st.permutations(range(9)),
    st.lists(st.tuples(st.sampled_from("defghi"), st.integers(0, 20)), max_size=5),
)
@settings(max_examples=examples(50), deadline=None)
def test_ids_are_those_of_the_tokenizers_library(
    tokens: list[str], ids: list[int], added: list[tuple[str, int]]
) -> None:
    vocab = dict(zip(tokens, ids, strict=False))
    doc = document(vocab, [entry(t, i) for t, i in added])
    files = {"tokenizer.json": json.dumps(doc).encode()}
    loaded = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert read_tokenizer("m", files, 99).vocab == loaded.get_vocab()


def test_special_tokens_of_the_configuration_are_added_behind(tmp_path: Path) -> None:
    files = files_of(
        document({"x": 0, "<unk>": 1}),
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token={"__type": "AddedToken", "content": "<s>", "lstrip": True},
        additional_special_tokens=["<tool>"],
    )
    model = read_tokenizer("m", files, 9)
    assert model.vocab == {"x": 0, "<unk>": 1, "<s>": 2, "<pad>": 3, "<tool>": 4}
    assert [t.content for t in model.added if t.special] == ["<unk>", "<s>", "<pad>", "<tool>"]
    assert model.added[1].lstrip
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    assert AutoTokenizer.from_pretrained(str(tmp_path)).get_vocab() == model.vocab


def test_word_piece_lists_and_added_tokens_files_are_read() -> None:
    files = {
        "vocab.txt": b"[PAD]\n[UNK]\nab\n##c\n",
        "added_tokens.json": b'{"late": 5, "early": 4}',
        "special_tokens_map.json": b'{"pad_token": "[PAD]"}',
    }
    assert read_tokenizer("m", files, 9).vocab == {
        "[PAD]": 0,
        "[UNK]": 1,
        "ab": 2,
        "##c": 3,
        "early": 4,
        "late": 5,
    }


def test_other_files_of_a_model_are_left_out() -> None:
    files = files_of(document({"x": 0}))
    assert read_tokenizer("m", {**files, "config.json": b"{}"}, 1).files == files


def test_a_sentencepiece_file_alone_is_refused_with_the_way_to_convert_it() -> None:
    with pytest.raises(CheckpointError, match=r"m/tokenizer\.model.*Next: convert it"):
        read_tokenizer("m", {"tokenizer.model": b"\n\x0e"}, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "a JSON object, found Expecting"),
        (b"\xff", "utf-8"),
        (b"[]", "a JSON object, found list"),
        (b"{}", "found NoneType"),
        (b'{"model": []}', "found NoneType"),
        (b'{"model": {"vocab": "x"}}', "found str"),
        (b'{"model": {"vocab": {"x": -1}}}', "'x': -1"),
        (b'{"model": {"vocab": {"x": true}}}', "'x': True"),
        (b'{"model": {"vocab": {"x": 4294967296}}}', "'x': 4294967296"),
        (b'{"model": {"vocab": [["x"], []]}}', "found list"),
        (b'{"model": {"vocab": [[1, 0.0]]}}', "found list"),
        (b'{"model": {"vocab": [[[], 0.0]]}}', "found list"),
        (b'{"model": {"vocab": {"x": 0}}, "added_tokens": {"y": 1}}', "a list, found dict"),
        (b'{"model": {"vocab": {"x": 0}}, "added_tokens": [{"id": 1}]}', "with `content`"),
        (b"[" * 100_000, "a JSON object, found it is nested"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_tokenizer("m", {"tokenizer.json": data}, 1)
    assert str(caught.value.where).startswith("m/tokenizer.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["model", "vocab", "added_tokens", "bos_token", "content", "1", *EXTRA]
                ),
                inner,
                max_size=3,
            )
        ),
    ),
    st.sampled_from(["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]),
)
@example({"model": {"vocab": []}}, "tokenizer.json")
@example({"model": {"vocab": {}}}, "tokenizer.json")
@settings(max_examples=examples(50), deadline=None)
def test_any_json_is_read_or_refused_on_purpose(value: Any, file: str) -> None:
    files = {**files_of(document({"x": 0})), file: json.dumps(value).encode()}
    with suppress(CheckpointError):
        assert read_tokenizer("m", files, 1).vocab


@pytest.mark.parametrize("id_", ["9" * 5000, "\N{SUPERSCRIPT TWO}", "-1", "x" * 5000])
def test_an_id_of_the_configuration_that_is_none_is_refused_in_few_words(id_: str) -> None:
    files = {"vocab.json": b'{"x": 0}'}
    files["tokenizer_config.json"] = json.dumps({"added_tokens_decoder": {id_: "y"}}).encode()
    with pytest.raises(CheckpointError, match=r"m/tokenizer_config\.json.*ids from 0") as caught:
        read_tokenizer("m", files, 1)
    assert len(str(caught.value)) < 500
