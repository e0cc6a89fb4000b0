"""Which tensor of the base each stored tensor of a PEFT LoRA adapter changes, and in what role.

Names decide; for parameters without a module of their own, the order in which PEFT wraps them.
Every tensor finds its place, or the adapter is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mergepipe_pipeline.checkpoints.adapter_config import AdapterConfig
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.tensor_names import any_version, plain_name
from mergepipe_pipeline.errors import CheckpointError

#: Roles of stored tensors beside the factors A, B, embedding_A and embedding_B.
WHOLE, MAGNITUDE, TOKENS = "whole", "magnitude_vector", "trainable_tokens_delta"

#: What peft puts before the name of a module.
PREFIX = "base_model.model."
#: The adapter's own name ("default") is in the keys only if something else than peft saved them.
_UPDATE = re.compile(
    r"(?P<module>.+)\.(?:lora_(?:"
    r"(?P<linear>[AB])(?:\.[^.]+)?\.weight|(?P<embedding>embedding_[AB])(?:\.[^.]+)?"
    r"|(?P<magnitude>magnitude_vector)(?:\.[^.]+)?(?:\.weight)?)"
    r"|token_adapter\.(?P<tokens>trainable_tokens_delta)(?:\.[^.]+)?)"
)
_WRAPPER = re.compile(
    r"\.(?:token_adapter\.base_layer|base_layer|modules_to_save(?:\.default)?)(?=\.)"
)
_INNER = ".base_layer"
#: With what VeLoRA computes gradients; no value of the model depends on it.
_GRADIENTS_ONLY = re.compile(r".+\.lora_velora_embed(?:\.[^.]+)?")


@dataclass(frozen=True, slots=True)
class Change:
    """The adapter's tensors for one base tensor, by role.

    `module` is the changed module's name in the model that was adapted. `is_parameter`: the update
    is of a parameter of that name, not of a module's weight.
    """

    module: str
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    is_parameter: bool = False


def find_changes(
    checkpoint: Checkpoint, base_names: Collection[str], config: AdapterConfig
) -> dict[str, Change]:
    """The changes, by the base's names. Raises CheckpointError for a tensor without a place."""
    changes: dict[str, Change] = {}
    places = _Places(base_names)
    parameters = _parameters(checkpoint, places, config)
    for entry in checkpoint.tensors:
        if _GRADIENTS_ONLY.fullmatch(entry.name):
            continue
        module, role, name = _place(entry, places, parameters, checkpoint)
        is_parameter = module in parameters.values()
        change = changes.setdefault(name, Change(module, is_parameter=is_parameter))
        if role in change.entries or change.module != module:
            earlier = ", ".join(e.name for e in change.entries.values())
            raise unusable(
                entry, checkpoint, f"for {name}, which it changes elsewhere too", "one", earlier
            )
        change.entries[role] = entry
    return changes


def _place(
    entry: TensorEntry,
    places: _Places,
    parameters: Mapping[str, str],
    checkpoint: Checkpoint,
) -> tuple[str, str, str]:
    """The changed module, the tensor's role in the change, and the base's tensor."""
    key = plain_name(entry.name)
    update = _UPDATE.fullmatch(key)
    if update is None and ("lora_" in key or ".trainable_tokens" in key):
        raise unusable(entry, checkpoint, "of unknown meaning", "lora_A or lora_B", key)
    if update is None:
        role, own = WHOLE, key
    else:
        role = next(r for r in update.group("linear", "embedding", "magnitude", "tokens") if r)
        parameter = parameters.get(update["module"])
        if parameter is not None:
            return parameter, role, _base_name(parameter, places, entry, checkpoint)
        own = f"{update['module']}.weight"
    if own not in places:
        own = _WRAPPER.sub("", own)
    return own.rpartition(".")[0], role, _base_name(own, places, entry, checkpoint)


def whole_name(entry: TensorEntry) -> str | None:
    """The name in the adapted model of a tensor that is stored whole; None for an update."""
    key = plain_name(entry.name)
    return None if _UPDATE.fullmatch(key) else _WRAPPER.sub("", key)


