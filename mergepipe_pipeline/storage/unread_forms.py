"""Forms of checkpoints that are recognised and not read: each error says how to get one that is."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe_pipeline.domain.checkpoint import CheckpointKind, TensorEntry
from mergepipe_pipeline.errors import CheckpointError
from mergepipe_pipeline.storage.adapter_config import CONFIG as ADAPTER_CONFIG
from mergepipe_pipeline.storage.adapter_config import KIND as ADAPTER_CONFIG_KIND
from mergepipe_pipeline.storage.json_text import load_object
from mergepipe_pipeline.storage.regular import text_of

#: Keys that MLX writes into an adapter's config, and PEFT does not.
_MLX_KEYS = frozenset({"fine_tune_type", "lora_parameters"})


def pickled(files: Sequence[str], expected: str, uri: str) -> CheckpointError:
    """The error for files that unpickling or another program would read."""
    return CheckpointError(
        "This format is never read: loading it can run code",
        where=f"{uri}, {text_of(files[0])}",
        expected=expected,
        found=text_of(", ".join(files[:3])),
        next_step="GGUF is for inference: get the model that it was made from"
        if files[0].endswith(".gguf")
        else ("download it, then " if "://" in uri else "")
        + "`mergepipe convert` writes it as safetensors, and runs nothing of it",
    )


def refuse_mlx(config: str, uri: str) -> None:
    """Raise CheckpointError if an adapter's config is one that MLX wrote."""
    value = load_object(config, f"{uri}, {ADAPTER_CONFIG}", ADAPTER_CONFIG_KIND)
    if "peft_type" in value or not _MLX_KEYS & value.keys():
        return
    model = value.get("model")
    base = model if isinstance(model, str) and model.isprintable() else "BASE"
    raise CheckpointError(
        "An adapter of MLX is not read",
        where=f"{uri}, {ADAPTER_CONFIG}",
        expected="an adapter that PEFT saved, or a whole model",
        found=", ".join(sorted(_MLX_KEYS & value.keys())),
        next_step=f"run `mlx_lm.fuse --model {base} --adapter-path FOLDER --save-path OUT "
        "--dequantize` where MLX is, and give OUT as a whole model",
    )


def refuse_ungathered(tensors: Sequence[TensorEntry], kind: CheckpointKind, uri: str) -> None:
    """Raise CheckpointError if weights are the empty places that ZeRO-3 leaves of them."""
    empty = [t for t in tensors if t.shape == (0,) and t.name.endswith(".weight")]
    if not empty:
        return
    raise CheckpointError(
        f"The weights of {'an adapter' if kind == 'adapter' else 'a checkpoint'} were not gathered "
        "when it was saved",
        where=f"{uri}, {empty[0].file}, tensor {empty[0].name}",
        expected="tensors with elements",
        found=f"{len(empty)} of {len(tensors)} tensors of shape [0], as DeepSpeed ZeRO-3 leaves "
        "them on each process",
        next_step="run `python zero_to_fp32.py . OUT --safe_serialization` in the folder that "
        "training saved it in, and give OUT; or save again with "
        "`stage3_gather_16bit_weights_on_model_save: true`",
    )
