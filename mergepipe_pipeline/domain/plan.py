"""Plans, of what is read and computed: all that the engine knows, and the identity of its result.

`identity()` of a task covers what determines output bits and nothing else: content digests,
operator with resolved parameters, covered ranges, dtypes. Trim rules, rescale factors and ranges
that need no reading follow from these, by another way on another grid: they stay out of ids, but a
layer is reused only by a plan that obeys the same ones (`LayerTask.action_key`). Paths, block size,
budget and estimates stay out, so equal work has equal ids wherever and however it was planned.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from math import isfinite, prod
from typing import Any

from mergepipe_pipeline.digest import canonical_json, digest_json
from mergepipe_pipeline.domain.blocks import Range, coalesce
from mergepipe_pipeline.domain.bounds import Number, Size, Text
from mergepipe_pipeline.domain.codes import stored_as
from mergepipe_pipeline.domain.pack import CODEC_VERSION, PackedInput, PackSource
from mergepipe_pipeline.domain.recipe import Params
from mergepipe_pipeline.domain.request import AS_WRITTEN, Request
from mergepipe_pipeline.domain.view import TensorView
from mergepipe_pipeline.dtypes import itemsize

#: Part of every layer key: raised when the engine or an operator changes its bits.
ENGINE_VERSION = "4"


#: What may be set in a config.json, a JSON value; None takes the key away.
ConfigValue = int | float | bool | str | list[Any] | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint the engine opens, after checking `stamp` against its files."""

    name: str
    root: str
    checkpoint_id: str
    stamp: str


@dataclass(frozen=True, slots=True)
class TrimRule:
    """Keep |δ| above a threshold, and ties at the threshold up to an element index.

    An element at index e is kept iff bits(|δ_e|) > `threshold_bits`, or equal and e <
    `tie_stop_elem`. `threshold_bits` is the float32 pattern of the magnitude (order equals
    magnitude order).

    With `ties_after` the cut is open: besides, the first so many ties of the elements from
    `tie_stop_elem` to `ties_until_elem` are kept. These are a block: it is read whole or not at
    all, so the engine finds its ties where it matters. Of a part of it, the first ties of that part
    would be kept.
    """

    threshold_bits: int
    tie_stop_elem: int
    ties_after: int = 0
    ties_until_elem: int = 0

    @property
    def threshold(self) -> float:
        """The magnitude at which ties are."""
        (threshold,) = struct.unpack("<f", struct.pack("<I", self.threshold_bits))
        return float(threshold)

    @property
    def is_open(self) -> bool:
        """Whether only a look at the block can say which ties are kept."""
        return self.ties_after > 0


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """One expert's part in one output tensor.

    Sources in `view` index `MergePlan.sources`; `position` is the expert's place in the recipe (it
    addresses random numbers). `covered` are the element ranges where the expert takes part; `read`
    those fetched of the stored elements: `covered` without blocks whose delta is known to be zero,
    and without what is `packed`, which comes from a pack. Outside, the expert equals the base. A
    low-rank view is covered and read in whole or not at all. `trim`, `outliers` and `scale` are
    tensor-scope facts the operator asked for; what `outliers` keeps is dropped. With `l1` (‖δ‖₁ of
    the whole tensor), `scale` is a guess: the engine finds the factor that gives what a random drop
    leaves this norm.
    """

    position: int
    view: TensorView
    digest: str
    params: Params
    covered: tuple[Range, ...]
    read: tuple[Range, ...]
    trim: TrimRule | None = None
    outliers: TrimRule | None = None
    scale: float = 1.0
    l1: float | None = None
    packed: PackedInput | None = None

    @property
    def read_nbytes(self) -> int:
        """Expert bytes this input fetches."""
        packed = self.packed.nbytes if self.packed else 0
        if not self.read:
            return packed
        stored = self.view.read_nbytes(self.read) if self.view.stored else 0
        return packed + stored + self.view.low_rank_nbytes

    @property
    def differing(self) -> tuple[Range, ...]:
        """The ranges that are read, from wherever; outside, the expert equals the base."""
        if not self.packed:
            return self.read
        packed = ((r.start_elem, r.stop_elem) for r in self.packed.ranges)
        return coalesce([*self.read, *packed])

    @property
    def fetched(self) -> tuple[Range, ...]:
        """The ranges that are fetched as the expert has them, from wherever."""
        if self.packed is None:
            return self.read
        exact = [(r.start_elem, r.stop_elem) for r in self.packed.ranges if r.is_exact]
        return coalesce([*self.read, *exact])

    def identity(self) -> list[Any]:
        """The material that determines its part of the output bits, as canonical-JSON material."""
        own = [self.position, self.digest, self.view.dtype, self.params, self.covered]
        if self.packed is None or not self.packed.approximate:
            return own
        near = [
            [r.start_elem, r.stop_elem, r.level, *([] if r.length == 1 else [r.length.hex()])]
            for r in self.packed.approximate
        ]
        return [*own, [CODEC_VERSION, self.packed.unit.hex(), self.packed.factors, near]]


