"""Decodes codes with scales to the values that they mean, a run of elements at a time.

Sources: OCP Microscaling Formats 1.0 (E2M1, E4M3, E5M2, E8M0), the layouts of compressed-tensors,
transformers and modelopt. Scales that many runs share, and matrices that are stored turned, are
read once and kept by the reader.
"""

from __future__ import annotations

from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np

from mergepipe_pipeline.arrays import F32Array, U8Array, U16Array, U32Array
from mergepipe_pipeline.bfloat16 import NAN_BITS, nearest
from mergepipe_pipeline.checkpoints.reader import BlockReader
from mergepipe_pipeline.domain.checkpoint import TensorEntry
from mergepipe_pipeline.domain.code_schemes import N_BITS, Element
from mergepipe_pipeline.domain.codes import Codes
from mergepipe_pipeline.dtypes import itemsize
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.jit import cached_njit

if TYPE_CHECKING:
    from mergepipe_pipeline.storage.read_batch import ReadBatch

_nearest = numba.njit(inline="always")(nearest)
#: Numbers that become values while they lie in the cache.
_TILE_ELEMS = 1 << 12


def read_values(
    reader: BlockReader,
    entry: TensorEntry,
    codes: Codes,
    start_elem: int,
    out: memoryview,
    batch: ReadBatch | None = None,
) -> None:
    """Fill `out` with the bytes of values [start, …) of what `entry` codes.

    With a `batch`, codes are read and decoded when it runs. Raises as `BlockReader.read_into`, and
    CheckpointError for a stored shape that is not the one that other tensors tell.
    """
    stop_elem = start_elem + len(out) // itemsize(codes.dtype)
    if start_elem == stop_elem:
        return
    if codes.stated_shape:
        _refuse_other_shape(reader, codes, codes.stated_shape)
    if codes.is_turned:
        _read_turned(reader, entry, codes, start_elem, out)
        return
    first, stop = codes.code_range(entry, start_elem, stop_elem)
    raw = np.empty((stop - first) * itemsize(entry.dtype), np.uint8)
    scales = _scales(reader, codes, start_elem, stop_elem)
    zeros = _zeros(reader, codes, start_elem, stop_elem)
    places = start_elem, stop_elem, first * itemsize(entry.dtype) * 8 // N_BITS[codes.element]
    decode = partial(_decode, codes, raw, scales, zeros, places, _table(codes, entry.dtype), out)
    if batch is None:
        reader.read_into(entry, first, stop, raw.data)
        decode()
    else:
        reader.put(batch, entry, first, stop, raw.data)
        batch.then(decode)


def _decode(
    codes: Codes,
    raw: U8Array,
    scales: tuple[F32Array, int],
    zeros: F32Array,
    places: tuple[int, int, int],
    table: F32Array,
    out: memoryview,
) -> None:
    """Decode values [start, stop) of `places`; the third is the value of the first code in `raw`.

    `scales` come with the number of the first of them; `zeros`, if any, lie beside them.
    """
    start, stop, first = places
    shape = (*codes.matrix, *codes.block, *codes.grid, int(codes.scales.numel > 1))
    coded = raw, first, N_BITS[codes.element] == 4, table, small_float(codes.element)
    scaled = *scales, zeros, np.array(shape, np.int64), start
    if codes.dtype == "F32":
        decode_run(*coded, *scaled, np.frombuffer(out, np.float32))
    elif codes.dtype == "BF16":
        decode_run_bfloat16(*coded, *scaled, np.frombuffer(out, np.uint16))
    else:
        values = np.empty(stop - start, np.float32)
        decode_run(*coded, *scaled, values)
        _put(values, codes.dtype, out)


