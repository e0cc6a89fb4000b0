"""The merge key `<<` of YAML, as PyYAML's safe loader reads it, which mergekit uses."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergepipe_pipeline.recipe.yaml_text import read_yaml

KEYS = st.sampled_from("abcd")
MAPPINGS = st.dictionaries(KEYS, st.integers(0, 9) | st.text("xyz", max_size=2), max_size=3)


@given(anchored=st.lists(MAPPINGS, min_size=1, max_size=3), own=MAPPINGS, data=st.data())
def test_keys_are_taken_over_as_mergekit_takes_them(
    anchored: list[dict[str, object]], own: dict[str, object], data: st.DataObject
) -> None:
    lines = []
    for n, mapping in enumerate(anchored):
        earlier = data.draw(st.lists(st.integers(0, n - 1), max_size=1)) if n else []
        merged = [f"<<: *m{e}" for e in earlier]
        pairs = [f"{k}: {json.dumps(v)}" for k, v in mapping.items()]
        lines.append(f"m{n}: &m{n} {{{', '.join(data.draw(st.permutations(merged + pairs)))}}}")
    numbers = st.integers(0, len(anchored) - 1)
    used = data.draw(st.lists(numbers, min_size=1, max_size=3))
    taken = f"<<: [{', '.join(f'*m{n}' for n in used)}]" if len(used) > 1 else f"<<: *m{used[0]}"
    pairs = [f"{k}: {json.dumps(v)}" for k, v in own.items()]
    lines.append(f"it: {{{', '.join(data.draw(st.permutations([taken, *pairs])))}}}")
    text = "\n".join(lines)
    found = read_yaml(text)
    assert not found.problems
    assert found.value == yaml.safe_load(text)


def test_the_line_of_a_key_that_was_taken_over_is_where_it_is_written() -> None:
    found = read_yaml("a: &a\n  x: 1\n  y: 2\nb:\n  <<: *a\n  y: 3\n")
    assert found.value == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}
    assert (found.lines["b", "x"], found.lines["b", "y"]) == (2, 6)


@pytest.mark.parametrize(
    "text",
    [
        "a: {<<: 1}",
        "a: {<<: {x: 1}, <<: {y: 1}}",
        "a: {<<: [{x: 1}, 2]}",
        "a: &a {<<: *a}",
        "a: &a {x: 1, x: 2}\nb: {<<: *a}",
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 24)),
    ],
)
def test_what_cannot_be_taken_over_is_a_problem(text: str) -> None:
    assert read_yaml(text).problems


def test_keys_that_are_looked_at_again_and_again_count() -> None:
    keys = ", ".join(f"k{n}: 1" for n in range(1000))
    text = f"a: &a {{{keys}}}\nb: {{<<: [{', '.join(['*a'] * 1000)}]}}\n"
    assert any("simplify it" in problem for _, problem in read_yaml(text).problems.placed())