def _parameters(checkpoint: Checkpoint, places: _Places, config: AdapterConfig) -> dict[str, str]:
    """The updated parameter, by the key of the module that wraps it.

    PEFT wraps a module once for each parameter, the later around the earlier, and names the
    wrappers alike; modules of experts have the projection down last.
    """
    if not config.target_parameters:
        return {}
    keys = (plain_name(e.name) for e in checkpoint.tensors)
    wrapped: dict[str, set[str]] = {}
    for update in filter(None, map(_UPDATE.fullmatch, keys)):
        wrapped.setdefault(update["module"].replace(_INNER, ""), set()).add(update["module"])
    parameter_by_module: dict[str, str] = {}
    for module, wrappers in wrapped.items():
        inside = (p for p in config.target_parameters if _is_in(p, module))
        names = {f"{module}.{p.rpartition('.')[2]}" for p in inside}
        in_base = {n for n in names if n in places}
        inner_first = sorted(in_base, key=lambda name: ("down" in name, name))
        outer_last = sorted(wrappers, key=len, reverse=True)
        if len(inner_first) == len(outer_last):
            parameter_by_module |= dict(zip(outer_last, inner_first, strict=True))
    return parameter_by_module


def _is_in(parameter: str, module: str) -> bool:
    return f".{module}".endswith(f".{parameter.rpartition('.')[0]}")


class _Places:
    """The base's tensors by what an adapter may call them."""

    def __init__(self, base_names: Collection[str]) -> None:
        self._versions: dict[str, list[str]] = {}
        self._suffixes: dict[str, list[str]] = {}
        for name in base_names:
            self._versions.setdefault(any_version(name), []).append(name)
            parts = name.split(".")
            for i in range(len(parts)):
                self._suffixes.setdefault(".".join(parts[i:]), []).append(name)

    def __contains__(self, own: str) -> bool:
        """Whether some tensor has that name in some version, or ends with it."""
        return own in self._suffixes or any_version(own) in self._versions

    def of(self, own: str) -> list[str]:
        """The tensor of that name, else those of that name in another version, else those that
        end with it, else the one that it ends with.
        """
        ends = self._suffixes.get(own, [])
        if own in ends:
            return [own]
        ends = self._versions.get(any_version(own), ends)
        if ends:
            return ends
        parts = own.split(".")
        tails = (".".join(parts[i:]) for i in range(1, len(parts)))
        # A last part alone ("weight") says nothing of where a tensor belongs.
        return next(([t] for t in tails if "." in t and t in self._suffixes.get(t, [])), [])


def _base_name(own: str, places: _Places, entry: TensorEntry, checkpoint: Checkpoint) -> str:
    """The one base tensor that the adapter calls so."""
    ends = places.of(own)
    if not ends:
        none = "none of that name (the base may tie it to another)"
        raise unusable(entry, checkpoint, "that the base does not have", own, none)
    if len(ends) > 1:
        several = ", ".join(sorted(ends)[:3])
        raise unusable(entry, checkpoint, "that may be several of the base", own, several)
    return ends[0]


def unusable(
    entry: TensorEntry, checkpoint: Checkpoint, what: str, expected: str, found: str
) -> CheckpointError:
    """The error for a tensor of an adapter or a delta that cannot be used."""
    is_delta = checkpoint.kind == "delta"
    return CheckpointError(
        f"{'A delta' if is_delta else 'An adapter'} holds a tensor {what}",
        where=f"{checkpoint.root}, {entry.file}, {entry.name}",
        expected=expected,
        found=found,
        next_step="give the base that it was taken from"
        if is_delta
        else f"give the base it was trained on{_trained_on(checkpoint)}, and if that is quantised, "
        "the 16-bit model that it was made from; or merge the two with peft and give the result",
    )


def _trained_on(checkpoint: Checkpoint) -> str:
    """The base that an adapter's config names, in brackets; nothing where it names none."""
    base = checkpoint.adapter_stated.get("base_model_name_or_path")
    return f" ({base})" if isinstance(base, str) and base and base.isprintable() else ""
