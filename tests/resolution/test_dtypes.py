"""Merges of all dtypes that safetensors stores, mixed among models: one cast in, one cast out.

The judge decodes and rounds in NumPy from the formats' definitions and shares no cast with torch.
Values are small multiples of a power of two and weights powers of two, so that every sum in float32
is exact and the only rounding is the one on write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mergepipe_pipeline.dtypes import TORCH_NAME, code_from_name, promoted
from mergepipe_pipeline.execution.planning import make_plan
from mergepipe_pipeline.resolution.recipe_text import parse
from mergepipe_pipeline.resolution.resolve import resolve
from mergepipe_pipeline.verbs.analyze import analyze
from mergepipe_pipeline.verbs.register import register
from mergepipe_pipeline.warehouse import Warehouse
from tests.execution.test_run import run, tensors
from tests.support.family import layout, write_model
from tests.support.oracles import ORACLES, Case

Tensors = dict[str, torch.Tensor]
Floats = npt.NDArray[np.float64]
SIZES = {"layers": 1, "hidden": 32, "vocab": 48}
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Bits of exponent and of fraction; the largest finite value of float8_e4m3fn takes a code of NaN.
FORMATS = {
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
#: As `torch.promote_types` says; of float8, which torch does not promote, what holds both.
PROMOTED = {
    ("float64", "float8_e5m2"): "float64",
    ("float64", "bfloat16"): "float64",
    ("float64", "float32"): "float64",
    ("float32", "float8_e4m3fn"): "float32",
    ("float32", "float16"): "float32",
    ("float16", "float8_e4m3fn"): "float16",
    ("float16", "float8_e5m2"): "float16",
    ("float16", "bfloat16"): "float32",
    ("bfloat16", "float8_e4m3fn"): "bfloat16",
    ("bfloat16", "float8_e5m2"): "bfloat16",
    ("float8_e4m3fn", "float8_e5m2"): "float16",
}
INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
WEIGHTS = (0.5, 0.25, 2.0)


def decoded(value: torch.Tensor) -> Floats:
    """float64 numbers from the bits of a tensor of any float dtype, in its shape."""
    exponent_bits, fraction_bits = FORMATS[str(value.dtype).removeprefix("torch.")]
    bits = value.contiguous().view(torch.uint8).numpy().view(f"<u{value.element_size()}")
    bits = bits.astype(np.uint64).reshape(value.shape)
    fraction = (bits & np.uint64((1 << fraction_bits) - 1)).astype(np.float64)
    exponent = (bits >> np.uint64(fraction_bits)) & np.uint64((1 << exponent_bits) - 1)
    sign = np.where(bits >> np.uint64(exponent_bits + fraction_bits), -1.0, 1.0)
    bias = (1 << (exponent_bits - 1)) - 1
    power = np.maximum(exponent.astype(np.int64), 1) - bias
    mantissa = fraction * 2.0**-fraction_bits + (exponent > 0)
    found: Floats = sign * np.ldexp(mantissa, power)
    return found


def rounded(values: Floats, dtype: str) -> Floats:
    """The nearest numbers of a dtype, halves to even; none may overflow."""
    exponent_bits, fraction_bits = FORMATS[dtype]
    least = 2 - (1 << (exponent_bits - 1))
    power = np.frexp(values)[1].astype(np.int64) - 1
    step = np.ldexp(1.0, np.maximum(power, least) - fraction_bits)
    found: Floats = np.rint(values / step) * step
    return found


def write(folder: Path, seed: int, dtype: str, extra: Tensors | None = None) -> Path:
    """A model of multiples of 1/8 from -15/8 to 15/8, rounded to `dtype`, and `extra` tensors."""
    numbers = np.random.default_rng(seed)
    values = {}
    for name, shape in layout(**SIZES):
        eighths = torch.from_numpy(numbers.integers(-15, 16, shape) / 8)
        values[name] = eighths.to(getattr(torch, dtype))
    write_model(folder, values | (extra or {}), **SIZES)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models per dtype, `float16` and `float16 too`; read-only."""
    folder = tmp_path_factory.mktemp("dtypes")
    return {
        name: write(folder / name, 2 * i + j, dtype)
        for i, dtype in enumerate(FLOATS)
        for j, name in enumerate((dtype, f"{dtype} too"))
    }


def recipe(
    method: str, base: Path | None, experts: Sequence[Path], extra: str = "", per_model: str = ""
) -> str:
    lines = [f"merge_method: {method}", *([f"base_model: {base}"] if base else []), "models:"]
    for weight, expert in zip(WEIGHTS, experts, strict=False):
        lines += [f"- model: {expert}", f"  parameters: {{weight: {weight}{per_model}}}"]
    return "\n".join([*lines, extra, ""])


def summed(base: Path, experts: Sequence[Path]) -> dict[str, Floats]:
    """B + Σ w·(T − B), exactly."""
    below, above = tensors(base), [tensors(e) for e in experts]
    out = {}
    for name, value in below.items():
        b = decoded(value)
        deltas = [w * (decoded(t[name]) - b) for w, t in zip(WEIGHTS, above, strict=False)]
        out[name] = b + np.sum(deltas, axis=0)
    return out


