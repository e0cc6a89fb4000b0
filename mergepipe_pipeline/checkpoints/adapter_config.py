"""Reads what a PEFT LoRA adapter's config says about its tensors: scale, rank, orientation.

Text in, facts out; opens no file and sees no tensor (`adapter` does). A setting that would make an
adapter something else than low-rank updates, whole tensors and rows is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from math import sqrt
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.json_text import load_object

_LARGEST = 3.4028234663852886e38  # of float32, in which updates are computed
#: Patterns that leave a matcher no choice.
_PLAIN = re.compile(r"(?:[A-Za-z0-9_.^$-]|\\[.dw])*")
#: What an initialisation subtracts from the base's weights, by its method's name.
Start = Literal["", "pissa", "olora"]

CONFIG, KIND = "adapter_config.json", "An adapter's config"
_MERGE_WITH_PEFT = "merge the adapter with peft (merge_and_unload) and give the full checkpoint"

#: Keys that MLX writes into an adapter's config, and PEFT does not.
_MLX_KEYS = frozenset({"fine_tune_type", "lora_parameters"})
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
#: Initialisations that leave the base's weights as they are; the others subtract from them.
_KEEPS_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_CONVERTIBLE = ("pissa", "corda", "lora_ga")
#: What anyone can compute of the weights is subtracted: principal components (`pissa_niter_16`
#: draws random ones), and the first columns of Q and rows of R.
_REPEATABLE: dict[str, Start] = {"pissa": "pissa", "olora": "olora"}
_BIASES = (None, "none", "all", "lora_only")


def _checked(
    expected: str, is_right: Callable[[Any], bool], convert: Callable[[Any], Any] | None = None
) -> AfterValidator:
    """For `Annotated[Any, …]`: what is not right is refused as not `expected`."""

    def check(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(expected)
        return value if convert is None else convert(value)

    return AfterValidator(check)


def _is_number(value: Any) -> bool:
    try:
        is_real = isinstance(value, int | float) and not isinstance(value, bool)
        return is_real and abs(float(value)) <= _LARGEST
    except OverflowError:
        return False


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, str) and n for n in value)


def _is_pattern(pattern: str) -> bool:
    try:
        re.compile(rf"(.*\.)?({pattern})$")
        _matches(pattern, "")
    except (re.error, RecursionError, ValueError):
        return False
    return True


def _tokens(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    by_module = value if isinstance(value, dict) else {"": value}
    for rows in by_module.values():
        numbers = rows if isinstance(rows, list) else [None]
        if not all(type(n) is int and 0 <= n < 1 << 31 for n in numbers):
            raise ValueError("a list of tokens, or an object of a module's name to one")
        if len(set(numbers)) < len(numbers):
            raise ValueError("every token once")
    return tuple((module, tuple(rows)) for module, rows in by_module.items())


_Flag = Annotated[Any, _checked("true or false", lambda v: isinstance(v, bool | None), bool)]
_Rank = Annotated[
    Any, _checked("a rank from 1 to 2^31", lambda v: type(v) is int and 0 < v <= 1 << 31)
]
_Number = Annotated[Any, _checked("a finite number that float32 can hold", _is_number, float)]
_OrNone = BeforeValidator(lambda value: value or {})
_Pattern = Annotated[
    str, _checked("a regular expression without lookaround and back references", _is_pattern)
]
_Names = Annotated[
    Any,
    BeforeValidator(lambda value: value or []),
    _checked("a list of modules' names", _are_names, tuple),
]


class AdapterConfig(BaseModel):
    """The part of a LoRA config that tensors' values depend on, under PEFT's keys.

    Of patterns (regex to value) the first that matches counts. `use_dora`: rows have lengths of
    their own; `start` names what was subtracted from the base first, from which the factors set
    out. `target_parameters` are updated under their own names; `trainable_token_indices` are the
    rows of retrained tokens by the module's name (empty: any).
    """

    model_config = ConfigDict(frozen=True, defer_build=True)  # most merges have no adapter

    r: _Rank = 8
    lora_alpha: _Number = 8.0
    use_rslora: _Flag = False
    fan_in_fan_out: _Flag = False
    rank_pattern: Annotated[dict[_Pattern, _Rank], _OrNone] = {}
    alpha_pattern: Annotated[dict[_Pattern, _Number], _OrNone] = {}
    modules_to_save: _Names = ()
    ensure_weight_tying: _Flag = False
    use_dora: _Flag = False
    target_parameters: _Names = ()
    trainable_token_indices: Annotated[Any, _OrNone, AfterValidator(_tokens)] = ()
    start: Start = ""

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Rows of the tokens that are retrained in a module; none without an entry for it."""
        tokens: tuple[tuple[str, tuple[int, ...]], ...] = self.trainable_token_indices
        ends = (r for name, r in tokens if not name or f".{module}".endswith(f".{name}"))
        return next(ends, ())

    def retrains(self, module: str) -> bool:
        """Whether peft makes a copy of the whole module that is trained in its place."""
        return module.endswith(self.modules_to_save)

    def rank_of(self, module: str) -> int:
        """The rank r of a module, by its name in the model that was adapted."""
        rank: int = _first_match(self.rank_pattern, module, self.r)
        return rank

    def scale_of(self, module: str) -> float:
        """The factor of B·A: alpha / r, or alpha / √r if rank-stabilised (arXiv:2312.03732)."""
        rank = self.rank_of(module)
        alpha: float = _first_match(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


#: Keys that are read, here or before.
_READ = AdapterConfig.model_fields.keys() | {"bias", "init_lora_weights", "peft_type"}


def parse_adapter_config(text: str, where: str) -> AdapterConfig:
    """The config in the text of adapter_config.json. Raises CheckpointError for what is not LoRA.

    Source: LoraConfig of peft 0.21 (https://huggingface.co/docs/peft/package_reference/lora).
    """
    value = load_object(text, where, KIND)
    _refuse_other_methods(value, where)
    start = _start(value.get("init_lora_weights", True), where)
    try:
        return AdapterConfig.model_validate({**value, "start": start})
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        key = ".".join(str(part)[:80] for part in first["loc"] if part != "[key]")
        is_ours = first["type"] == "value_error"
        expected = str(first["ctx"]["error"]) if is_ours else "an object of regex to number"
        raise _bad(key, expected, first["input"], where) from invalid


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


def _first_match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((v for pattern, v in patterns.items() if _matches(pattern, module)), default)


def _matches(pattern: str, module: str) -> bool:
    """Match as peft does: the whole name, or its end after a dot; in time linear in the name.

    Python's own matcher takes ages for patterns like `(a+)+b`, so only plain names go to it.
    Raises ValueError for what RE2 does not know: lookaround and back references.
    """
    whole = rf"(.*\.)?({pattern})$"
    if _PLAIN.fullmatch(pattern):
        return re.match(whole, module) is not None
    import pyarrow as pa  # takes long to load, and few adapters have such patterns
    import pyarrow.compute as pc

    return bool(pc.match_substring_regex(pa.array([module]), f"^(?:{whole})")[0].as_py())


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


def refuse_mlx(config: str, uri: str) -> None:
    """Raise CheckpointError if an adapter's config is one that MLX wrote."""
    value = load_object(config, f"{uri}, {CONFIG}", KIND)
    if "peft_type" in value or not _MLX_KEYS & value.keys():
        return
    model = value.get("model")
    base = model if isinstance(model, str) and model.isprintable() else "BASE"
    raise CheckpointError(
        "An adapter of MLX is not read",
        where=f"{uri}, {CONFIG}",
        expected="an adapter that PEFT saved, or a whole model",
        found=", ".join(sorted(_MLX_KEYS & value.keys())),
        next_step=f"run `mlx_lm.fuse --model {base} --adapter-path FOLDER --save-path OUT "
        "--dequantize` where MLX is, and give OUT as a whole model",
    )
