"""Addresses as texts, in recipes and alone."""

from __future__ import annotations

import pytest

from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.recipe.references import UnreadableReference, parse_reference
from mergepipe_pipeline.remote.address import Address, is_address, parse_address
from mergepipe_pipeline.text import visible


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/model", Address("hf", "org/model")),
        ("hf://org/model@refs/pr/3", Address("hf", "org/model", "refs/pr/3")),
        ("hf://gpt2", Address("hf", "gpt2")),
        ("s3://bucket/a@b/model", Address("s3", "bucket/a@b/model")),
        ("gs://bucket", Address("gs", "bucket")),
        ("https://host:8443/folder", Address("https", "host:8443/folder")),
    ],
)
def test_an_address_is_its_text(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert parse_address(text + "/") == expected if "@refs" not in text else True
    assert expected.text == text


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://a/b/c", "s3://", "http:///folder", "https://host/x?token=1", "ftp://host/x"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(RemoteError):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://ann:pa55@host/folder",
        "https://pa55@host/folder",
        "https://ann:pa/pa55@host/folder",
        "s3://key:pa55@bucket/folder",
        "hf://ann:pa55@org/model",
        "https://host/folder?X-Amz-Signature=pa55&a=b+pa55",
        "https://host/folder#pa55",
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(RemoteError, match="may be a secret") as refused:
        parse_address(text)
    assert "pa55" not in str(refused.value) + refused.value.for_terminal() + repr(vars(refused))
    with pytest.raises(UnreadableReference) as unread:
        parse_reference(text)
    assert "pa55" not in str(unread.value)
    assert "pa55" not in visible(f"cannot reach {text!r}: {text}.")


@pytest.mark.parametrize(
    ("text", "model", "revision", "lora", "lora_revision"),
    [
        ("hf://org/model@v1+hf://org/lora@v2", "hf://org/model", "v1", "hf://org/lora", "v2"),
        ("hf://org/model+org/lora", "hf://org/model", None, "org/lora", None),
        ("s3://b/model@v1", "s3://b/model@v1", None, None, None),
        ("s3://b/a+b", "s3://b/a+b", None, None, None),
        ("s3://b/model+s3://b/lora", "s3://b/model", None, "s3://b/lora", None),
        ("https://h/model+/adapters/x", "https://h/model", None, "/adapters/x", None),
    ],
)
def test_recipes_name_models_by_address(
    text: str, model: str, revision: str | None, lora: str | None, lora_revision: str | None
) -> None:
    ref = parse_reference(text)
    assert (ref.model, ref.revision, ref.lora, ref.lora_revision) == (
        model,
        revision,
        lora,
        lora_revision,
    )


def test_a_root_of_this_machine_is_no_address() -> None:
    assert not is_address("models:chat")
    assert not is_address("pack:///w/offline/1")
    assert not is_address("/a/hf://b")
