"""Mappings of a recipe as models of pydantic whose problems are said at their key paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from mergepipe_pipeline.recipe.problems import KeyPath, Problems, sentence_of, shown


class Keys(BaseModel):
    """A mapping with these keys and no others; null counts as if the key were not there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    #: How such a mapping is written, for messages.
    example: ClassVar[str] = "{}"

    @model_validator(mode="before")
    @classmethod
    def _of_mapping(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping like {cls.example}, found {shown(value)}")
        return {key: item for key, item in value.items() if item is not None}

    @classmethod
    def read(cls, value: object, path: KeyPath, problems: Problems) -> Self | None:
        """The mapping at `path`; None with every problem added at its place."""
        try:
            return cls.model_validate(value)
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False):
                problems.add((*path, *error["loc"]), sentence_of(error, cls.keys_at))
        return None

    @classmethod
    def keys_at(cls, path: KeyPath) -> Collection[str]:
        """The keys that may stand where the last part of `path` stands."""
        for part in path[:-1]:
            field = cls.model_fields.get(str(part))
            kinds = (field.annotation, *get_args(field.annotation)) if field else ()
            inner = [k for k in kinds if isinstance(k, type) and issubclass(k, Keys)]
            return inner[0].keys_at(path[1:]) if inner else ()
        return cls.model_fields


def expecting(
    expected: str, is_right: Callable[[Any], bool], convert: Callable[[Any], Any] | None = None
) -> AfterValidator:
    """For `Annotated[Any, …]`: a problem says what is `expected` of what is not right."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"expected {expected}, found {shown(value)}")
        return value if convert is None else convert(value)

    return AfterValidator(check)


def whole(least: int, most: int) -> AfterValidator:
    """For `Annotated[Any, …]`: a whole number from `least` to `most`."""
    expected = f"a whole number from {least:g} to {most:.12g}"
    return expecting(
        expected, lambda v: is_number(v) and least <= v <= most and v % 1 == 0, convert=int
    )


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and neither true nor false."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def is_text(value: object) -> bool:
    """Whether a value is a text that a name or a path can be."""
    return isinstance(value, str) and bool(value) and "\0" not in value
