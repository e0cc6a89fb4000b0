"""Mappings of a recipe as models of pydantic whose problems are said at their key paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from mergepipe_pipeline.recipe.problems import KeyPath, Problems, sentence_of, shown
from mergepipe_pipeline.recipe.references import UnreadableReference, parse_reference


class Keys(BaseModel):
    """A mapping with these keys and no others; null counts as if the key were not there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    #: How such a mapping is written, for messages; the first key where that says enough.
    example: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _of_mapping(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            how = f"like {cls.example}" if cls.example else f"with `{cls.names()[0]}:`"
            raise ValueError(f"expected a mapping {how}, found {shown(value)}")
        names = cls.names()
        return {key: v for key, v in value.items() if v is not None or key not in names}

    @classmethod
    def read(cls, value: object, path: KeyPath, problems: Problems) -> Self | None:
        """The mapping at `path`; None with every problem added at its place."""
        try:
            return cls.model_validate(value)
        except ValidationError as invalid:
            for error in invalid.errors(include_url=False):
                loc = (part for part in error["loc"] if part != "[key]")  # pydantic's, of a dict
                problems.add((*path, *loc), sentence_of(error, cls.keys_at))
        return None

    @classmethod
    def names(cls) -> list[str]:
        """The keys, as they are written."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def keys_at(cls, path: KeyPath) -> Collection[str]:
        """The keys that may stand where the last part of `path` stands."""
        if len(path) == 1:
            return cls.names()
        by_name = dict(zip(cls.names(), cls.model_fields.values(), strict=True))
        field = by_name.get(str(path[0]))
        return () if field is None else _keys_in(field.annotation, path[1:])


def _keys_in(kind: Any, path: KeyPath) -> Collection[str]:
    """The keys at a path below a value of a kind: a mapping, or a list or an option of such."""
    if isinstance(kind, type) and issubclass(kind, Keys):
        return kind.keys_at(path)
    below = path[1:] if get_origin(kind) in (list, tuple, dict) else path
    found = (_keys_in(part, below) for part in get_args(kind) if below)
    return next(filter(None, found), ())


def expecting(
    expected: str, is_right: Callable[[Any], bool], convert: Callable[[Any], Any] | None = None
) -> AfterValidator:
    """For `Annotated[Any, …]`: a problem says what is `expected` of what is not right."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"expected {expected}, found {shown(value)}")
        return value if convert is None else convert(value)

    return AfterValidator(check)


def readable(value: Any) -> Any:
    """The value that names a model. Raises ValueError for what cannot be read as a reference."""
    try:
        parse_reference(value)
    except UnreadableReference as error:
        raise ValueError(str(error)) from None
    return value


#: A model as recipes name one, as it is written.
Reference = Annotated[Any, AfterValidator(readable)]


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


def is_bool(value: Any) -> bool:
    """Whether a value is true or false."""
    return isinstance(value, bool)


def is_text(value: object) -> bool:
    """Whether a value is a text that a name or a path can be."""
    return isinstance(value, str) and bool(value) and "\0" not in value
