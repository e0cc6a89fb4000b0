"""Which values the codes of a checkpoint mean: logical tensors over stored ones.

What config.json says of its quantisation must fit what the headers say, tensor by tensor; what does
not fit is refused by name. Sources: the quantisers of transformers 5, compressed-tensors and
modelopt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.code_schemes import N_BITS, Scheme
from mergepipe_pipeline.domain.codes import Codes
from mergepipe_pipeline.domain.stored_form import StoredForm
from mergepipe_pipeline.domain.view import Part, TensorView, view_of_part
from mergepipe_pipeline.errors import IncompatibleCheckpointsError

#: Last parts of a code's name that the name of its values lacks.
_CODE_SUFFIXES = ("_packed", "_blocks")
_SCALES = ("_scale_inv", "_scale", "_scales", "_weight_scale")
_FACTORS = ("_global_scale", "_scale_2", "_weight_scale_2")
_COMPANIONS = (*_SCALES, *_FACTORS, "_zero_point", "_shape", "_g_idx")
#: What scales activations and caches where a model runs, and no weight.
_OF_ACTIVATIONS = re.compile(
    r"(?:^|\.)(?:\w+_)?(?:input|output|activation)_(?:scale|zero_point|global_scale)$"
    r"|(?:^|\.)(?:[kqv]|prob)_scale$"
)
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8"})
_FLOATS = frozenset({"F32", "BF16", "F16"})


def values_of(checkpoint: Checkpoint) -> dict[str, TensorView]:
    """The tensors of a checkpoint by name; what is coded in a known form as the values it means.

    Raises as `logical_parts`.
    """
    parts = {name: Part(0, entry) for name, entry in checkpoint.by_name.items()}
    if checkpoint.form is not None and checkpoint.form.schemes:
        parts = logical_parts(checkpoint)
    return {name: view_of_part(part, name) for name, part in parts.items()}


def logical_parts(checkpoint: Checkpoint) -> dict[str, Part]:
    """The values of a checkpoint by name: stored as they are, or decoded.

    Raises IncompatibleCheckpointsError where codes, scales and config.json do not fit.
    """
    form = checkpoint.form
    assert form is not None
    by_name = checkpoint.by_name
    parts: dict[str, Part] = {}
    used: set[str] = set()
    for name, entry in by_name.items():
        is_coded = name in form.coded
        values = _name_of_values(name) if is_coded else name
        is_cache = entry.numel == 1 and _OF_ACTIVATIONS.search(name)
        if is_cache or (is_coded and _is_companion(name, by_name)):
            continue
        if values in parts:
            raise _misfit(checkpoint, form, name, "one form of a weight", f"{values} twice")
        if not is_coded:
            parts[values] = Part(0, entry)
        elif companions := _companions(values, by_name):
            parts[values] = Part(0, entry, _codes(checkpoint, form, entry, companions))
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
) -> Codes:
    """How the values of some codes follow. Raises IncompatibleCheckpointsError."""
    scales, factor = companions.get("scales"), companions.get("factor")
    if scales is None or scales.dtype not in _SCALE_DTYPES:
        found = f"{scales.dtype} in {scales.name}" if scales else "none"
        raise _misfit(checkpoint, form, entry.name, "scales of a float type", found)
    shape = companions.get("shape")
    if shape and (shape.dtype not in ("I32", "I64") or shape.numel != len(entry.shape)):
        found = f"{shape.dtype} {list(shape.shape)}"
        raise _misfit(checkpoint, form, shape.name, "a shape as integers", found)
    if "order" in companions:
        order = companions["order"].name
        raise _misfit(checkpoint, form, entry.name, "columns in their order", f"{order}, another")
    fitting = {}
    for scheme in form.schemes:
        codes = _fitted(scheme, entry, companions)
        if codes is not None:
            fitting[codes.element, codes.grid, codes.block] = codes
    if len(fitting) != 1:
        expected = " or ".join(dict.fromkeys(map(str, form.schemes))) + ", as config.json says"
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
    scheme: Scheme, entry: TensorEntry, companions: Mapping[str, TensorEntry]
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


def _shape_of_values(scheme: Scheme, entry: TensorEntry) -> tuple[int, ...] | None:
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
