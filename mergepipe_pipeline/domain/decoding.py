"""Which values the codes of a checkpoint mean: logical tensors over stored ones.

What config.json says of its quantisation must fit what the headers say, tensor by tensor; what does
not fit is refused by name. Sources: the quantisers of transformers 5, compressed-tensors and
modelopt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.codes import N_BITS, Codes, Element
from mergepipe_pipeline.domain.stored_form import StoredForm
from mergepipe_pipeline.domain.view import Part
from mergepipe_pipeline.errors import IncompatibleCheckpointsError

#: Last parts of a code's name that the name of its values lacks.
_CODE_SUFFIXES = ("_packed", "_blocks")
_SCALES = ("_scale_inv", "_scale", "_scales")
_FACTORS = ("_global_scale", "_scale_2")
_COMPANIONS = (*_SCALES, *_FACTORS, "_zero_point", "_shape", "_g_idx")
#: What scales activations and caches where a model runs, and no weight.
_OF_ACTIVATIONS = re.compile(
    r"(?:^|\.)(?:input_scale|input_global_scale|output_scale|(?:[kqv]|prob)_scale"
    r"|\w+_(?:input|output)_scale|\w+_input_global_scale)$"
)
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8"})
_FLOATS = frozenset({"F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class _Scheme:
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


def decodable(checkpoint: Checkpoint) -> bool:
    """Whether the form of a checkpoint's codes is one that is decoded."""
    form = checkpoint.form
    return form is not None and bool(_schemes(form.settings))


def logical_parts(checkpoint: Checkpoint) -> dict[str, Part]:
    """The values of a checkpoint by name: stored as they are, or decoded.

    Raises IncompatibleCheckpointsError where codes, scales and config.json do not fit.
    """
    form = checkpoint.form
    assert form is not None
    schemes, by_name = _schemes(form.settings), checkpoint.by_name
    parts: dict[str, Part] = {}
    used: set[str] = set()
    for name, entry in by_name.items():
        is_coded = name in form.coded
        values = _name_of_values(name) if is_coded else name
        if is_coded and (_OF_ACTIVATIONS.search(name) or _is_companion(name, by_name)):
            continue
        if values in parts:
            raise _misfit(checkpoint, form, name, "one form of a weight", f"{values} twice")
        if not is_coded:
            parts[values] = Part(0, entry)
        elif companions := _companions(values, by_name):
            parts[values] = Part(0, entry, _codes(checkpoint, form, entry, companions, schemes))
            used |= {name, *(e.name for e in companions.values())}
    alone = [n for n in sorted(form.coded) if n not in used and not _OF_ACTIVATIONS.search(n)]
    if alone:
        raise _misfit(
            checkpoint, form, alone[0], "codes with their scales", "one without the other"
        )
    return parts


def _is_companion(name: str, by_name: Mapping[str, TensorEntry]) -> bool:
    """Whether a tensor belongs to the codes of another one."""
    return any(
        name.endswith(suffix) and name.removesuffix(suffix) + code in by_name
        for suffix in _COMPANIONS
        for code in ("", *_CODE_SUFFIXES)
    )


def _name_of_values(name: str) -> str:
    suffix = next((s for s in _CODE_SUFFIXES if name.endswith(s)), "")
    return name.removesuffix(suffix)


