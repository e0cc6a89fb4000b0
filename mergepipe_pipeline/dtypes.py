"""Names and sizes of element types, in the three vocabularies that meet here.

safetensors codes (`BF16`) are the project's own names; YAML and config.json say `bfloat16`; torch
has its objects, which the engine asks for by the YAML name. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable

from mergepipe_pipeline.errors import RecipeError

#: Bytes per element, by safetensors code. Sub-byte types are refused by the header parser.
ITEMSIZE: dict[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
#: Bits of exponent and of fraction of the floating-point types, the narrowest first.
_FORMATS: dict[str, tuple[int, int]] = {
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
    "F16": (5, 10),
    "BF16": (8, 7),
    "F32": (8, 23),
    "F64": (11, 52),
}
#: Codes whose elements a merge can do arithmetic on.
FLOATING = frozenset(_FORMATS)
#: The largest finite value; beyond it lies infinity. F8_E4M3 has none, and torch cuts off there.
LARGEST: dict[str, float] = {
    "F64": 1.7976931348623157e308,
    "F32": 3.4028234663852886e38,
    "F16": 65504.0,
    "BF16": 3.3895313892515355e38,
    "F8_E4M3": 448.0,
    "F8_E5M2": 57344.0,
}

TORCH_NAME: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_FROM_NAME = {name: code for code, name in TORCH_NAME.items() if code in FLOATING}
_FROM_NAME |= {"float": "F32", "half": "F16", "double": "F64"}

#: In a recipe: most weights as F8_E4M3 with a scale for each block, what is left as BF16.
FP8_BLOCKS = "float8_e4m3_block"


def itemsize(code: str) -> int:
    """Bytes per element of a safetensors dtype code; KeyError for an unknown one."""
    return ITEMSIZE[code]


def promoted(codes: Iterable[str]) -> str:
    """The narrowest floating-point type that has every number of all of `codes`, at least one.

    As torch promotes (bf16 with f16 gives f32), and for float8 too, which torch does not promote.
    """
    formats = [_FORMATS[code] for code in codes]
    exponent, fraction = (max(bits) for bits in zip(*formats, strict=True))
    return next(c for c, (e, f) in _FORMATS.items() if e >= exponent and f >= fraction)


def code_from_name(name: str, where: str) -> str:
    """The safetensors code of a dtype named as in YAML (`bfloat16`, `torch.bfloat16`).

    Raises RecipeError for a name that is no floating-point dtype.
    """
    try:
        return _FROM_NAME[name.removeprefix("torch.")]
    except KeyError:
        raise RecipeError(
            "Unknown dtype",
            where=where,
            expected="one of " + ", ".join(sorted(_FROM_NAME)),
            found=repr(name),
            next_step="use float32, float16 or bfloat16",
        ) from None