@cached_njit(nogil=True)
def decode_run(
    raw: U8Array,
    first_code: int,
    is_half: bool,
    table: F32Array,
    form: SmallFloat,
    scales: F32Array,
    first_scale: int,
    zeros: F32Array,
    sizes: Any,
    start: int,
    out: F32Array,
) -> None:
    """Fill `out` with values [start, start + n): (number of the code − zero) · scale.

    Args:
        raw: codes as stored, from that of element `first_code` on.
        is_half: two codes lie in a byte, the lower bits first.
        table: [256] or [16], the number of each code.
        form: how the number follows from the code's bits, if it does.
        scales: float32, from number `first_scale` on; `zeros`, if any, lie beside them.
        sizes: int64 [7], rows and columns of a matrix, of a block, of the grid of scales, and
            whether there are several scales.
    """
    for at in range(0, len(out), _TILE_ELEMS):
        tile, code = out[at : at + _TILE_ELEMS], start + at - first_code
        _fill_numbers(raw, code, is_half, table, form, tile)
        _scale(scales, first_scale, zeros, sizes, start + at, tile)


@cached_njit(nogil=True)
def decode_run_bfloat16(
    raw: U8Array,
    first_code: int,
    is_half: bool,
    table: F32Array,
    form: SmallFloat,
    scales: F32Array,
    first_scale: int,
    zeros: F32Array,
    sizes: Any,
    start: int,
    out: U16Array,
) -> None:
    """Fill `out` with the nearest bfloat16 to what `decode_run` gives."""
    values = np.empty(_TILE_ELEMS, np.float32)
    for at in range(0, len(out), _TILE_ELEMS):
        rounded = out[at : at + _TILE_ELEMS]
        tile = values[: len(rounded)]
        coded = raw, first_code, is_half, table, form
        decode_run(*coded, scales, first_scale, zeros, sizes, start + at, tile)
        round_to_bfloat16(tile.view(np.uint32), rounded)


@cached_njit(nogil=True)
def _fill_numbers(
    raw: U8Array, code: int, is_half: bool, table: F32Array, form: SmallFloat, out: F32Array
) -> None:
    """Fill `out` [n] with the numbers of codes [code, code + n) of `raw`."""
    n = len(out)
    if is_half:
        if code & 1:
            out[0] = table[raw[code >> 1] >> 4]
        skipped = code & 1
        pairs, inside = out[skipped:], raw[(code + skipped) >> 1 :]
        for i in range(len(pairs) >> 1):
            two = inside[i]
            pairs[2 * i] = table[two & 15]
            pairs[2 * i + 1] = table[two >> 4]
        if len(pairs) & 1:
            pairs[-1] = table[inside[len(pairs) >> 1] & 15]
    elif form.least:
        # Computed, as a look-up for each element takes several times as long.
        codes = raw[code : code + n]
        for i in range(n):
            out[i] = _small_float_of(np.uint32(codes[i]), form)
    else:
        codes = raw[code : code + n]
        for i in range(n):
            out[i] = table[codes[i]]


@numba.njit(inline="always")
def _small_float_of(code: Any, form: Any) -> Any:
    """The number of a float of eight bits."""
    size = np.uint32(code & np.uint32(127))
    subnormal = np.float32(np.int32(size)) * form.least
    bits = np.uint32(np.uint32(size * form.step) + form.exponent)
    bits = np.float32(subnormal).view(np.uint32) if size < form.normal else bits
    bits = np.uint32(0x7F800000) if size == form.infinity else bits
    bits = np.uint32(0x7FC00000) if size > form.last else bits
    return np.uint32(bits | ((code & np.uint32(128)) << np.uint32(24))).view(np.float32)


