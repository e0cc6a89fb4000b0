"""Shown text harms nobody: terminals are not steered, JSON is JSON, Markdown shows letters."""

from __future__ import annotations

import json
import math
from unicodedata import category

from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.text import in_one_line, json_text, listed, markdown, visible

ANY = st.text(st.characters(exclude_categories=())) | st.text("\x1b\x9b\u202e\n\r\ud800|`[a")


@given(ANY)
def test_shown_text_steers_no_terminal_and_begins_no_line_of_its_own(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert not {category(c) for c in shown if c != "\n"} & {"Cc", "Cs"}
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028")
    assert all(line.startswith(" ") for line in shown.split("\n")[1:])
    assert visible(shown) == shown
    assert "\n" not in in_one_line(text)


def test_plain_text_is_shown_as_it_is() -> None:
    for text in ("expert_01", "größer – 日本語 👍", "first\n  1. second"):
        assert visible(text) == text
    assert visible("a\x1b[2Jb\u202ec\udcff") == r"a\x1b[2Jb\u202ec\udcff"


@given(
    st.recursive(
        st.none() | st.floats() | st.integers() | ANY,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_is_read_back_with_null_for_what_is_not_finite(data: object) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = json_text(data)
    text.encode()
    assert json.loads(text, parse_constant=refuse) == _expected(data)


def _expected(data: object) -> object:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, list):
        return [_expected(item) for item in data]
    if isinstance(data, dict):
        return {k: _expected(v) for k, v in data.items()}
    return data


def test_markdown_in_a_name_is_shown_letter_by_letter() -> None:
    assert markdown("expert_01-v2.0") == "expert_01-v2.0"
    assert markdown("_x_ __y__ a_b _.c") == r"\_x\_ \_\_y\_\_ a_b \_.c"
    assert markdown("a|b`c\n# d") == r"a\|b\`c\\n# d"
    assert markdown("[x](https://evil) <b> www.evil") == (r"\[x\](https:\//evil) \<b\> www\.evil")


def test_a_list_says_how_many_words_are_left() -> None:
    assert listed([], 2) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(dict.fromkeys("abc"), 2, "tensors more") == "a, b and 1 tensors more"