@dataclass(frozen=True, slots=True)
class BaseInput:
    """The base's tensor for one output tensor."""

    view: TensorView
    digest: str


@dataclass(frozen=True, slots=True)
class TensorTask:
    """One output tensor: `operator` over `experts` on `base`; operator `copy` has no experts.

    `facts` are the numbers of the whole tensor that the operator measured. `reason` says why this
    operator was chosen where the recipe left it open; it takes no part in the identity. What
    `is_coded` is computed in `out_dtype`, and written as fp8 with a scale for each block.
    """

    name: str
    shape: tuple[int, ...]
    out_dtype: str
    operator: str
    params: Params
    seed: int
    base: BaseInput | None
    experts: tuple[ExpertInput, ...]
    facts: tuple[float, ...] = ()
    reason: str = ""
    is_coded: bool = False

    @property
    def stored(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, dtype and shape of what its layer's file has of it."""
        return stored_as(self.name, self.shape, self.out_dtype, is_coded=self.is_coded)

    @property
    def out_nbytes(self) -> int:
        """Bytes of what its layer's file has of it."""
        return sum(prod(shape) * itemsize(dtype) for _, dtype, shape in self.stored)

    @property
    def variant(self) -> str:
        """The operator's variant as the plan asks for it, "" if it does not."""
        return str(dict(self.params).get("variant", ""))

    def identity(self) -> dict[str, Any]:
        """The material that determines its output bits, as canonical-JSON material."""
        return {
            "name": self.name,
            "shape": self.shape,
            "out_dtype": self.out_dtype,
            "operator": self.operator,
            "params": self.params,
            "seed": self.seed,
            "base": self.base and [self.base.digest, self.base.view.dtype],
            "experts": [e.identity() for e in self.experts],
            "facts": self.facts,
            **({"is_coded": True} if self.is_coded else {}),
        }


@dataclass(frozen=True)
class LayerTask:
    """One merged layer: its tasks become one safetensors object."""

    name: str
    tasks: tuple[TensorTask, ...] = field(repr=False)

    @cached_property
    def layer_key(self) -> str:
        """64 hex: equal keys mean equal object bytes."""
        return digest_json([ENGINE_VERSION, self.name, [t.identity() for t in self.tasks]])

    @cached_property
    def action_key(self) -> str:
        """The layer key with what the engine obeys besides: the action cache's key.

        A wrong fact gives a wrong layer, which right facts must not find.
        """
        obeyed = [
            [
                e.fetched,
                *(r and astuple(r) for r in (e.trim, e.outliers)),
                e.scale.hex(),
                repr(e.l1),
            ]
            for t in self.tasks
            for e in t.experts
        ]
        return f"{self.layer_key}.{digest_json(obeyed)[:16]}"

    @property
    def expert_bytes_planned(self) -> int:
        """Expert bytes this layer reads when it is executed."""
        return sum(e.read_nbytes for t in self.tasks for e in t.experts)

    @property
    def base_nbytes(self) -> int:
        """Bytes of the base's tensors of this layer."""
        return sum(t.base.view.nbytes for t in self.tasks if t.base)

    @property
    def nbytes(self) -> int:
        """Bytes that merging the layer reads and writes."""
        written = sum(t.out_nbytes for t in self.tasks)
        return self.base_nbytes + self.expert_bytes_planned + written


#: Why nothing is predicted of experts that hold NaN or infinity.
NOT_FINITE = "unknown: an expert holds NaN or infinity"


@dataclass(frozen=True, slots=True)
class Estimates:
    """The planner's knowledge and promises; takes no part in any id.

    `error_bound` bounds the L2 norm of (merged under this plan − merged in full), before the cast
    on write; None where no bound is known (then `bound_note` says why). `predicted_error` estimates
    that norm, give or take `predicted_margin` (None: not stated), and `update_norm` that of (merged
    in full − base), of which `update_note` says where it is not known why. `reads` are runs of
    blocks that lie together.
    Of the bytes that are read, `expert_bytes_packed` come from packs, of
    which blocks of `pack_block_elems` elements have a level each (0: of no packs).
    """

    budget_bytes: Size | None
    strategy: Text
    block_elems: Size
    expert_bytes_total: Size
    expert_bytes_planned: Size
    blocks_total: Size
    blocks_bought: Size
    blocks_zero: Size
    reads: Size
    error_bound: Number | None
    bound_note: Text
    predicted_error: Number | None
    predicted_margin: Number | None
    update_norm: Number | None
    expert_bytes_packed: Size = 0
    pack_block_elems: Size = 0
    update_note: Text = ""

    @property
    def no_error_note(self) -> str:
        """Why the error is not predicted; "" where it is.

        Only an expert that is not finite leaves the norm of the update open while there is a base,
        and no note says why.
        """
        if self.update_norm is not None or self.update_note:
            return "" if self.predicted_error is not None else f"not predicted: {self.bound_note}"
        has_base = self.predicted_error is not None or self.error_bound is None
        return NOT_FINITE if has_base else "not predicted: there is no base to differ from"


@dataclass(frozen=True, slots=True)
class SideFiles:
    """The files beside the merged weights: those of source `template`, and what changes in them.

    Before there is a plan, `template` is a model's number.
    `config` are (dotted key, value) to set in config.json; `files` are (name, base64 text) that
    replace the template's tokenizer files (None: they are copied).
    """

    template: int
    config: tuple[tuple[str, ConfigValue], ...] = ()
    files: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True)
