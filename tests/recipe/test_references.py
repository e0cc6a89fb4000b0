"""How a model is named: path, revision and adapter, as one text or as a mapping."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.recipe.references import UnreadableReference, identity, parse_reference
from tests.support.laws import examples

NAMES = st.from_regex(r"[a-z0-9_.-]{1,8}(/[a-z0-9_-]{1,8})?", fullmatch=True).filter(
    lambda name: not name.startswith(".")
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/a", ("org/a", None, None, None)),
        ("org/a@v1", ("org/a", "v1", None, None)),
        ("org/a@feature/x", ("org/a", "feature/x", None, None)),
        ("org/a+org/b", ("org/a", None, "org/b", None)),
        ("org/a@v1+org/b@v2", ("org/a", "v1", "org/b", "v2")),
        ("/models/a+lora", ("/models/a", None, "lora", None)),
        ("/models/a@v1+lora@v2", ("/models/a", "v1", "lora", "v2")),
        ("./base+./loras/x", ("./base", None, "./loras/x", None)),
        ("~/base+/data/x@v2", ("~/base", None, "/data/x", "v2")),
        ("/data/c++/model", ("/data/c++/model", None, None, None)),
        ("/home/me@work/model", ("/home/me@work/model", None, None, None)),
        ("/a+b/model", ("/a+b/model", None, None, None)),
        ("../a+b/model@r", ("../a+b/model", "r", None, None)),
        ("a b", ("a b", None, None, None)),
    ],
)
def test_a_text_is_split_into_model_and_adapter(text: str, parts: tuple[str | None, ...]) -> None:
    model, revision, lora, lora_revision = parts
    assert model is not None
    assert parse_reference(text) == ModelRef(text, model, revision, lora, lora_revision)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "expected a catalog name or a path, found ''"),
        (" a", "expected a catalog name or a path"),
        (None, "found None"),
        (["a"], "expected a catalog name or a path"),
        ("a+b+c", "one LoRA adapter, found 2"),
        ("+b", "a name on either side of `\\+`"),
        ("a@", "a name on either side of `@`"),
        ("a@b@c", "several `@`"),
        ({}, "needs `model:"),
        ({"model": {"path": 1}}, "needs `path:`, a text, found 1"),
        ({"model": {"path": "a", "revision": 2}}, "a revision is a text in quotes, found 2"),
        ({"model": {"path": "a", "rev": "2"}}, "unknown key `rev` of a model"),
        ({"model": "a", "loras": "b"}, "unknown key `loras`.*did you mean `lora`"),
        ({"model": "a", "lora": 3}, "`lora` is a text or"),
    ],
)
def test_what_names_no_model_is_refused(value: object, problem: str) -> None:
    with pytest.raises(UnreadableReference, match=problem):
        parse_reference(value)


@settings(max_examples=examples(50), deadline=None)
@given(NAMES, st.none() | NAMES, st.none() | NAMES, st.none() | NAMES)
def test_a_mapping_and_its_text_name_the_same_model(
    path: str, revision: str | None, lora: str | None, lora_revision: str | None
) -> None:
    mapping: dict[str, object] = {"model": {"path": path, "revision": revision}}
    if lora is not None:
        mapping["lora"] = {"path": lora, "revision": lora_revision}
    ref = parse_reference(mapping)
    assert identity(ref) == identity(parse_reference(ref.text))
    assert (ref.model, ref.lora) == (path, lora)
