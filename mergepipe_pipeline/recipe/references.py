"""How a recipe names a model: `path[@revision][+lora[@revision]]`, or the same as a mapping.

A path may be an address: `hf://org/model@revision`, `s3://bucket/prefix`.

Splitting is a reading of the text alone. A folder that exists under the text as written is that
folder: whoever resolves references to files asks `ModelRef.text` first.
"""

from __future__ import annotations

from collections.abc import Mapping

from mergepipe_pipeline.domain.recipe import ModelRef
from mergepipe_pipeline.recipe.problems import shown, unknown_key
from mergepipe_pipeline.secrets import discreet

_PATH_STARTS = ("/", ".", "~")
_HUB = "hf://"
#: What to do with several adapters on one model.
ONE_BY_ONE = (
    "merge the model with its first adapter in a document before this one (`name: first`, "
    "`merge_method: passthrough`), and write first+ADAPTER here"
)
_MAPPING_KEYS = ("model", "lora", "override_architecture")


class UnreadableReference(ValueError):
    """A model reference that cannot be read; the message says why."""


def parse_reference(value: object) -> ModelRef:
    """The model that a text or mapping names.

    Raises UnreadableReference with what is wrong, for the caller to place.
    """
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    raise UnreadableReference(f"expected a catalog name or a path, found {shown(value)}")


def identity(ref: ModelRef) -> tuple[str | None, ...]:
    """The identity of a reference: everything but the text."""
    return (ref.model, ref.revision, ref.lora, ref.lora_revision)


def overrides_architecture(value: object) -> bool:
    """Whether a reference asks for another architecture, which tensor names make needless."""
    return isinstance(value, Mapping) and value.get("override_architecture") is not None


def _from_text(text: str) -> ModelRef:
    _check(text)
    model, lora = _split_lora(text)
    model, revision = _split_revision(model, text)
    if lora is None:
        return ModelRef(text, model, revision)
    lora, lora_revision = _split_revision(lora, text)
    return ModelRef(text, model, revision, lora, lora_revision)


def _check(text: str) -> None:
    if not text.strip() or text != text.strip() or "\0" in text:
        raise UnreadableReference(f"expected a catalog name or a path, found {shown(text)}")
    if discreet(text) != text:  # before a sign in a signature is taken for that of an adapter
        raise UnreadableReference(
            "expected an address without user, password, ? and #, which may be secrets, found "
            f"{shown(discreet(text))}: give credentials in the environment, or download the model"
        )


def _split_lora(text: str) -> tuple[str, str | None]:
    signs = text.count("+")
    if not signs:
        return text, None
    before, _, after = text.partition("+")
    if "://" in before and not before.startswith(_HUB) and "://" not in after:
        # As in a path: folders of a bucket may be named at will.
        if signs != 1 or not after.startswith(_PATH_STARTS):
            return text, None
    elif text.startswith(_PATH_STARTS):
        # In a path, the folders above may be named at will: only the last part is split, or a
        # single sign with another path behind it.
        folder, _, last = text.rpartition("/")
        if last.count("+") == 1:
            tail, _, after = last.partition("+")
            before = f"{folder}/{tail}" if "/" in text else tail
        elif signs != 1 or not after.startswith(_PATH_STARTS):
            return text, None
    elif signs > 1:
        raise UnreadableReference(
            f"a model takes one LoRA adapter, found {signs} in {shown(text)}: {ONE_BY_ONE}"
        )
    if not before or not after:
        raise UnreadableReference(f"expected a name on either side of `+`, found {shown(text)}")
    return before, after


def _split_revision(name: str, text: str) -> tuple[str, str | None]:
    if "://" in name and not name.startswith(_HUB):
        return name, None  # only the hub has revisions: elsewhere the sign is part of a name
    cut = name.rfind("/") + 1 if name.startswith(_PATH_STARTS) else 0
    last = name[cut:]
    if "@" not in last:
        return name, None
    if last.count("@") > 1:
        raise UnreadableReference(f"a model takes one revision, found several `@` in {shown(text)}")
    head, _, revision = last.partition("@")
    if not head or not revision:
        raise UnreadableReference(f"expected a name on either side of `@`, found {shown(text)}")
    return name[:cut] + head, revision


def _from_mapping(value: Mapping[str, object]) -> ModelRef:
    _check_keys(value, _MAPPING_KEYS)
    if "model" not in value:
        raise UnreadableReference("a model as a mapping needs `model: {path: …}`")
    model, revision = _part(value["model"], "model")
    text = model if revision is None else f"{model}@{revision}"
    if value.get("lora") is None:
        return ModelRef(text, model, revision)
    lora, lora_revision = _part(value["lora"], "lora")
    text += f"+{lora}" if lora_revision is None else f"+{lora}@{lora_revision}"
    return ModelRef(text, model, revision, lora, lora_revision)


def _part(value: object, key: str) -> tuple[str, str | None]:
    if isinstance(value, str):
        _check(value)
        return _split_revision(value, value)
    if not isinstance(value, Mapping):
        raise UnreadableReference(f"`{key}` is a text or {{path, revision}}, found {shown(value)}")
    _check_keys(value, ("path", "revision"))
    path, revision = value.get("path"), value.get("revision")
    if not isinstance(path, str):
        raise UnreadableReference(f"`{key}` needs `path:`, a text, found {shown(path)}")
    _check(path)
    if revision is not None and not isinstance(revision, str):
        raise UnreadableReference(f"a revision is a text in quotes, found {shown(revision)}")
    return path, revision or None


def _check_keys(value: Mapping[str, object], known: tuple[str, ...]) -> None:
    for key in value:
        if key not in known:
            raise UnreadableReference(unknown_key(key, known, of=" of a model"))
