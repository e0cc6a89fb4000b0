"""Reads what a PEFT LoRA adapter's config says about its tensors: scale, rank, orientation.

Text in, facts out; opens no file and sees no tensor (`adapter` does). A setting that would make an
adapter something else than low-rank updates, whole tensors and rows is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, TypeVar

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.json_text import load_object

_LARGEST = 3.4028234663852886e38  # of float32, in which updates are computed
#: Patterns that leave a matcher no choice.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.^$-]|\\[.dw])*")
_Number = TypeVar("_Number", int, float)
#: What an initialisation subtracts from the base's weights, by its method's name.
Start = Literal["", "pissa", "olora"]

CONFIG, KIND = "adapter_config.json", "An adapter's config"
_MERGE_WITH_PEFT = "merge the adapter with peft (merge_and_unload) and give the full checkpoint"

#: Keys that must be absent or falsy: with them, values are not what `AdapterConfig` says.
_REFUSED = {
    "lora_bias": "a bias in lora_B",
    "layer_replication": "copies of the base's layers",
    "alora_invocation_tokens": "an update that acts only after invocation tokens",
    "use_qalora": "QALoRA, which pools the inputs",
    "use_bdlora": "block-diagonal factors",
    "arrow_config": "a router over several adapters",
    "kasa_config": "KaSA, which changes the base's weights",
    "monteclora_config": "Monte Carlo samples of the factors",
}
#: Keys that say how the adapter was trained or where its base lies, not what its values are.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_dtype",
        "lora_ga_config",
        "lorap_lr_ratio",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "velora_config",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "init_lora_weights",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)
#: Initialisations that leave the base's weights as they are; the others subtract from them.
_KEEPS_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_CONVERTIBLE = ("pissa", "corda", "lora_ga")
#: What anyone can compute of the weights is subtracted: principal components (`pissa_niter_16`
#: draws random ones), and the first columns of Q and rows of R.
_REPEATABLE: dict[str, Start] = {"pissa": "pissa", "olora": "olora"}
_BIASES = (None, "none", "all", "lora_only")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of a LoRA config that tensors' values depend on.

    `rank_pattern` and `alpha_pattern` are (regex, value) in order: the first that matches counts.
    `keeps_lengths`: rows have lengths of their own (DoRA); `start` names what was subtracted from
    the base first, from which the factors set out. `parameters` are updated under their own names;
    `tokens` are the rows of retrained tokens by the module's name (empty: any).
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    fan_in_fan_out: bool
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    keeps_lengths: bool = False
    start: Start = ""
    parameters: tuple[str, ...] = ()
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Rows of the tokens that are retrained in a module; none without an entry for it."""
        ends = (r for name, r in self.tokens if not name or f".{module}".endswith(f".{name}"))
        return next(ends, ())

    def retrains(self, module: str) -> bool:
        """Whether peft makes a copy of the whole module that is trained in its place."""
        return module.endswith(self.modules_to_save)

    def rank_of(self, module: str) -> int:
        """The rank r of a module, by its name in the model that was adapted."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B·A: alpha / r, or alpha / √r if rank-stabilised (arXiv:2312.03732)."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (sqrt(rank) if self.rank_stabilized else rank)


def parse_adapter_config(text: str, where: str) -> AdapterConfig:
    """The config in the text of adapter_config.json. Raises CheckpointError for what is not LoRA.

    Source: LoraConfig of peft 0.21 (https://huggingface.co/docs/peft/package_reference/lora).
    """
    value = load_object(text, where, KIND)
    _refuse_other_methods(value, where)
    start = _start(value.get("init_lora_weights", True), where)
    return AdapterConfig(
        _positive_int(value.get("r", 8), "r", where),
        _number(value.get("lora_alpha", 8), "lora_alpha", where),
        _flag(value, "use_rslora", where),
        _flag(value, "fan_in_fan_out", where),
        tuple(
            (k, _positive_int(v, f"rank_pattern.{k}", where))
            for k, v in _pattern(value, "rank_pattern", where)
        ),
        tuple(
            (k, _number(v, f"alpha_pattern.{k}", where))
            for k, v in _pattern(value, "alpha_pattern", where)
        ),
        _names(value, "modules_to_save", where),
        _flag(value, "ensure_weight_tying", where),
        _flag(value, "use_dora", where),
        start,
        _names(value, "target_parameters", where),
        _tokens(value, where),
    )


def _refuse_other_methods(value: Mapping[str, Any], where: str) -> None:
    if value.get("peft_type") != "LORA":
        raise CheckpointError(
            "This kind of adapter is not read",
            where=f"{where}, peft_type",
            expected='"LORA"',
            found=_shown(value.get("peft_type")),
            next_step=_MERGE_WITH_PEFT,
        )
    if value.get("bias") not in _BIASES:
        raise _bad("bias", "none, all or lora_only", value["bias"], where)
    for key, what in _REFUSED.items():
        # A list may hold token 0 or layer 0 alone: only what is empty or off passes.
        if value.get(key) not in (None, False, [], {}):
            raise CheckpointError(
                f"An adapter with {what} is not read",
                where=f"{where}, {key}",
                expected="null or false",
                found=_shown(value[key]),
                next_step=_MERGE_WITH_PEFT,
            )
    for key in sorted(value.keys() - _REFUSED.keys() - _WITHOUT_EFFECT - _READ):
        if value[key]:
            raise CheckpointError(
                "An adapter's config has an unknown setting that may change its values",
                where=f"{where}, {key}",
                expected="the settings of peft 0.21",
                found=_shown(value[key]),
                next_step=f"if it has no effect on the weights, remove it; else {_MERGE_WITH_PEFT}",
            )


def _start(init: object, where: str) -> Start:
    """How training first changed the base's weights, of the ways that can be repeated.

    peft saves `true` here when it converts such an adapter, and the method's name otherwise.
    """
    method = init.lower() if isinstance(init, str) else ""
    if init is None or isinstance(init, bool) or method in _KEEPS_BASE:
        return ""
    if method in _REPEATABLE:
        return _REPEATABLE[method]
    raise CheckpointError(
        "An adapter was trained on a base whose weights its initialisation changed",
        where=f"{where}, init_lora_weights",
        expected="true, false, " + ", ".join(sorted(_KEEPS_BASE | _REPEATABLE.keys())),
        found=_shown(init),
        next_step="save it again with peft's save_pretrained(folder, "
        "path_initial_model_for_weight_conversion=<the adapter before training>)"
        if method.startswith(_CONVERTIBLE)
        else _MERGE_WITH_PEFT,
    )


def _first_match(
    patterns: tuple[tuple[str, _Number], ...], module: str, default: _Number
) -> _Number:
    return next((value for pattern, value in patterns if _matches(pattern, module)), default)


def _matches(pattern: str, module: str) -> bool:
    """As peft matches: the whole name, or its end after a dot; in time linear in the name.

    Python's own matcher takes ages for patterns like `(a+)+b`, so only plain names go to it.
    Raises ValueError for what RE2 does not know: lookaround and back references.
    """
    whole = rf"(.*\.)?({pattern})$"
    if _PLAIN.fullmatch(pattern):
        return re.match(whole, module) is not None
    import pyarrow as pa  # takes long to load, and few adapters have such patterns
    import pyarrow.compute as pc

    return bool(pc.match_substring_regex(pa.array([module]), f"^(?:{whole})")[0].as_py())


def _pattern(value: Mapping[str, Any], key: str, where: str) -> list[tuple[str, Any]]:
    patterns = value.get(key) or {}
    if not isinstance(patterns, dict):
        raise _bad(key, "an object of regex to number", patterns, where)
    for pattern in patterns:
        try:
            re.compile(rf"(.*\.)?({pattern})$")
            _matches(pattern, "")
        except (re.error, RecursionError, ValueError) as error:
            place = f"{key}.{pattern[:80]}"
            expected = "a regular expression without lookaround and back references"
            raise _bad(place, expected, str(error), where) from error
    return list(patterns.items())


def _names(value: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    names = value.get(key) or []
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise _bad(key, "a list of modules' names", names, where)
    return tuple(names)


def _tokens(value: Mapping[str, Any], where: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    key = "trainable_token_indices"
    setting = value.get(key) or {}
    by_module = {"": setting} if isinstance(setting, list) and setting else setting or {}
    expected = "a list of tokens, or an object of a module's name to one"
    if not isinstance(by_module, dict):
        raise _bad(key, expected, setting, where)
    for rows in by_module.values():
        numbers = rows if isinstance(rows, list) else [None]
        if not all(type(n) is int and 0 <= n < 1 << 31 for n in numbers):
            raise _bad(key, expected, setting, where)
        if len(set(numbers)) < len(numbers):
            raise _bad(key, "every token once", setting, where)
    return tuple((module, tuple(rows)) for module, rows in by_module.items())


def _positive_int(value: object, key: str, where: str) -> int:
    if type(value) is not int or not 0 < value <= 1 << 31:
        raise _bad(key, "a rank from 1 to 2^31", value, where)
    return value


def _number(value: object, key: str, where: str) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if abs(number) <= _LARGEST:
                return number
    except OverflowError:
        pass
    raise _bad(key, "a finite number that float32 can hold", value, where)


def _flag(value: Mapping[str, Any], key: str, where: str) -> bool:
    flag = value.get(key)
    if not isinstance(flag, bool | None):
        raise _bad(key, "true or false", flag, where)
    return bool(flag)


def _shown(value: object) -> str:
    return json.dumps(value)[:80]


def _bad(key: str, expected: str, found: object, where: str) -> CheckpointError:
    return CheckpointError(
        "An adapter's config is not valid",
        where=f"{where}, {key}",
        expected=expected,
        found=_shown(found),
        next_step="correct adapter_config.json, or get the adapter again",
    )