def assert_exact(folder: str | Path, expected: Mapping[str, Floats], dtype: str) -> None:
    """Every tensor is of `dtype` and has the bits of the expected values rounded to it once."""
    found = tensors(folder)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == getattr(torch, dtype), name
        np.testing.assert_array_equal(decoded(value), rounded(expected[name], dtype), name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_judge_decodes_and_rounds_as_the_formats_define(dtype: str) -> None:
    kind = getattr(torch, dtype)
    some = torch.linspace(-2, 2, 999, dtype=torch.float64)
    np.testing.assert_array_equal(rounded(some.numpy(), dtype), decoded(some.to(kind)))
    if kind.itemsize == 1:
        codes = torch.arange(256, dtype=torch.uint8).view(kind)
        finite = codes.float().isfinite().numpy()
        np.testing.assert_array_equal(decoded(codes)[finite], codes.double().numpy()[finite])


@pytest.mark.parametrize(("one", "other"), PROMOTED)
def test_two_dtypes_merge_to_the_exact_sum_rounded_once_to_what_holds_both(
    home: Warehouse, models: dict[str, Path], one: str, other: str
) -> None:
    base, experts = models[other], [models[f"{other} too"], models[f"{one} too"]]
    raw = parse(recipe("task_arithmetic", base, experts), name="t", where="t")
    outcome = run(home, raw.text)
    expected = summed(base, experts)
    assert_exact(outcome.snapshot.path, expected, PROMOTED[one, other])
    read = sum(v.numel() * v.element_size() for e in experts for v in tensors(e).values())
    assert outcome.summary()["expert_bytes_read"] == read
    size = getattr(torch, PROMOTED[one, other]).itemsize
    assert resolve(home, raw).cost.output_bytes == size * sum(v.size for v in expected.values())
    config = json.loads((Path(outcome.snapshot.path) / "config.json").read_text())
    assert PROMOTED[one, other] in (config.get("torch_dtype"), config.get("dtype"))


@pytest.mark.parametrize("one", FLOATS)
@pytest.mark.parametrize("other", FLOATS)
def test_dtypes_are_promoted_as_torch_does_and_in_any_order(one: str, other: str) -> None:
    codes = [code_from_name(name, "") for name in (one, other)]
    assert promoted(codes) == promoted(reversed(codes))
    if one == other:
        assert promoted(codes) == codes[0]
    elif not any("float8" in name for name in (one, other)):
        wanted = torch.promote_types(getattr(torch, one), getattr(torch, other))
        assert TORCH_NAME[promoted(codes)] == str(wanted).removeprefix("torch.")


@pytest.mark.parametrize("wide", ["float32", "float16"])
def test_each_weight_has_the_dtype_of_its_own_inputs(
    home: Warehouse, models: dict[str, Path], tmp_path: Path, wide: str
) -> None:
    mixed = tensors(models["bfloat16 too"])
    name = next(iter(mixed))
    mixed[name] = mixed[name].to(getattr(torch, wide))
    write_model(tmp_path / "mixed", mixed, **SIZES)
    for order in (
        (models["bfloat16"], tmp_path / "mixed"),
        (tmp_path / "mixed", models["bfloat16"]),
    ):
        found = tensors(run(home, recipe("linear", None, order)).snapshot.path)
        wanted = {n: torch.float32 if n == name else torch.bfloat16 for n in mixed}
        assert {n: v.dtype for n, v in found.items()} == wanted


def test_what_a_recipe_keeps_has_the_bytes_of_the_base(
    home: Warehouse, models: dict[str, Path]
) -> None:
    text = recipe("task_arithmetic", models["bfloat16"], [models["float32"]])
    text += "budget: {keep: ['*embed_tokens*']}\n"
    found, below = tensors(run(home, text).snapshot.path), tensors(models["bfloat16"])
    for name, value in found.items():
        kept = "embed_tokens" in name
        assert value.dtype == (torch.bfloat16 if kept else torch.float32)
        assert torch.equal(value, below[name]) is kept


def test_an_update_of_low_rank_has_the_dtype_of_the_weight_it_is_added_to(
    home: Warehouse, models: dict[str, Path], tmp_path: Path
) -> None:
    """The factors are in float32, as PEFT saves them; PEFT and mergekit write the base's dtype."""
    name = next(n for n in tensors(models["bfloat16"]) if n.endswith("q_proj.weight"))
    module = f"base_model.model.{name.removesuffix('.weight')}"
    factors = {f"{module}.lora_A.weight": torch.ones(2, 32)}
    factors[f"{module}.lora_B.weight"] = torch.ones(32, 2) / 8
    save_file(factors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), f"{models['bfloat16']}+{tmp_path}"):
        text = recipe("task_arithmetic", models["bfloat16"], [Path(model)])
        found = tensors(run(home, text).snapshot.path)
        assert {v.dtype for v in found.values()} == {torch.bfloat16}
        assert not torch.equal(found[name], tensors(models["bfloat16"])[name])


