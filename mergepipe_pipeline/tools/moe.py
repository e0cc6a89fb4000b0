"""A mixture of experts from dense models: attention and norms of a base, MLPs of the experts.

Written in the layout of the hub, each expert's matrices apart, which transformers 4 and 5 read.
Tensors are read, changed and written one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.checkpoints.header import Described
from mergepipe_pipeline.domain.layers import is_embedding, layer_count, layer_index
from mergepipe_pipeline.dtypes import FLOATING, TORCH_NAME, code_from_name, itemsize
from mergepipe_pipeline.errors import IncompatibleCheckpointsError, RecipeError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.snapshots.model_folder import shard_name
from mergepipe_pipeline.storage.json_text import json_bytes
from mergepipe_pipeline.storage.side_files import CONFIG
from mergepipe_pipeline.tools.models import Input, noise, stored
from mergepipe_pipeline.tools.moe_gates import ExpertConfig, MoeConfig, gates
from mergepipe_pipeline.tools.result import Draft

_MLP = re.compile(r"model\.layers\.\d+\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
_KINDS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Architecture:
    """A mixture that transformers knows: from which dense models, and what its tensors are called.

    `kinds` are the names of gate, up and down projection; `count` is the config's key for the
    number of experts.
    """

    sources: frozenset[str]
    model_type: str
    cls: str
    part: str
    kinds: tuple[str, str, str]
    count: str
    has_shared: bool = False


ARCHITECTURES = {
    "mixtral": Architecture(
        frozenset({"llama", "mistral"}),
        "mixtral",
        "MixtralForCausalLM",
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        "num_local_experts",
    ),
    "qwen": Architecture(
        frozenset({"qwen2"}),
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "mlp",
        _KINDS,
        "num_experts",
        has_shared=True,
    ),
    "qwen3": Architecture(
        frozenset({"qwen3"}), "qwen3_moe", "Qwen3MoeForCausalLM", "mlp", _KINDS, "num_experts"
    ),
}
#: Keys of dense configs that no mixture has.
_DENSE_KEYS = ("mlp_bias", "attention_bias", "pretraining_tp")
#: What one output tensor is: its description, and what reads it.
_Made = tuple[Described, Callable[[], bytes | bytearray]]


class Mixture:
    """Which tensors a mixture has, and where each comes from."""

    def __init__(self, config: MoeConfig, base: Input, experts: Sequence[Input], seed: int) -> None:
        """`experts` are those of the config in its order, the shared one last.

        Raises RecipeError for models that give no mixture, IncompatibleCheckpointsError for ones
        that do not fit together.
        """
        self._config, self._base, self._seed = config, base, seed
        self._expert_configs = [*config.experts, *config.shared_experts]
        self._experts = experts
        self._layers = layer_count(base.tensors)
        self._arch = self._architecture()
        self._dtype = config.dtype and code_from_name(config.dtype, "dtype")
        self._refuse_misfits()

    def write(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Write a weight file for what is outside the layers, and one for each layer."""
        embedding = next(t for n, t in self._base.tensors.items() if is_embedding(n))
        shape = (self._layers, embedding.shape[1])
        gate_rows = gates(
            self._config.gate_mode, self._base, self._expert_configs, shape, self._seed, progress
        )
        gate_dtype = self._dtype or embedding.dtype
        parts = [self._outside()]
        parts += [self._layer(i, gate_rows[i], gate_dtype) for i in range(self._layers)]
        total = sum(_nbytes(d) for part in parts for d, _ in part.values())
        with progress.task("write the mixture", total) as advance:
            for number, part in enumerate(parts, 1):
                file = shard_name(number, len(parts))
                described = [d for d, _ in part.values()]
                draft.shard(file, described, partial(_read, part), advance)
        draft.side_files |= self._base.side_files()
        draft.side_files[CONFIG] = self._config_json()
        return {"experts": len(self._config.experts)}

    def _outside(self) -> dict[str, _Made]:
        names = [n for n in self._base.tensors if layer_index(n) is None]
        return dict(self._copied(self._base, name, name) for name in names)

    def _layer(self, layer: int, gate_rows: F32Array, gate_dtype: str) -> dict[str, _Made]:
        """A layer's tensors: the base's but its MLP, the experts' MLPs, and the gates."""
        own = (n for n in self._base.tensors if layer_index(n) == layer and not _MLP.fullmatch(n))
        tensors = dict(self._copied(self._base, name, name) for name in own)
        stem, n_experts = f"model.layers.{layer}.", len(self._config.experts)
        for number, (source, expert) in enumerate(
            zip(self._experts, self._expert_configs, strict=True)
        ):
            is_shared = number >= n_experts
            place = "shared_expert" if is_shared else f"experts.{number}"
            for kind, new in zip(_KINDS, self._arch.kinds, strict=True):
                name = f"{stem}{self._arch.part}.{place}.{new}.weight"
                key, copy = self._copied(source, f"{stem}mlp.{kind}.weight", name, expert)
                tensors[key] = copy
        for name, rows in (
            (f"{stem}{self._arch.part}.gate.weight", gate_rows[:n_experts]),
            (f"{stem}mlp.shared_expert_gate.weight", gate_rows[n_experts:]),
        ):
            if len(rows):
                described = (name, gate_dtype, (len(rows), rows.shape[1]))
                tensors[name] = described, partial(stored, rows, gate_dtype)
        return tensors

    def _copied(
        self, source: Input, name: str, new: str, expert: ExpertConfig | None = None
    ) -> tuple[str, _Made]:
        entry = source.tensors[name]
        is_float = entry.dtype in FLOATING
        dtype = (self._dtype if is_float else None) or entry.dtype
        described: Described = (new, dtype, entry.shape)
        scale = 1.0 if expert is None else _scale(expert, name)
        spread = 0.0 if expert is None else expert.noise_scale or 0.0
        if dtype == entry.dtype and scale == 1 and not spread:
            return new, (described, partial(source.raw, name))
        return new, (described, partial(self._changed, source, name, new, dtype, scale, spread))

    def _changed(
        self, source: Input, name: str, new: str, dtype: str, scale: float, spread: float
    ) -> bytes:
        values = source.floats(name)
        if spread:
            values = values + np.float32(spread) * noise(values.shape, self._seed, new)
        return stored(values if scale == 1 else values * np.float32(scale), dtype)

    def _architecture(self) -> Architecture:
        """The asked one, or that of the base's model type; refused if the models are no such."""
        types = [str(m.config.get("model_type")) for m in (self._base, *self._experts)]
        shared = bool(self._config.shared_experts)
        named = self._config.architecture
        fitting = [
            (name, a)
            for name, a in ARCHITECTURES.items()
            if a.sources.issuperset(types) and a.has_shared == shared and named in (None, name)
        ]
        if fitting:
            return fitting[0][1]
        supported = [
            f"{name} (of {' and '.join(sorted(a.sources))}, "
            f"{'with' if a.has_shared else 'without'} shared_experts)"
            for name, a in ARCHITECTURES.items()
        ]
        raise RecipeError(
            "These models give no mixture that is known",
            where="base_model, experts, shared_experts, architecture",
            expected=", ".join(supported),
            found=f"{', '.join(dict.fromkeys(types))}, {'with' if shared else 'without'} "
            f"shared_experts, architecture {named or 'open'}",
            next_step="give models of one kind; qwen2 needs one entry in shared_experts",
        )

    def _refuse_misfits(self) -> None:
        """Every MLP must have the base's shapes; the mixture has no place for other biases."""
        shapes = {n: t.shape for n, t in self._base.tensors.items() if _MLP.fullmatch(n)}
        for source in self._experts:
            for name, shape in shapes.items():
                entry = source.tensors.get(name)
                if entry is None or entry.shape != shape:
                    raise _misfit(
                        source, name, f"shape {list(shape)}", entry.shape if entry else None
                    )
        if len(shapes) != len(_KINDS) * self._layers:
            raise _misfit(self._base, "model.layers.*.mlp", "three projections per layer", None)
        has_bias = self._arch.model_type == "qwen2_moe"
        for name in self._base.tensors:
            if name.endswith(".bias") and (not has_bias or ".mlp." in name):
                raise _misfit(self._base, name, "no bias here: the mixture has none", (0,))

    def _config_json(self) -> bytes:
        arch, asked = self._arch, self._config
        config: dict[str, Any] = self._base.config
        for key in _DENSE_KEYS if arch.model_type == "mixtral" else ():
            config.pop(key, None)
        inner = config.get("intermediate_size")
        config |= {
            "architectures": [arch.cls],
            "model_type": arch.model_type,
            arch.count: len(asked.experts),
            "num_experts_per_tok": asked.experts_per_token,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
        if arch.model_type != "mixtral":
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
            config |= {"moe_intermediate_size": inner}
        if arch.has_shared:
            config |= {"shared_expert_intermediate_size": inner, "qkv_bias": True}
        if self._dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = TORCH_NAME[self._dtype]
        return json_bytes(config)


def _read(part: Mapping[str, _Made], name: str) -> bytes | bytearray:
    return part[name][1]()


def _scale(expert: ExpertConfig, name: str) -> float:
    is_down = name.endswith("down_proj.weight")
    return expert.residual_scale if is_down and expert.residual_scale is not None else 1.0


def _nbytes(described: Described) -> int:
    _, dtype, shape = described
    return int(np.prod(shape, dtype=np.int64)) * itemsize(dtype)


def _misfit(
    source: Input, name: str, expected: str, shape: Sequence[int] | None
) -> IncompatibleCheckpointsError:
    return IncompatibleCheckpointsError(
        "A model does not fit into the mixture",
        where=f"{source.checkpoint.root}, tensor {name}",
        expected=expected,
        found="no such tensor" if shape is None else f"shape {list(shape)}",
        next_step="give models of one size and kind",
    )


def parameters_of(config: MoeConfig, seed: int) -> Mapping[str, Any]:
    """The parameters of a mixture beside its inputs, as plain JSON; models stand by their order."""
    parameters = config.model_dump(exclude={"base_model"})
    for expert in (*parameters["experts"], *parameters["shared_experts"]):
        del expert["source_model"]
    return {**parameters, "seed": seed}