@cached_njit(nogil=True)
def _scale(
    scales: F32Array, first_scale: int, zeros: F32Array, sizes: Any, start: int, out: F32Array
) -> None:
    """Make values [start, start + n) of the numbers in `out`; see `decode_run`."""
    n_rows, n_cols, block_rows, block_cols = sizes[0], sizes[1], sizes[2], sizes[3]
    grid_rows, grid_cols, has_many = sizes[4], sizes[5], sizes[6]
    in_runs = block_rows == 1 and n_cols % block_cols == 0  # scales follow each other as codes do
    at, n = 0, len(out)
    number, left = start // block_cols - first_scale - 1, block_cols - start % block_cols
    while at < n:
        if in_runs:
            number, end, left = number + 1, min(n, at + left), block_cols
            if not has_many:
                number = 0
        else:
            row, col = (start + at) // n_cols, (start + at) % n_cols
            grid_row = row // n_rows * grid_rows + row % n_rows // block_rows
            end = min(n, at + min(block_cols - col % block_cols, n_cols - col))
            number = has_many * (grid_row * grid_cols + col // block_cols - first_scale)
        scale, zero = scales[number], zeros[number] if len(zeros) else np.float32(0)
        run = out[at:end]
        for i in range(len(run)):
            run[i] = (run[i] - zero) * scale
        at = end


@cached_njit(nogil=True)
def round_to_bfloat16(bits: U32Array, out: U16Array) -> None:
    """Fill `out` [n] with the nearest bfloat16 to float32 `bits` [n], or the one NaN."""
    for i in range(len(bits)):
        is_nan = bits[i] & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
        out[i] = NAN_BITS if is_nan else np.uint16(_nearest(bits[i]))


def _scales(
    reader: BlockReader, codes: Codes, start_elem: int, stop_elem: int
) -> tuple[F32Array, int]:
    """The scales of values [start, stop) as float32, times the factor, and the first's number."""
    entry, (first, stop) = codes.scales, codes.scale_range(start_elem, stop_elem)
    if codes.is_run:
        raw: Any = np.frombuffer(reader.read(entry, first, stop), np.uint8)
    else:
        size = itemsize(entry.dtype)
        raw = reader.kept(entry, 0, entry.numel)[first * size : stop * size]
    return _with_factor(reader, codes, _floats(raw, entry.dtype)), first


def _with_factor(reader: BlockReader, codes: Codes, scales: F32Array) -> F32Array:
    if codes.factor is None:
        return scales
    raw = reader.kept(codes.factor, 0, 1)
    factor = _floats(raw, codes.factor.dtype)[0]
    with np.errstate(all="ignore"):  # what is not finite is refused where it is merged
        made: F32Array = scales / factor if codes.is_divisor else scales * factor
    return made


def _zeros(reader: BlockReader, codes: Codes, start_elem: int, stop_elem: int) -> F32Array:
    """The zeros of values [start, stop), beside their scales; [0] where there are none."""
    entry = codes.zeros
    if entry is None:
        return np.empty(0, np.float32)
    first, stop = codes.scale_range(start_elem, stop_elem)
    size = itemsize(entry.dtype)
    a, b = codes.zero_range(start_elem, stop_elem)
    raw = reader.kept(entry, 0, entry.numel)[a * size : b * size]
    table = _table(codes, entry.dtype)
    zeros: F32Array
    if entry.dtype != "I32":
        zeros = table[raw]
        return zeros
    n_bits, n_cols = N_BITS[codes.element], codes.grid[1]
    words = raw.view("<u4").reshape(-1, n_cols)  # [rows of words, columns]
    shifts = np.arange(0, 32, n_bits, dtype=np.uint32)[None, :, None]
    bits = (words[:, None, :] >> shifts) & np.uint32((1 << n_bits) - 1)
    zeros = table[bits.reshape(-1)]
    skipped = first - a // n_cols * (32 // n_bits) * n_cols
    return zeros[skipped : skipped + stop - first]


def _read_turned(
    reader: BlockReader, entry: TensorEntry, codes: Codes, start_elem: int, out: memoryview
) -> None:
    """Read values of matrices that are stored turned; what is allowed of each is read once."""
    size, n_elems = itemsize(codes.dtype), prod(codes.shape[-2:])
    n_rows, n_groups = codes.grid
    per_group = codes.block[1] * N_BITS[codes.element] // 8
    table, n_cols = _table(codes, entry.dtype), codes.shape[-1]
    stop_elem = start_elem + len(out) // size
    for matrix in range(start_elem // n_elems, (stop_elem - 1) // n_elems + 1):
        a, b = max(start_elem, matrix * n_elems), min(stop_elem, (matrix + 1) * n_elems)
        first, stop = codes.turned_groups(matrix, a, b)
        at, end = matrix * n_rows * n_groups, (matrix + 1) * n_rows * n_groups
        step = per_group // itemsize(entry.dtype)
        raw = reader.kept(entry, at * step, end * step).reshape(n_rows, n_groups, per_group)
        scale_raw = reader.kept(codes.scales, at, end).reshape(n_rows, n_groups)
        scales = _floats(np.ascontiguousarray(scale_raw[:, first:stop]).reshape(-1), "F8_E8M0")
        part = raw[:, first:stop]  # [rows of codes, groups, bytes]
        bits = np.stack([part & 15, part >> 4], -1).reshape(n_rows, stop - first, codes.block[1])
        with np.errstate(all="ignore"):
            values = table[bits] * scales.reshape(n_rows, stop - first, 1)
        turned = np.ascontiguousarray(values.reshape(n_rows, -1).T).reshape(-1)
        skipped = a - matrix * n_elems - first * codes.block[1] * n_cols
        piece = out[(a - start_elem) * size : (b - start_elem) * size]
        _put(turned[skipped : skipped + b - a], codes.dtype, piece)


def _refuse_other_shape(reader: BlockReader, codes: Codes, entry: TensorEntry) -> None:
    kind = {"I32": "<i4", "I64": "<i8"}[entry.dtype]
    stated = tuple(reader.kept(entry, 0, entry.numel).view(kind).tolist())
    if stated != codes.shape:
        raise CheckpointError(
            "Codes are of another shape than their scales",
            where=f"{entry.file}, tensor {entry.name}",
            expected=f"{list(codes.shape)}, as codes and scales are",
            found=str(list(stated)),
            next_step="get the checkpoint again; if it is so where it comes from, merge the model "
            "that it was made from",
        )


def _table(codes: Codes, stored: str) -> F32Array:
    """The number of each code."""
    if codes.element == "E2M1":
        positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        return np.concatenate([positive, -positive])
    if codes.element in _SMALL_FLOATS:
        return _small_floats(codes.element)
    n_codes = 1 << N_BITS[codes.element]
    if stored == "I8":
        return np.arange(n_codes, dtype=np.uint8).view(np.int8).astype(np.float32)
    return np.arange(n_codes, dtype=np.float32) - np.float32(n_codes // 2)


#: Bits of the fraction, and the bias of the exponent.
_SMALL_FLOATS: dict[Element, tuple[int, int]] = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15)}


class SmallFloat(NamedTuple):
    """How a float32 follows from the bits of a smaller one, whose size is its bits without a sign.

    `least` is the smallest number (0: there is no such form). A size from `normal` on, times
    `step` and with `exponent` added to it, is the float32's; above `last` it is none.
    """

    least: np.float32
    normal: np.uint32
    step: np.uint32
    exponent: np.uint32
    infinity: np.uint32
    last: np.uint32


def small_float(element: Element) -> SmallFloat:
    """How the numbers of an element follow from its bits."""
    if element not in _SMALL_FLOATS:
        return SmallFloat(np.float32(0), *(np.uint32(0),) * 5)
    n_fraction, bias = _SMALL_FLOATS[element]
    infinity, last = (255, 126) if element == "F8_E4M3" else (124, 124)  # E4M3 has no infinity
    sizes = 1 << n_fraction, 1 << (23 - n_fraction), (127 - bias) << 23, infinity, last
    return SmallFloat(np.float32(2.0 ** (1 - bias - n_fraction)), *map(np.uint32, sizes))


@cache
def _small_floats(element: Element) -> F32Array:
    """The numbers of all floats of eight bits."""
    none, numbers = np.empty(0, np.float32), np.empty(256, np.float32)
    _fill_numbers(np.arange(256, dtype=np.uint8), 0, False, none, small_float(element), numbers)
    return numbers


def _floats(raw: U8Array, dtype: str) -> F32Array:
    """Scales as float32."""
    if dtype in ("F8_E8M0", "U8"):
        table = np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)
        table = np.append(table, np.float32(np.nan))
        scales: F32Array = table[raw]
        return scales
    if dtype in _SMALL_FLOATS:
        return _small_floats(dtype)[raw]
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)


def _put(values: F32Array, dtype: str, out: memoryview) -> None:
    """Write float32 values as `dtype`, rounded to nearest, ties to even."""
    if dtype == "BF16":
        round_to_bfloat16(values.view(np.uint32), np.frombuffer(out, np.uint16))
    else:
        with np.errstate(over="ignore"):
            np.frombuffer(out, {"F16": "<f2", "F32": "<f4"}[dtype])[:] = values
