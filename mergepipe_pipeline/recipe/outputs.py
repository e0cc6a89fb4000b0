"""Which tensors the output has, and which tensor of which model each is made from.

Structure only: modules, layers taken and numbered anew, tied embeddings, tensors that some models
lack. Misfits become problems, one per model. `resolve_tensors` gives the outputs their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mergepipe_pipeline.domain.layers import (
    embedding_like,
    is_buffer,
    is_head,
    is_optional,
    is_post,
    layer_index,
    layer_stack,
    projector_position,
    with_layer_index,
)
from mergepipe_pipeline.domain.operator import OperatorSchema
from mergepipe_pipeline.domain.recipe import BaseTensor
from mergepipe_pipeline.recipe.model_tensors import Belongs, ModelTable
from mergepipe_pipeline.recipe.parameters import position
from mergepipe_pipeline.recipe.problems import Problems
from mergepipe_pipeline.recipe.structure import Entry, Level, Module, Slice

#: The name of an output's tensor in a model.
InModel = Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One model's tensor for an output; not `stored` where a partial model leaves the base's.

    `name` is what filters see: the tensor's own name, also where a tied `tensor` stands for it.
    """

    entry: Entry
    position: int
    name: str
    tensor: str
    stored: bool


@dataclass(frozen=True, slots=True)
class Output:
    """One output tensor at position `t`; `levels` are those of its slice, module and recipe."""

    name: str
    part: Slice
    t: float
    base: BaseTensor | None
    taken: tuple[SourceTensor, ...]
    levels: tuple[Level, ...]


