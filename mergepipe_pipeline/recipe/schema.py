"""The keys of a recipe, strictly: mergekit's that are supported, and the project's own.

Pydantic checks shapes and texts here and nowhere else. What a parameter's value means is in
`parameters`, what a budget means in `budget`, and whether keys fit a method in `checks`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from mergepipe_pipeline.dtypes import code_from_name
from mergepipe_pipeline.errors import RecipeError
from mergepipe_pipeline.recipe.problems import KeyPath, Problems, shown, suggest
from mergepipe_pipeline.spec.blocks import BlockGrid

DEFAULT_SCHEDULE = "0 3 * * *"
#: Names of budget strategies, for a reader who has no planner at hand.
STRATEGIES = ("full", "magnitude", "hash", "drop-experts")

#: Keys of mergekit that are understood but not acted on.
NOT_YET = {
    "slices": "list whole models under `models:`",
    "modules": "list whole models under `models:`",
    "tokenizer": "leave it out: the base's tokenizer is copied",
    "chat_template": "leave it out: the base's template is copied",
    "layer_range": "whole models are merged; leave it out",
}
#: Parameter names of mergekit, known to be misplaced when they stand beside `parameters:`.
PARAMETER_NAMES = frozenset(
    ("weight", "density", "normalize", "rescale", "lambda", "int8_mask", "t", "gamma", "epsilon")
)

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_CRON_PART = re.compile(r"(?:\*|([0-9]{1,2})(?:-([0-9]{1,2}))?)(?:/([0-9]{1,2}))?", re.ASCII)
_CRON_LIMITS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def _refuse(kind: str, text: str) -> PydanticCustomError:
    # The text goes through the context: a message template would interpret its braces.
    return PydanticCustomError("recipe", "{text}", {"text": text, "kind": kind})


def _model_text(value: str) -> str:
    if not value.strip() or value != value.strip() or "\0" in value:
        raise _refuse("model", f"expected a catalog name or a path, found {shown(value)}")
    # In a path, the folders above may be named at will.
    last = value.rsplit("/", 1)[-1] if value.startswith(("/", ".", "~")) else value
    for sign, part in (("+", "LoRA"), ("@", "revision")):
        if sign in last:
            named = last[last.index(sign) :]
            raise _refuse(
                "model",
                f"the {part} part {shown(named)} is not supported yet; "
                "register the finished checkpoint under a name and use that",
            )
    return value


def _dtype_code(value: str) -> str:
    try:
        return code_from_name(value, "dtype")
    except RecipeError as error:
        raise _refuse("dtype", f"expected {error.expected}, found {error.found}") from None


def _ref(value: str) -> str:
    if not _REF.fullmatch(value):
        raise _refuse(
            "ref",
            "expected up to 128 letters, digits, `.`, `_`, `-`, the first a letter or digit, "
            f"found {shown(value)}",
        )
    return value


def _block_size(value: int) -> int:
    try:
        BlockGrid(value)
    except ValueError as error:
        raise _refuse("block_size", str(error).replace("block_elems", "block_size")) from None
    return value


def _schedule(value: str) -> str:
    fields = value.split()
    if len(fields) != len(_CRON_LIMITS) or not all(
        _is_cron_field(field, *limits) for field, limits in zip(fields, _CRON_LIMITS, strict=True)
    ):
        raise _refuse(
            "schedule",
            "expected five cron fields in numbers (minute hour day month weekday) like "
            f"{DEFAULT_SCHEDULE!r}, found {shown(value)}",
        )
    return value


def _is_cron_field(field: str, lowest: int, highest: int) -> bool:
    for part in field.split(","):
        match = _CRON_PART.fullmatch(part)
        if match is None:
            return False
        first, last, step = (int(g) if g else None for g in match.groups())
        bounds = [n for n in (first, last) if n is not None]
        if any(not lowest <= n <= highest for n in bounds) or bounds != sorted(bounds):
            return False
        if step == 0 or (step is not None and len(bounds) == 1):
            return False
    return True


ModelText = Annotated[str, AfterValidator(_model_text)]
DtypeCode = Annotated[str, AfterValidator(_dtype_code)]
Ref = Annotated[str, AfterValidator(_ref)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelYaml(_Strict):
    """One entry of `models:`."""

    model: ModelText
    parameters: dict[str, Any] | None = None


class RecipeYaml(_Strict):
    """A recipe's top level; `dtype` and `out_dtype` come out as safetensors codes."""

    merge_method: str
    models: list[ModelYaml]
    base_model: ModelText | None = None
    parameters: dict[str, Any] | None = None
    dtype: DtypeCode | None = None
    out_dtype: DtypeCode | None = None
    tokenizer_source: Literal["base"] | None = None
    budget: Any = None
    strategy: str = "magnitude"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    ref: Ref | None = None
    schedule: Annotated[str, AfterValidator(_schedule)] = DEFAULT_SCHEDULE
    block_size: Annotated[int, AfterValidator(_block_size)] | None = None


def validate(value: Mapping[str, object], problems: Problems) -> RecipeYaml | None:
    """The recipe's keys, or None with every misfit added to `problems`."""
    try:
        return RecipeYaml.model_validate(value)
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            text = _sentence(error, value)
            if text:
                problems.add(tuple(error["loc"]), text)
        return None


def check_strategy(value: object, strategies: Collection[str], problems: Problems) -> None:
    """Add a problem if `value` is a text, but none of `strategies`."""
    if isinstance(value, str) and value not in strategies:
        problems.add(
            ("strategy",),
            f"expected one of {', '.join(strategies)}, found {shown(value)}"
            f"{suggest(value, strategies)}",
        )


def ref_problem(name: str) -> str | None:
    """Why `name` cannot be a ref, or None if it can."""
    try:
        _ref(name)
    except PydanticCustomError as error:
        return error.message()
    return None


def _sentence(error: ErrorDetails, value: Mapping[str, object]) -> str:
    path, found = tuple(error["loc"]), error["input"]
    key = str(path[-1])
    if error["type"] == "extra_forbidden":
        return _unknown_key(key, path)
    if error["type"] == "missing":
        # Slices and modules stand in the place of models and are reported themselves.
        replaced = key == "models" and not {"slices", "modules"}.isdisjoint(value)
        return "" if replaced else "this key is required and missing"
    if error["type"] == "recipe":
        return error["msg"]
    if key == "tokenizer_source":
        return f"only `base` is supported yet, found {shown(found)}"
    if key in {"model", "base_model"} and isinstance(found, dict):
        return "a model as a mapping (path, revision, lora) is not supported yet; write one text"
    if error["type"] == "model_type":
        return f"expected a mapping with `model:`, found {shown(found)}"
    return f"{error['msg'].replace('Input should be', 'expected')}, found {shown(found)}"


def _unknown_key(key: str, path: KeyPath) -> str:
    if key in NOT_YET:
        return f"`{key}` is not supported yet; {NOT_YET[key]}"
    if key in PARAMETER_NAMES:
        return f"`{key}` is a parameter of the method; move it under `parameters:`"
    known = RecipeYaml.model_fields if len(path) == 1 else ModelYaml.model_fields
    near = suggest(key, known) or f"; known are {', '.join(known)}"
    return f"unknown key `{key}`{near}"
