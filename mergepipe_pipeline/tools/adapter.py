"""A fine-tune as a LoRA adapter to its base: which tensors become factors, which are saved whole.

PEFT's format (https://huggingface.co/docs/peft/developer_guides/checkpoint): the scale is 1, ranks
that differ stand in `rank_pattern`. Factors are the best low-rank approximation of a matrix, by a
randomised SVD whose error is then computed: subspace iteration on a Gaussian sketch (Halko,
Martinsson, Tropp, arXiv:0909.4061, algorithm 4.4); the singular values of the small matrix say how
much is caught. A result depends on the matrix, the seed and the name alone: BLAS is kept to one
thread, and matrices run beside each other.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F32Array
from mergepipe_pipeline.checkpoints.adapter_config import CONFIG as ADAPTER_CONFIG
from mergepipe_pipeline.checkpoints.adapter_names import PREFIX
from mergepipe_pipeline.checkpoints.header import Described
from mergepipe_pipeline.checkpoints.open_checkpoint import ADAPTER_WEIGHTS
from mergepipe_pipeline.checkpoints.stored import as_float32
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.domain.layers import embedding_like, is_buffer, layer_index
from mergepipe_pipeline.dtypes import FLOATING
from mergepipe_pipeline.errors import IncompatibleCheckpointsError, MergePipeError
from mergepipe_pipeline.progress import Progress
from mergepipe_pipeline.tools.models import Input, noise, stored
from mergepipe_pipeline.tools.result import Draft

#: Columns of the sketch beyond the rank at least, and passes over the matrix. Of a matrix of noise,
#: the worst case, 1000 x 1500 at rank 64, the error is 0.37 % above the best; 1 % at 3 passes and
#: half as many columns beyond.
_OVERSAMPLING, _PASSES = 16, 4
#: A sketch wider than this share of the matrix costs as much as the whole decomposition, which
#: takes milliseconds where one side is short.
_WHOLE_SHARE, _SHORT = 0.4, 256
#: The first rank that is tried where energy decides.
_FIRST_RANK = 16
#: Rows whose error is summed at once, so that float64 copies stay small.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Extraction:
    """The request: how good an approximation is to be, by a rank, or as a share of the squared
    norm, never above `max_rank`; of which modules (regular expressions; none: all that changed),
    which modules whole, in which type, with which seed.
    """

    rank: int | None
    energy: float | None
    max_rank: int | None
    modules: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    dtype: str = "F32"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Factors:
    """B [m, r] and A [r, n] with B·A near the matrix; each has the root of the singular values."""

    b: F32Array
    a: F32Array


def factorize(matrix: F32Array, asked: Extraction, name: str) -> Factors:
    """Factors of a matrix [m, n] that is not zero, by singular value decomposition."""
    most = min(matrix.shape if asked.max_rank is None else (*matrix.shape, asked.max_rank))
    if asked.energy is None:
        rank = min(most, asked.rank or most)
        u, s, vt = _decomposed(matrix, rank, asked.seed, name)
    else:
        total, tried = squared_norm(matrix), _FIRST_RANK
        while True:
            u, s, vt = _decomposed(matrix, min(tried, most), asked.seed, name)
            caught = np.cumsum(s.astype(np.float64) ** 2)
            enough = np.flatnonzero(caught >= asked.energy * total)
            if enough.size or tried >= most:
                break
            tried *= 2
        rank = min(int(enough[0]) + 1 if enough.size else most, most)
    root = np.sqrt(s[:rank])
    return Factors(
        np.ascontiguousarray(u[:, :rank] * root), np.ascontiguousarray(root[:, None] * vt[:rank])
    )


def squared_norm(matrix: F32Array) -> float:
    """Σ x², in float64."""
    rows = matrix.reshape(-1, matrix.shape[-1])
    starts = range(0, len(rows), _ROWS)
    return float(sum(np.square(rows[i : i + _ROWS], dtype=np.float64).sum() for i in starts))


def squared_error(matrix: F32Array, factors: Factors) -> float:
    """‖matrix − B·A‖² of every element, products in float32 as a merge computes them."""
    return sum(
        squared_norm(matrix[i : i + _ROWS] - factors.b[i : i + _ROWS] @ factors.a)
        for i in range(0, len(matrix), _ROWS)
    )


def _decomposed(
    matrix: F32Array, rank: int, seed: int, name: str
) -> tuple[F32Array, F32Array, F32Array]:
    """U, the singular values and Vᵀ, near the best for `rank`."""
    columns = rank + max(_OVERSAMPLING, rank)
    if columns >= _WHOLE_SHARE * min(matrix.shape) or min(matrix.shape) <= _SHORT:
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        return u, s, vt
    sketch = noise((matrix.shape[1], columns), seed, name)
    q = np.linalg.qr(matrix @ sketch)[0]
    for _ in range(_PASSES - 1):
        q = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ q)[0])[0]
    u, s, vt = np.linalg.svd(q.T @ matrix, full_matrices=False)
    return q @ u, s, vt


_HEAD = f"{PREFIX}lm_head.weight"
#: Model types whose linear layers store their weight as [inputs, outputs].
_CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
#: Matrices in layers that no linear layer holds: routers of experts, which PEFT cannot adapt.
_NO_LINEAR = re.compile(r"(?:\.gate|\.router|\.shared_expert_gate|embeddings?|embed)\.weight$")


@dataclass(frozen=True, slots=True)
class TensorError:
    """One tensor that the fine-tune changed: how it is kept, and what is lost.

    `kept` is "factors", "whole" or "no". `error` is ‖change − kept‖ / ‖change‖, `norm` ‖change‖.
    """

    tensor: str
    kept: str
    rank: int
    norm: float
    error: float


class Extractor:
    """Reads base and fine-tune a tensor at a time, and writes the adapter to a draft."""

    def __init__(self, base: Input, tuned: Input, extraction: Extraction) -> None:
        """Raises IncompatibleCheckpointsError for models of other shapes, MergePipeError for a
        module that nothing has.
        """
        self._base, self._tuned, self._extraction = base, tuned, extraction
        self._model_type = str(base.config.get("model_type", ""))
        self._is_conv1d = self._model_type in _CONV1D
        self._is_tied = base.config.get("tie_word_embeddings") is True
        self._saved = {n for n in tuned.tensors if _is_of(_module(n), extraction.save)}
        self._names = [n for n in tuned.tensors if n in base.tensors and n not in self._saved]
        self._refuse_unknown()
        self._refuse_other_shapes()

    def write(self, draft: Draft, progress: Progress) -> tuple[TensorError, ...]:
        """Write factors, whole modules and config; what became of each changed tensor."""
        nbytes = sum(self._tuned.tensors[n].nbytes for n in self._names)
        with progress.task("extract", nbytes) as advance:
            rows: list[TensorError] = []
            values: dict[str, tuple[Described, bytes]] = {}
            ranks: dict[str, int] = {}
            # Threads inside a product would change its last bits with their number.
            with threadpool_limits(1, "blas"), Workers(threads.cores()) as workers:
                for name, (row, factors) in zip(
                    self._names,
                    workers.map(self._extracted, self._names, depth=threads.cores() + 1),
                    strict=True,
                ):
                    advance(self._tuned.tensors[name].nbytes)
                    rows += [row] if row else []
                    if factors:
                        ranks[_module(name)] = len(factors.a)
                        values |= self._described(name, factors)
        own = self._tuned.tensors.keys() - self._base.tensors.keys() - self._saved
        rows += [TensorError(n, "no", 0, float("nan"), 1.0) for n in own if not is_buffer(n)]
        for name in sorted(self._saved):
            entry, key = self._tuned.tensors[name], f"{PREFIX}{self._adapted(name)}"
            values[key] = (key, entry.dtype, entry.shape), bytes(self._tuned.raw(name))
            rows.append(self._whole_row(name))
            if self._is_tied and embedding_like(name):  # PEFT asks for both ends of a tie
                values[_HEAD] = (_HEAD, entry.dtype, entry.shape), values[key][1]
        if not values:
            raise MergePipeError(
                "There is nothing to extract",
                where=self._tuned.checkpoint.root,
                expected="linear layers that differ from the base's, or modules to save whole",
                found="none",
                next_step="check that --model is the fine-tune and --base its base",
            )
        draft.shard(ADAPTER_WEIGHTS, [d for d, _ in values.values()], lambda key: values[key][1])
        draft.side_files[ADAPTER_CONFIG] = self._config(ranks)
        return tuple(rows)

    def _extracted(self, name: str) -> tuple[TensorError | None, Factors | None]:
        entry = self._tuned.tensors[name]
        if entry.dtype not in FLOATING or is_buffer(name):
            return None, None
        if entry.shape != self._base.tensors[name].shape:
            return TensorError(name, "no", 0, float("nan"), 1.0), None
        delta = self._tuned.floats(name) - self._base.floats(name)
        total = squared_norm(delta) if delta.ndim else float(delta) ** 2
        if not total:
            return None, None
        if not np.isfinite(total):
            raise MergePipeError(
                "A tensor holds NaN or infinity, so that it has no approximation",
                where=f"{self._tuned.checkpoint.root} or its base, tensor {name}",
                expected="finite numbers",
                found="others",
                next_step="get the checkpoint again",
            )
        if not self._is_target(name):
            return TensorError(name, "no", 0, total**0.5, 1.0), None
        matrix = np.ascontiguousarray(delta.T) if self._is_conv1d else delta
        factors = factorize(matrix, self._extraction, name)
        factors = Factors(self._rounded(factors.b), self._rounded(factors.a))
        error = (squared_error(matrix, factors) / total) ** 0.5
        return TensorError(name, "factors", len(factors.a), total**0.5, error), factors

    def _whole_row(self, name: str) -> TensorError:
        entry = self._tuned.tensors[name]
        base = self._base.tensors.get(name)
        if base is None or base.shape != entry.shape or entry.dtype not in FLOATING:
            return TensorError(name, "whole", 0, float("nan"), 0.0)
        delta = self._tuned.floats(name) - self._base.floats(name)
        return TensorError(name, "whole", 0, squared_norm(np.atleast_1d(delta)) ** 0.5, 0.0)

    def _is_target(self, name: str) -> bool:
        """Whether a tensor is the weight of a linear layer that is to be adapted."""
        module, modules = _module(name), self._extraction.modules
        if len(self._tuned.tensors[name].shape) != 2 or not name.endswith(".weight"):
            return False
        if modules:
            return any(re.search(m, module) for m in modules)
        is_linear = layer_index(name) is not None and not _NO_LINEAR.search(name)
        return is_linear and not embedding_like(name)

    def _rounded(self, values: F32Array) -> F32Array:
        """The values that the factors' type can hold."""
        dtype = self._extraction.dtype
        raw = np.frombuffer(bytearray(stored(values, dtype)), np.uint8)
        rounded: F32Array = as_float32(raw, dtype).numpy().reshape(values.shape)
        return rounded

    def _described(self, name: str, factors: Factors) -> dict[str, tuple[Described, bytes]]:
        tensors: dict[str, tuple[Described, bytes]] = {}
        for letter, values in (("A", factors.a), ("B", factors.b)):
            key = f"{PREFIX}{_module(self._adapted(name))}.lora_{letter}.weight"
            shape = (values.shape[0], values.shape[1])
            tensors[key] = (
                (key, self._extraction.dtype, shape),
                stored(values, self._extraction.dtype),
            )
        return tensors

    def _adapted(self, name: str) -> str:
        """The name of a tensor in the model that PEFT adapts; hub GPT-2 lacks its first part."""
        is_bare = self._model_type == "gpt2" and not name.startswith(("transformer.", "lm_head."))
        return f"transformer.{name}" if is_bare else name

    def _config(self, ranks: Mapping[str, int]) -> bytes:
        """adapter_config.json: scale 1, the commonest rank, and the others by module."""
        rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
        rank_by_module = {
            _module(self._adapted(f"{m}.weight")): r for m, r in sorted(ranks.items())
        }
        rank_by_module = {m: r for m, r in rank_by_module.items() if r != rank}
        saved = sorted({_module(n).rpartition(".")[2] for n in self._saved})
        config: dict[str, Any] = {
            "base_model_name_or_path": self._base.checkpoint.name,
            "bias": "none",
            "fan_in_fan_out": self._is_conv1d,
            "inference_mode": True,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "alpha_pattern": rank_by_module,
            "modules_to_save": saved or None,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": rank_by_module,
            "target_modules": self._targets(list(ranks)),
            "task_type": "CAUSAL_LM",
            "use_rslora": False,
        }
        if self._is_tied and any(embedding_like(n) for n in self._saved):
            config["ensure_weight_tying"] = True
        return (json.dumps(config, indent=2) + "\n").encode()

    def _targets(self, modules: Sequence[str]) -> list[str]:
        """Last parts of the modules' names, where no other module of the base has the same."""
        ends = {m.rpartition(".")[2] for m in modules}
        of_base = {_module(n) for n, t in self._base.tensors.items() if len(t.shape) == 2}
        if all(m in modules for m in of_base if m.rpartition(".")[2] in ends):
            return sorted(ends)
        return sorted(_module(self._adapted(f"{m}.weight")) for m in modules)

    def _refuse_unknown(self) -> None:
        every = {_module(n) for n in self._tuned.tensors}
        for name in self._extraction.save:
            if not any(_is_of(module, (name,)) for module in every):
                raise MergePipeError(
                    "No module has the name that is to be saved whole",
                    where=f"--save {name}",
                    expected="the end of a module's name, as embed_tokens or lm_head",
                    found=", ".join(sorted({m.rpartition(".")[2] for m in every})[:12]),
                    next_step="correct the name",
                )

    def _refuse_other_shapes(self) -> None:
        """Tensors but the vocabulary's must fit; the fine-tune must have what the base has."""
        for name, entry in self._base.tensors.items():
            tuned = self._tuned.tensors.get(name)
            if embedding_like(name) or is_buffer(name):
                continue
            if tuned is None or tuned.shape != entry.shape:
                raise IncompatibleCheckpointsError(
                    "The fine-tune is not one of this base",
                    where=f"{self._tuned.checkpoint.root}, tensor {name}",
                    expected=f"shape {list(entry.shape)}",
                    found="no such tensor" if tuned is None else f"shape {list(tuned.shape)}",
                    next_step="give the base that it was trained from",
                )


def total_error(rows: Collection[TensorError]) -> float | None:
    """‖change − kept‖ / ‖change‖ over all tensors that can be compared; None if none can."""
    comparable = [r for r in rows if np.isfinite(r.norm)]
    whole = sum(r.norm**2 for r in comparable)
    lost = sum((r.error * r.norm) ** 2 for r in comparable)
    return float((lost / whole) ** 0.5) if whole else None


def details_of(rows: Sequence[TensorError]) -> dict[str, Any]:
    """The details of an extraction for provenance and `--json`."""
    listed = [
        {**asdict(r), "norm": r.norm if np.isfinite(r.norm) else None}
        for r in sorted(rows, key=lambda r: r.tensor)
    ]
    return {"error": total_error(rows), "tensors": listed}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_of(module: str, ends: Collection[str]) -> bool:
    """Whether a module has one of these names, or ends with one after a dot, as PEFT matches."""
    return any(module == end or module.endswith(f".{end}") for end in ends)