@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_can_be_asked_for_and_is_in_the_config(
    home: Warehouse, models: dict[str, Path], key: str, dtype: str
) -> None:
    base, experts = models["bfloat16"], [models["float8_e5m2"], models["float64"]]
    text = recipe("task_arithmetic", base, experts, f"{key}: {dtype}")
    path = Path(run(home, text).snapshot.path)
    assert_exact(path, summed(base, experts), dtype)
    config = json.loads((path / "config.json").read_text())
    assert {config.get("torch_dtype", dtype), config.get("dtype", dtype)} == {dtype}


@pytest.mark.parametrize(("one", "other"), PROMOTED)
def test_without_a_base_the_order_of_the_models_does_not_decide_the_dtype(
    home: Warehouse, models: dict[str, Path], one: str, other: str
) -> None:
    merged = [models[one], models[f"{other} too"]]
    values = [{n: decoded(t) for n, t in tensors(m).items()} for m in merged]
    mean = {n: (values[0][n] + values[1][n]) / 2 for n in values[0]}
    text = recipe("linear", None, merged).replace("weight: 0.25", "weight: 0.5")
    assert_exact(run(home, text).snapshot.path, mean, PROMOTED[one, other])
    turned = recipe("linear", None, merged[::-1]).replace("weight: 0.25", "weight: 0.5")
    assert_exact(run(home, turned).snapshot.path, mean, PROMOTED[one, other])


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_trim_of_mixed_dtypes_keeps_what_the_oracle_keeps(
    home: Warehouse, models: dict[str, Path], dtype: str
) -> None:
    """Of float8 most magnitudes are equal, so that the lowest indices decide."""
    base, experts = models["float8_e5m2"], [models[f"{dtype} too"], models["float8_e4m3fn"]]
    text = recipe("ties", base, experts, "parameters: {normalize: false}", ", density: 0.3")
    above, expected = [tensors(e) for e in experts], {}
    for name, value in tensors(base).items():
        case = Case(
            decoded(value).flatten(),
            np.stack([decoded(t[name]).flatten() for t in above]),
            {"normalize": False},
            [{"weight": w, "density": 0.3} for w in WEIGHTS[:2]],
        )
        expected[name] = ORACLES["ties"](case).reshape(value.shape)
    assert_exact(run(home, text + "out_dtype: float32\n").snapshot.path, expected, "float32")


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_delta_checkpoint_may_be_of_any_dtype(
    home: Warehouse, models: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    base = models["bfloat16"]
    delta = tensors(models[f"{dtype} too"])
    (tmp_path / "delta").mkdir()
    save_file(delta, tmp_path / "delta" / "model.safetensors", metadata={"mergepipe": "delta"})
    text = recipe("task_arithmetic", base, [tmp_path / "delta"], "out_dtype: float8_e4m3fn")
    expected = {n: decoded(v) + 0.5 * decoded(delta[n]) for n, v in tensors(base).items()}
    assert_exact(run(home, text).snapshot.path, expected, "float8_e4m3fn")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("budget", ["0", "20%", "60%"])
def test_analysis_plans_and_budgets_count_one_byte_per_element_of_float8(
    home: Warehouse, models: dict[str, Path], dtype: str, budget: str
) -> None:
    base, expert = models[dtype], models[f"{dtype} too"]
    numel = sum(v.numel() for v in tensors(base).values())
    raw = parse(recipe("ties", base, [expert], "", ", density: 0.5"), name="t", where="t")
    cost = resolve(home, raw).cost
    assert cost.expert_bytes_total == cost.base_bytes == cost.output_bytes == numel
    assert cost.analysis_bytes == 2 * numel
    register(home, base, name="base")
    register(home, expert, name="expert", base="base")
    analyze(home, ["expert"])
    assert resolve(home, raw).cost.analysis_bytes == 0
    estimates = make_plan(home, raw, budget=budget).estimates
    summary = run(home, raw.text, budget=budget).summary()
    assert estimates.expert_bytes_total == numel
    assert summary["expert_bytes_read"] == summary["expert_bytes_planned"]
    assert summary["expert_bytes_read"] <= summary["budget_bytes"] < numel
    if budget == "0":
        folder = run(home, raw.text, budget=budget).snapshot.path
        for name, value in tensors(folder).items():
            assert torch.equal(value.view(torch.uint8), tensors(base)[name].view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_files_in_float8_are_read_by_safetensors_without_torch_s_loader(
    home: Warehouse, models: dict[str, Path], dtype: str
) -> None:
    text = recipe("linear", None, [models["float16"], models["bfloat16"]], f"out_dtype: {dtype}")
    path = Path(run(home, text).snapshot.path)
    for file in path.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert (
                    opened.get_slice(name).get_dtype()
                    == {
                        "float8_e4m3fn": "F8_E4M3",
                        "float8_e5m2": "F8_E5M2",
                    }[dtype]
                )
        assert all(v.float().isfinite().all() for v in load_file(file).values())
