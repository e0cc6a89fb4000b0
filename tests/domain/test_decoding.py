"""Codes, scales and config.json fit together, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mergepipe_pipeline.checkpoints.open_checkpoint import open_checkpoint
from mergepipe_pipeline.domain.checkpoint import Checkpoint, TensorEntry
from mergepipe_pipeline.domain.decoding import logical_parts
from mergepipe_pipeline.errors import CheckpointError, IncompatibleCheckpointsError
from tests.support.codes import FORMS, GPT_OSS_SETTINGS, Tensors, gpt_oss
from tests.support.laws import examples

CODES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
#: Rows, columns and groups that no two of are alike.
ROWS, COLS = 96, 160
Headers = dict[str, tuple[str, tuple[int, ...]]]


def headers(name: str) -> tuple[Headers, dict[str, Any]]:
    """Dtypes and shapes of a form's tensors, and what its config says."""
    g = torch.Generator().manual_seed(0)
    if name == "gpt-oss":
        stored, said = gpt_oss(g, 3, ROWS, 5), GPT_OSS_SETTINGS
    else:
        stored, said = FORMS[name].stored(g, ROWS, COLS), dict(FORMS[name].settings)
    return _headers(stored), said


def _headers(stored: Tensors) -> Headers:
    return {f"m.up_proj.{n}": (CODES[t.dtype], tuple(t.shape)) for n, t in stored.items()}


def checkpoint(tensors: Headers, said: object) -> Checkpoint:
    entries = tuple(TensorEntry(n, d, s, "model.safetensors", 0) for n, (d, s) in tensors.items())
    config = json.dumps({"quantization_config": said})
    return Checkpoint("coded", "coded", (), entries, config)


def opened(tensors: Headers, said: object) -> dict[str, Any]:
    """The logical tensors, or the refusal of a checkpoint that is not decoded at all."""
    c = checkpoint(tensors, said)
    if c.form is None or not c.form.schemes:
        raise IncompatibleCheckpointsError("not decoded")
    return {n: p for n, p in logical_parts(c).items() if p.codes}


ALL = [*FORMS, "gpt-oss"]


def lose(which: int) -> Callable[[Headers], Headers]:
    return lambda tensors: {n: t for i, (n, t) in enumerate(tensors.items()) if i != which}