class MergePlan:
    """Everything the engine needs for one merge; `plan_id` names the result it determines."""

    recipe_name: str
    recipe_text: str
    method: str
    sources: tuple[Source, ...]
    roles: tuple[str, ...]  # "base" or "expert", one per source
    layers: tuple[LayerTask, ...]
    side: SideFiles
    estimates: Estimates
    ref: str
    warnings: tuple[str, ...] = ()
    request: Request = AS_WRITTEN
    packs: tuple[PackSource, ...] = ()

    @cached_property
    def plan_id(self) -> str:
        """64 hex over the layer keys and the side files' owner; equal ids, equal merged weights."""
        keys = [lay.layer_key for lay in self.layers]
        return digest_json([ENGINE_VERSION, self.method, keys, self.side.config, self.side.files])

    @property
    def is_coded(self) -> bool:
        """Whether some of its result is written as fp8 with scales."""
        return any(task.is_coded for layer in self.layers for task in layer.tasks)

    @property
    def plan_digest(self) -> str:
        """The plan's digest π, as the paper calls it: the same as `plan_id`."""
        return self.plan_id

    @property
    def base_nbytes(self) -> int:
        """Bytes of the base's tensors."""
        return sum(layer.base_nbytes for layer in self.layers)

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read if no layer is reused, the base's included."""
        return self.base_nbytes + self.estimates.expert_bytes_planned

    def to_json(self) -> bytes:
        """Canonical JSON, of which `forms.record_of` gives an equal plan back."""
        return canonical_json(self, fields_of)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name; those that are NaN or infinite as texts, "nan" or "-inf".

    JSON has no such numbers. Raises TypeError for what is no dataclass.
    """
    names = _NAMES.get(type(value)) or _field_names(type(value))
    found = {name: getattr(value, name) for name in names}
    for name, number in found.items():
        if isinstance(number, float) and not isfinite(number):
            found[name] = repr(number)
    return found


_NAMES: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    _NAMES[kind] = names = tuple(f.name for f in fields(kind))
    return names
