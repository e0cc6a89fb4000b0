"""JSON that passes the border can be written again; whatever cannot is refused there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.errors import IncompleteCheckpointError
from mergepipe_pipeline.storage.json_text import load_object, parse_json
from tests.hostile.corpus import TEXTS

TEXT = st.text(st.characters(), max_size=4)  # surrogates among them
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_a_value_is_read_as_it_is_or_refused_for_a_text_that_is_none(value: Any) -> None:
    text = json.dumps(value)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(ValueError, match="half of a character"):
            parse_json(text)
    else:
        assert parse_json(text) == parse_json(text.encode()) == value


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_bytes_are_refused_with_a_valueerror_or_can_be_written_again(data: bytes) -> None:
    try:
        value = parse_json(data)
    except ValueError:
        return
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=2).encode()) == value


@pytest.mark.parametrize("what", TEXTS)
def test_a_hostile_text_is_refused_with_its_file(what: str) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"A thing cannot be read.*m/x\.json"):
        load_object(TEXTS[what].replace(b"%s", b""), "m/x.json", "A thing")


@pytest.mark.parametrize(
    "text", ['{"time_step_limit": [0.0, Infinity]}', '{"model_max_length": 1%s}' % ("0" * 30)]
)
def test_what_sound_models_have_is_read(text: str) -> None:
    assert json.loads(json.dumps(parse_json(text))) == json.loads(text)


def test_pairs_of_surrogates_are_the_character_that_they_mean() -> None:
    assert parse_json(rb'{"x": "\ud83d\ude00"}') == {"x": "😀"}


def test_a_number_of_absurd_length_is_refused_in_plain_words() -> None:
    with pytest.raises(ValueError, match=r"^a number has more than 4300 digits$"):
        parse_json('{"a": %s}' % ("9" * 5000))