def reshaped(which: int, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    def changed(tensors: Headers) -> Headers:
        name = list(tensors)[which]
        dtype, shape = tensors[name]
        return {**tensors, name: (dtype, change(shape))}

    return changed


def retyped(which: int, dtype: str) -> Any:
    def changed(tensors: Headers) -> Headers:
        name = list(tensors)[which]
        return {**tensors, name: (dtype, tensors[name][1])}

    return changed


MALFORMED = {
    "codes alone": lose(1),
    "scales alone": lose(0),
    "one row of scales more": reshaped(
        1, lambda s: (*s[:-2], s[-2] + 1, s[-1]) if len(s) > 1 else (2,)
    ),
    "one column of scales more": reshaped(1, lambda s: (*s[:-1], s[-1] + 1) if s else (3,)),
    "half the scales": reshaped(1, lambda s: (*s[:-2], s[-2] // 2, s[-1]) if len(s) > 1 else (0,)),
    "scales turned": reshaped(1, lambda s: (*s[:-2], s[-1], s[-2]) if len(s) > 1 else (1, 2)),
    "scales in one run": reshaped(1, lambda s: (torch.Size(s).numel() + 7,)),
    "codes in one run": reshaped(0, lambda s: (torch.Size(s).numel(),)),
    "codes without a row": reshaped(0, lambda s: (*s[:-2], s[-2] - 20, s[-1])),
    "codes with twice the columns": reshaped(0, lambda s: (*s[:-1], 2 * s[-1])),
    "integers as scales": retyped(1, "I32"),
    "doubles as scales": retyped(1, "F64"),
    "floats as codes": retyped(0, "BF16"),
    "long integers as codes": retyped(0, "I64"),
    "words as codes": retyped(0, "U16"),
}


#: Layouts of weights of another shape, which headers alone cannot tell from what was meant. Where a
#: shape is stated, it is compared when the codes are read.
OTHER_SHAPES = {
    ("fp8, one scale", "codes without a row"),
    ("fp8, one scale", "codes with twice the columns"),
    ("fp8, a scale per row", "codes with twice the columns"),
    ("int8, packed", "codes with twice the columns"),
    ("int8, a scale per row", "codes with twice the columns"),
}


@pytest.mark.parametrize("name", ALL)
def test_each_form_as_it_is_written_is_decoded(name: str) -> None:
    (part,) = opened(*headers(name)).values()
    assert part.numel == ROWS * COLS * (3 if name == "gpt-oss" else 1)


@pytest.mark.parametrize("malformed", MALFORMED)
@pytest.mark.parametrize("name", ALL)
def test_no_malformed_layout_is_taken_for_weights(name: str, malformed: str) -> None:
    tensors, said = headers(name)
    changed = MALFORMED[malformed](tensors)
    if (name, malformed) in OTHER_SHAPES:
        assert opened(changed, said)["m.up_proj.weight"].shape != (ROWS, COLS)
        return
    with pytest.raises(IncompatibleCheckpointsError) as error:
        opened(changed, said)
    if error.value.where is not None:
        assert "up_proj" in error.value.where
        assert all((error.value.expected, error.value.found, error.value.next_step))


@pytest.mark.parametrize("name", ALL)
def test_what_the_config_does_not_say_is_not_guessed_from_shapes(name: str) -> None:
    tensors, said = headers(name)
    for other in ({}, {"quant_method": "gptq"}, {"quant_method": "quark"}, None, "fp8", [said]):
        form = checkpoint(tensors, other).form
        assert form is None or not form.schemes, other


def test_order_of_columns_a_second_form_and_codes_of_other_modules_are_refused() -> None:
    tensors, said = headers("int4 in groups")
    with pytest.raises(IncompatibleCheckpointsError, match="columns in their order"):
        opened({**tensors, "m.up_proj.weight_g_idx": ("I32", (COLS,))}, said)
    with pytest.raises(IncompatibleCheckpointsError, match=r"one form of a weight.*twice"):
        opened({**tensors, "m.up_proj.weight": ("BF16", (ROWS, COLS))}, said)
    with pytest.raises(IncompatibleCheckpointsError, match=r"m\.k_proj\.weight_packed"):
        opened({**tensors, "m.k_proj.weight_packed": ("I32", (ROWS, COLS // 8))}, said)


def test_scales_of_activations_and_caches_leave_with_the_codes() -> None:
    tensors, said = headers("NVFP4, modelopt")
    leaves = ("input_scale", "output_scale", "activation_scale", "input_zero_point", "k_scale")
    others: Headers = {f"m.up_proj.{leaf}": ("F32", ()) for leaf in leaves}
    others |= {"m.attn.k_scale": ("F32", ()), "m.k_proj.v_scale": ("F32", (1,))}
    c = checkpoint({**tensors, **others}, said)
    assert list(logical_parts(c)) == ["m.up_proj.weight"]


def test_stacked_experts_with_the_names_of_modelopt_are_decoded_by_their_one_scale() -> None:
    said = {"quant_method": "modelopt", "quant_algo": "FP8"}
    tensors: Headers = {
        "m.experts.gate_up_proj": ("F8_E4M3", (4, 64, 128)),
        "m.experts.gate_up_proj_weight_scale": ("F32", ()),
        "m.experts.gate_up_proj_input_scale": ("F32", ()),
    }
    (part,) = opened(tensors, said).values()
    assert part.shape == (4, 64, 128)


def test_codes_whose_basis_or_order_the_config_changes_are_not_decoded() -> None:
    tensors, said = headers("int4 in groups")
    turned = {"config_groups": {"u": {"type": "hadamard", "apply": []}}}
    for other in ({"transform_config": turned}, {"format": "marlin-24"}, {"format": "dense"}):
        with pytest.raises(IncompatibleCheckpointsError):
            opened(tensors, {**said, **other})
    untold: list[dict[str, Any]] = [{"transform_config": {}}, {"transform_config": None}]
    for same in (*untold, {"format": "pack-quantized"}):
        assert opened(tensors, {**said, **same})
    groups = json.loads(json.dumps(said["config_groups"]))
    groups["group_0"]["weights"]["actorder"] = "static"  # columns as they were
    assert opened(tensors, {**said, "config_groups": groups})


def test_a_stated_shape_is_read_in_either_width_of_integers() -> None:
    tensors, said = headers("int4 in groups")
    name = "m.up_proj.weight_shape"
    assert opened({**tensors, name: ("I32", (2,))}, said)
    for dtype, shape in (("F32", (2,)), ("I64", (3,))):
        with pytest.raises(IncompatibleCheckpointsError, match="a shape as integers"):
            opened({**tensors, name: (dtype, shape)}, said)


def test_a_model_whose_quantisation_is_said_beside_its_config_is_refused(tmp_path: Path) -> None:
    tensors = {"w.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(CheckpointError, match=r"beside config.json.*quant_method.*modelopt"):
        open_checkpoint(str(tmp_path), "apart")


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_layout_that_is_taken_holds_as_many_codes_as_values_and_scales_for_all(
    name: str, data: st.DataObject
) -> None:
    tensors, said = headers(name)
    for key, (dtype, shape) in list(tensors.items()):
        drawn = tuple(data.draw(st.sampled_from((n, n - 1, n + 1, 2 * n, 1))) for n in shape)
        tensors[key] = dtype, drawn
    try:
        parts = opened(tensors, said)
    except IncompatibleCheckpointsError:
        return
    for part in parts.values():
        codes = part.codes
        n_bits = {"E2M1": 4, "I4": 4}.get(codes.element, 8)
        assert part.numel * n_bits == 8 * part.entry.nbytes
        rows, cols = codes.grid
        matrices = part.numel // max(1, codes.matrix[0] * codes.matrix[1])
        assert codes.scales.numel in (1, matrices * rows * cols)


def test_every_tensor_of_a_coded_checkpoint_is_used_or_named(tmp_path: Path) -> None:
    tensors, said = headers("fp8 in blocks")
    plain: Headers = {"m.norm.weight": ("BF16", (COLS,)), "lm_head.weight": ("BF16", (9, COLS))}
    parts = logical_parts(checkpoint({**tensors, **plain}, said))
    assert list(parts) == ["m.up_proj.weight", "m.norm.weight", "lm_head.weight"]
    assert not parts["m.norm.weight"].codes