@dataclass
class Outputs:
    """Makes the outputs of one module, whose tensors are those that `belongs` accepts.

    `levels` are the module's and the recipe's.
    """

    schema: OperatorSchema
    models: Sequence[ModelTable]
    problems: Problems
    belongs: Belongs
    levels: tuple[Level, ...]

    def of_module(self, module: Module) -> Iterator[Output]:
        """The outputs in order."""
        if all(part.whole for part in module.slices):
            for part in module.slices:
                yield from self._whole(part)
        else:
            yield from self._layered(module)

    def _whole(self, part: Slice) -> Iterator[Output]:
        lead = self._lead(part)
        if lead is None:
            return
        model = self.models[lead]
        counts = model.depths(self.belongs)
        for entry in part.entries:
            path = (*entry.level.path, "model")
            self.models[entry.model].check_stacks(model, self.belongs, path, self.problems)
        names = self._names(part, lead, self.belongs)
        for name in names:
            t = min(position(layer_index(name), counts.get(layer_stack(name) or "", 1)), 1.0)
            t = projector_position(name, names) if t == 0 else t
            yield self._slot(part, name, t, _same)

    def _layered(self, module: Module) -> Iterator[Output]:
        if not self._ranges_fit(module):
            return
        first, last = module.slices[0], module.slices[-1]

        def outside(post: bool) -> Belongs:
            return lambda n: self.belongs(n) and layer_index(n) is None and is_post(n) is post

        yield from self._same_names(first, outside(False))
        offset = 0
        for part in module.slices:
            start, end = part.entries[0].layers or (0, 0)
            for k in range(end - start):
                t = position(k, end - start)
                yield from self._layer(part, k, offset + k, t)
            offset += end - start
        yield from self._same_names(last, outside(True))
        yield from self._tied_heads(first, last)

    def _ranges_fit(self, module: Module) -> bool:
        n_before = len(self.problems)
        for part in module.slices:
            for entry in part.entries:
                # An adapter alone has the layers of the base it changes.
                model = self.models[entry.model]
                base = None if part.base is None else self.models[part.base]
                stacks = ((model.is_partial and base) or model).stacks(self.belongs)
                path = (*entry.level.path, "layer_range")
                end = (entry.layers or (0, 0))[1]
                if len(stacks) != 1:
                    listed = ", ".join(stacks) or "none"
                    self.problems.add(
                        path,
                        f"slices need a model with one stack of layers, {model.text} has {listed}; "
                        "choose a part with `modules:`",
                    )
                elif end > next(iter(stacks.values())):
                    n = next(iter(stacks.values()))
                    self.problems.add(path, f"{model.text} has {n} layers, so no layer {end - 1}")
        return len(self.problems) == n_before

    def _layer(self, part: Slice, k: int, out: int, t: float) -> Iterator[Output]:
        """Outputs of output layer number `out`, the k-th of its slice."""
        starts = {e.model: e.layers[0] for e in part.entries if e.layers is not None}
        # A base that is not listed stands in for the first model's layers.
        default = next(iter(starts.values()))

        def in_model(name: str, model: int) -> str:
            return with_layer_index(name, starts.get(model, default) + k)

        def is_in_layer(name: str) -> bool:
            return self.belongs(name) and layer_index(name) is not None

        lead = self._lead(part)
        if lead is None:
            return
        names: dict[str, None] = {}
        for model in dict.fromkeys((lead, *(e.model for e in part.entries))):
            want = starts.get(model, default) + k
            for name in self.models[model].layers.get(want, ()):
                if is_in_layer(name) and self._counts(name, lead, model, in_model, out):
                    names[with_layer_index(name, out)] = None
        for name in names:
            yield self._slot(part, name, t, in_model)

    def _counts(
        self,
        name: str,
        lead: int,
        model: int,
        in_model: InModel,
        out: int,
    ) -> bool:
        """Whether the output has a model's layer tensor; it has all of the lead's."""
        if model == lead:
            return True
        twin = in_model(with_layer_index(name, out), lead)
        return self._is_extra(name, twin, lead, model)

    def _is_extra(
        self, name: str, twin: str, lead: int, model: int, *, has_base: bool = True
    ) -> bool:
        of = self.models[lead]
        if twin in of.tensors or is_buffer(name):
            return False
        if of.partner(twin) is not None:
            return True
        # A bias of a module that the lead does not have, as of a tower that sees, is left out.
        is_own = of.find(f"{twin.removesuffix('.bias')}.weight") is not None
        if is_optional(name) and not is_head(name) and is_own:
            return True
        is_needed = of.needs(twin) and of.has_in_another_layer(twin)
        if is_needed or (is_head(name) and not has_base):
            of.note("missing", twin)
        else:
            self.models[model].note("extra", name)
        return False

    def _tied_heads(self, first: Slice, last: Slice) -> Iterator[Output]:
        """The heads that the first slice's model has, and the last one's ties to its embedding."""
        begins, ends = self._lead(first), self._lead(last)
        if begins is None or ends is None:
            return
        for name in self.models[begins].tensors:
            is_stored = name in self.models[ends].tensors
            is_own_head = self.belongs(name) and is_head(name)
            if is_own_head and not is_stored and self.models[ends].find(name):
                yield self._slot(last, name, 0.0, _same)

    def _same_names(self, part: Slice, belongs: Belongs) -> Iterator[Output]:
        lead = self._lead(part)
        for name in () if lead is None else self._names(part, lead, belongs):
            yield self._slot(part, name, 0.0, _same)

    def _names(self, part: Slice, lead: int, belongs: Belongs) -> list[str]:
        """Output names in the lead's order, then optional ones that other models have."""
        names = [name for name in self.models[lead].tensors if belongs(name)]
        seen = set(names)
        for entry in part.entries:
            for name in self.models[entry.model].tensors:
                if name in seen or not belongs(name):
                    continue
                has_base = part.base is not None
                if self._is_extra(name, name, lead, entry.model, has_base=has_base):
                    seen.add(name)
                    names.append(name)
        return names

    def _lead(self, part: Slice) -> int | None:
        """The model whose tensors an output has: the base, or the first that is complete."""
        listed = [entry.model for entry in part.entries]
        if part.base is not None and (part.whole or part.base in listed):
            return part.base
        complete = [model for model in listed if not self.models[model].is_partial]
        if complete:
            return complete[0]
        if part.base is None:
            self.problems.add(
                part.level.path,
                f"{self.models[listed[0]].text} is an adapter or a delta alone; give its "
                "base as `base_model:`",
            )
        return part.base

    def _slot(
        self,
        part: Slice,
        name: str,
        t: float,
        in_model: InModel,
    ) -> Output:
        base = None
        if part.base is not None:
            tensor = self.models[part.base].find(in_model(name, part.base))
            base = BaseTensor(part.base, tensor) if tensor is not None else None
        taken, lacking = [], []
        for i, entry in enumerate(part.contributing(self.schema)):
            own, model = in_model(name, entry.model), self.models[entry.model]
            tensor = model.find(own) or _tied(model, own, base)
            if tensor is not None:
                taken.append(SourceTensor(entry, i, own, tensor, True))
            elif model.is_partial:
                if base is not None:
                    self._check_partial(entry, own, base)
                    taken.append(SourceTensor(entry, i, own, base.tensor, False))
            elif is_head(own) and base is not None:
                model.note("headless", own)
                taken.append(SourceTensor(entry, i, own, base.tensor, False))
            elif not is_optional(own) or is_head(own):
                lacking.append((model, own))
        if lacking and (alone := self._alone(part, name, in_model, taken, lacking)):
            return Output(name, part, t, alone, (), (part.level, *self.levels))
        for model, own in lacking:
            model.note("missing", own)
        return Output(name, part, t, base, tuple(taken), (part.level, *self.levels))

    def _alone(
        self,
        part: Slice,
        name: str,
        in_model: InModel,
        taken: Sequence[SourceTensor],
        lacking: Sequence[tuple[ModelTable, str]],
    ) -> BaseTensor | None:
        """The lead's tensor, where it alone has it and the other models are whole without it."""
        lead = self._lead(part)
        other_sources = [s for s in taken if s.stored and s.entry.model != lead]
        if (
            lead is None
            or is_head(name)
            or other_sources
            or any(model.needs(own) for model, own in lacking)
        ):
            return None
        tensor = self.models[lead].find(in_model(name, lead))
        if tensor is None:
            return None
        self.models[lead].note("alone", tensor)
        return BaseTensor(lead, tensor)

    def _check_partial(self, entry: Entry, own: str, base: BaseTensor) -> None:
        if layer_index(own) != layer_index(base.tensor):
            self.problems.add(
                entry.level.path,
                f"{self.models[entry.model].text} is an adapter or a delta alone, so its layers "
                "must be those of the base",
            )


