"""Which codes and scales a config states: how numbers are coded, and who shares a scale.

Sources: the quantisers of transformers 5, compressed-tensors and modelopt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: How the bits of a code are a number. I4 and I8 in words of 32 bits are offset by half of their
#: range.
Element = Literal["F8_E4M3", "F8_E5M2", "I8", "I4", "E2M1"]
N_BITS: dict[Element, int] = {"F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "I4": 4, "E2M1": 4}


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a config says of codes: their numbers, and the rows and columns that share a scale.

    `block` 0 stands for all rows or columns. `stored` are the dtypes that codes may have.
    """

    element: Element
    block: tuple[int, int]
    stored: frozenset[str]
    is_turned: bool = False

    def __str__(self) -> str:
        rows, cols = ("all" if n == 0 else str(n) for n in self.block)
        return f"{self.element} with a scale for {rows} × {cols} elements"


def schemes_of(settings: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """The schemes that a config states; none where its method is not decoded."""
    method = settings.get("quant_method")
    if method == "fp8":
        block = settings.get("weight_block_size", [128, 128])
        sizes = _block(block) if block is not None else None
        blocks = [(0, 0), *([sizes] if sizes else [])]
        return tuple(Scheme(e, b, frozenset({e})) for b in blocks for e in _FP8)
    if method == "fbgemm_fp8":
        return tuple(Scheme("F8_E4M3", b, frozenset({"F8_E4M3"})) for b in ((1, 0), (0, 1)))
    if method == "mxfp4":
        return (Scheme("E2M1", (1, 32), frozenset({"U8"}), is_turned=True),)
    if method == "modelopt":
        return {
            "FP8": (Scheme("F8_E4M3", (0, 0), frozenset({"F8_E4M3"})),),
            "NVFP4": (Scheme("E2M1", (1, 16), frozenset({"U8"})),),
        }.get(str(settings.get("quant_algo")), ())
    if method == "compressed-tensors" and not settings.get("transform_config"):
        return tuple(dict.fromkeys(_of_groups(settings)))
    return ()


_FP8: tuple[Element, ...] = ("F8_E4M3", "F8_E5M2")


def _of_groups(settings: Mapping[str, Any]) -> Iterator[Scheme]:
    """The schemes of the groups of modules in a config of compressed-tensors."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind = weights.get("type"), weights.get("num_bits")
        block = _block_of(weights)
        form = group.get("format") or settings.get("format")
        if kind not in _ELEMENTS or block is None or form not in _FORMATS:
            continue
        element, stored = _ELEMENTS[kind]
        yield Scheme(element, block, stored)


#: Formats of compressed-tensors whose codes are as they are named here; others turn or sparsify.
_FORMATS = frozenset(
    {
        None,
        "naive-quantized",
        "float-quantized",
        "int-quantized",
        "pack-quantized",
        "mixed-precision",
        "mxfp8-quantized",
        "mxfp4-pack-quantized",
        "nvfp4-pack-quantized",
    }
)
_ELEMENTS: dict[tuple[Any, Any], tuple[Element, frozenset[str]]] = {
    ("float", 8): ("F8_E4M3", frozenset({"F8_E4M3"})),
    ("float", 4): ("E2M1", frozenset({"U8"})),
    ("int", 8): ("I8", frozenset({"I8", "I32"})),
    ("int", 4): ("I4", frozenset({"I32"})),
}


def _block_of(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns that share a scale, by a strategy of compressed-tensors."""
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy in ("group", "tensor_group"):
        return _block([1, weights.get("group_size")])
    return _block(weights.get("block_structure")) if strategy == "block" else None


def _block(value: Any) -> tuple[int, int] | None:
    is_block = isinstance(value, list | tuple) and len(value) == 2
    if not is_block or not all(type(n) is int and n > 0 for n in value):
        return None
    return value[0], value[1]