def _companions(values: str, by_name: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """What belongs to the codes of a tensor, by what it is."""
    suffixes = {
        "scales": _SCALES,
        "factor": _FACTORS,
        "zeros": ("_zero_point",),
        "shape": ("_shape",),
        "order": ("_g_idx",),
    }
    return {
        role: by_name[values + suffix]
        for role, all_of_it in suffixes.items()
        for suffix in all_of_it
        if values + suffix in by_name
    }


def _codes(
    checkpoint: Checkpoint,
    form: StoredForm,
    entry: TensorEntry,
    companions: Mapping[str, TensorEntry],
    schemes: Sequence[_Scheme],
) -> Codes:
    """How the values of some codes follow. Raises IncompatibleCheckpointsError."""
    scales, factor = companions.get("scales"), companions.get("factor")
    if scales is None or scales.dtype not in _SCALE_DTYPES:
        found = f"{scales.dtype} in {scales.name}" if scales else "none"
        raise _misfit(checkpoint, form, entry.name, "scales of a float type", found)
    if "order" in companions:
        order = companions["order"].name
        raise _misfit(checkpoint, form, entry.name, "columns in their order", f"{order}, another")
    fitting = {}
    for scheme in schemes:
        codes = _fitted(scheme, entry, companions)
        if codes is not None:
            fitting[codes.element, codes.grid, codes.block] = codes
    if len(fitting) != 1:
        expected = " or ".join(dict.fromkeys(map(str, schemes))) + ", as config.json says"
        found = f"{entry.dtype} {list(entry.shape)}, scales {scales.dtype} {list(scales.shape)}"
        raise _misfit(checkpoint, form, entry.name, expected, found)
    (codes,) = fitting.values()
    if factor and (factor.dtype != "F32" or factor.numel != 1):
        found = f"{factor.dtype} {list(factor.shape)}"
        raise _misfit(checkpoint, form, factor.name, "one float32", found)
    if (scales.dtype == "F8_E4M3") != (factor is not None):
        found = f"{scales.dtype} scales {'with' if factor else 'without'} one"
        raise _misfit(checkpoint, form, entry.name, "F8_E4M3 scales with a global one", found)
    return codes


def _fitted(
    scheme: _Scheme, entry: TensorEntry, companions: Mapping[str, TensorEntry]
) -> Codes | None:
    """The codes as a scheme has them; None if shapes or types are others."""
    scales, zeros, factor = (companions.get(k) for k in ("scales", "zeros", "factor"))
    shape = _shape_of_values(scheme, entry)
    if scales is None or shape is None or entry.dtype not in scheme.stored:
        return None
    (*lead, rows, cols), block = shape, scheme.block
    block = min(block[0] or rows, rows) or 1, min(block[1] or cols, cols) or 1
    codes = Codes(
        element=scheme.element,
        dtype=scales.dtype if scales.dtype in _FLOATS else "BF16",
        shape=(*lead, cols, rows) if scheme.is_turned else shape,
        block=block,
        scales=scales,
        zeros=zeros,
        factor=factor,
        is_divisor=factor is not None and factor.name.endswith("_global_scale"),
        stated_shape=companions.get("shape"),
        is_turned=scheme.is_turned,
    )
    n_rows, n_cols = codes.grid
    shapes = [(*lead, n_rows, n_cols)]
    shapes += [(*lead, n_rows)] if n_cols == 1 else []
    shapes += [(), (1,), (1, 1)] if scheme.block == (0, 0) else []
    fits = scales.shape in shapes and _zeros_fit(codes, entry, zeros)
    return codes if fits else None


def _shape_of_values(scheme: _Scheme, entry: TensorEntry) -> tuple[int, ...] | None:
    """The shape of a tensor of codes, not turned; None if codes of a scheme have no such one."""
    shape = entry.shape
    if scheme.is_turned:
        if len(shape) < 3 or shape[-1] * 8 != scheme.block[1] * N_BITS[scheme.element]:
            return None
        return (*shape[:-2], shape[-2] * scheme.block[1])
    per_stored = {"I32": 32, "U8": 8}.get(entry.dtype, N_BITS[scheme.element])
    return (
        (*shape[:-1], shape[-1] * per_stored // N_BITS[scheme.element]) if len(shape) > 1 else None
    )


def _zeros_fit(codes: Codes, entry: TensorEntry, zeros: TensorEntry | None) -> bool:
    if zeros is None:
        return True
    n_rows, n_cols = codes.grid
    per_word = 32 // N_BITS[codes.element]
    packed = -(-n_rows // per_word), n_cols
    if entry.dtype == "I32":
        return zeros.dtype == "I32" and zeros.shape == packed and len(codes.shape) == 2
    return entry.dtype == zeros.dtype == "I8" and zeros.shape == codes.scales.shape


def _schemes(settings: Mapping[str, Any]) -> tuple[_Scheme, ...]:
    """The schemes that a config states; none where its method is not decoded."""
    method = settings.get("quant_method")
    if method == "fp8":
        block = settings.get("weight_block_size", [128, 128])
        sizes = _block(block) if block is not None else None
        blocks = [(0, 0), *([sizes] if sizes else [])]
        return tuple(_Scheme(e, b, frozenset({e})) for b in blocks for e in _FP8)
    if method == "fbgemm_fp8":
        return tuple(_Scheme("F8_E4M3", b, frozenset({"F8_E4M3"})) for b in ((1, 0), (0, 1)))
    if method == "mxfp4":
        return (_Scheme("E2M1", (1, 32), frozenset({"U8"}), is_turned=True),)
    if method == "modelopt":
        return {
            "FP8": (_Scheme("F8_E4M3", (0, 0), frozenset({"F8_E4M3"})),),
            "NVFP4": (_Scheme("E2M1", (1, 16), frozenset({"U8"})),),
        }.get(str(settings.get("quant_algo")), ())
    if method == "compressed-tensors":
        return tuple(dict.fromkeys(_of_groups(settings)))
    return ()


_FP8: tuple[Element, ...] = ("F8_E4M3", "F8_E5M2")


def _of_groups(settings: Mapping[str, Any]) -> Iterator[_Scheme]:
    """The schemes of the groups of modules in a config of compressed-tensors."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind = weights.get("type"), weights.get("num_bits")
        block = _block_of(weights)
        if kind not in _ELEMENTS or block is None or weights.get("actorder"):
            continue
        element, stored = _ELEMENTS[kind]
        yield _Scheme(element, block, stored)


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


def _misfit(
    checkpoint: Checkpoint, form: StoredForm, tensor: str, expected: str, found: str
) -> IncompatibleCheckpointsError:
    return IncompatibleCheckpointsError(
        f"A model's weights are stored as {form.name}, and do not fit together",
        where=f"{checkpoint.name}, tensor {tensor}",
        expected=expected,
        found=found,
        next_step="get the checkpoint again, with its config.json; or merge the model that it was "
        "made from",
    )