def _tied(model: ModelTable, own: str, base: BaseTensor | None) -> str | None:
    """The base's tied matrix that stands for `own`, if a partial model changes it."""
    if base is None or not model.is_partial or not embedding_like(own):
        return None
    return base.tensor if base.tensor in model.tensors else None


def _same(name: str, model: int) -> str:
    return name


def all_names(outputs: Sequence[Output]) -> Mapping[str, None]:
    """Every name that a filter may see, of outputs and of inputs."""
    names = [s.name for s in outputs] + [t.name for s in outputs for t in s.taken]
    return dict.fromkeys(names)


#: Prefixes by mergekit's module name. The text side is what is in none of the others.
_PARTS: dict[str, tuple[str, ...]] = {
    "multi_modal_projector": (
        "multi_modal_projector.",
        "model.multi_modal_projector.",
        "mm_projector.",
        "model.mm_projector.",
        "visual.merger.",
        "model.visual.merger.",
        "model.visual.deepstack_merger_list.",
        "connector.",
        "model.connector.",
    ),
    "vision_tower": (
        "vision_tower.",
        "model.vision_tower.",
        "visual.",
        "model.visual.",
        "vision_model.",
        "model.vision_model.",
    ),
    "encoder": ("encoder.", "model.encoder."),
    "decoder": ("decoder.", "model.decoder."),
    "shared": ("shared.", "lm_head."),
}
_ALIASES = {
    "visual": "vision_tower",
    "vision_model": "vision_tower",
    "vision_encoder": "vision_tower",
    "projector": "multi_modal_projector",
    "language_model": "text_decoder",
    "text_model": "text_decoder",
}
_TEXT = "text_decoder"
_ALL = "default"


def module_of(name: str, tensors: Collection[str]) -> Belongs | None:
    """Whether a tensor belongs to the module `name`; None if no tensor of `tensors` does."""
    module = _ALIASES.get(name, name)
    belongs: Belongs
    if module == _ALL:
        return lambda tensor: True
    if module == _TEXT:
        prefixes = (*_PARTS["vision_tower"], *_PARTS["multi_modal_projector"])
        belongs = _without(prefixes)
    elif module == "vision_tower":
        inside, outside = _within(_PARTS[module]), _within(_PARTS["multi_modal_projector"])
        belongs = _but(inside, outside)
    else:
        belongs = _within((*_PARTS.get(module, ()), f"{name}."))
    return belongs if any(belongs(tensor) for tensor in tensors) else None


def disjoint(modules: Mapping[str, Belongs]) -> dict[str, Belongs]:
    """The modules of one recipe by name: `default` and the text side without what others have."""
    rests = {name for name in modules if _ALIASES.get(name, name) in (_TEXT, _ALL)}
    own = [belongs for name, belongs in modules.items() if name not in rests]
    text = [modules[name] for name in rests if name != _ALL]

    def others(tensor: str, name: str) -> bool:
        taken = [*own, *text] if name == _ALL else own
        return any(belongs(tensor) for belongs in taken)

    return {
        name: _but(belongs, partial(others, name=name)) if name in rests else belongs
        for name, belongs in modules.items()
    }


def first_parts(tensors: Collection[str]) -> list[str]:
    """The first parts of tensor names, for a message about what modules there could be."""
    return list(dict.fromkeys(name.partition(".")[0] for name in tensors))


def _within(prefixes: tuple[str, ...]) -> Belongs:
    return lambda tensor: tensor.startswith(prefixes)


def _without(prefixes: tuple[str, ...]) -> Belongs:
    return lambda tensor: not tensor.startswith(prefixes)


def _but(inside: Belongs, outside: Belongs) -> Belongs:
    return lambda tensor: inside(tensor) and not outside(tensor)
