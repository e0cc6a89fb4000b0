"""Which tensors a module of a recipe means: the parts of models that see, hear, speak.

mergekit's names for parts, and any dotted prefix that exists. `default` and the text side are what
no other module of the recipe has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

#: Whether a tensor belongs to a module.
Belongs = Callable[[str], bool]

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
