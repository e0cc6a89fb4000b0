"""Families of checkpoints as large and as laid out as real ones: a base, and experts near it.

    python -m tests.lab.bench.family --preset qwen3-0.6b -k 10 [--out FOLDER]

Not the family of the unit tests, which is small and frozen with the golden outputs. A family in its
folder is found again and only experts that it lacks are made; an expert's folder appears whole.
Tensors are written as they are made, a few megabytes at a time, in bfloat16 with tied embeddings.
Expert e differs from the base in tensor t by a Gaussian of standard deviation 4e-4 · exp(0.3 z_e +
0.7 z_{e, layer} + 0.3 z_{e, t}), z standard normal; for norms, five times that, as their own
deviation is. Half of the embedding's rows, others for each expert, are the base's. One expert in
four is in two shards. Values depend on (seed, expert, tensor), never on K or on order.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tests.lab.bench import FOLDER
from tests.lab.bench.layouts import PRESETS, Preset, Tensor, layout, small_files

_WORKERS = 2
_CHUNK_ELEMS = 1 << 22
_BASE_STD, _NORM_STD = 0.02, 0.1
_SIGMA, _BY_EXPERT, _BY_LAYER, _BY_TENSOR = 4e-4, 0.3, 0.7, 0.3
_CHANGED_ROWS = 0.5
_SHARDED_EVERY = 4
#: Raised when equal parameters give other values, so that an older folder is not taken for new.
_FORM = 1
_MAKING = ".making-"
_PR_SET_PDEATHSIG = 1
F32 = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


def cached_family(families: Path, name: str, k: int, seed: int = 0) -> Path:
    """The family of a preset in its folder under `families`, with at least `k` experts."""
    return make_family(families / (f"{name}-{seed}" if seed else name), PRESETS[name], k, seed)


def make_family(folder: Path, preset: Preset, k: int, seed: int = 0) -> Path:
    """`folder/base` and `folder/expert_00 …`, made as far as they are missing.

    Raises SystemExit if `folder` holds a family of other parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _claim(folder, {"form": _FORM, "seed": seed, **asdict(preset)})
        for left_over in folder.glob(f"{_MAKING}*"):
            shutil.rmtree(left_over)
        if not (folder / "base").exists():
            make_model(folder, preset, seed, None)
        missing = [e for e in range(k) if not (folder / expert_name(e)).exists()]
        if missing:
            context = get_context("spawn")
            with ProcessPoolExecutor(_WORKERS, context, initializer=_end_with_parent) as pool:
                made = [pool.submit(make_model, folder, preset, seed, e) for e in missing]
                for future in made:
                    future.result()
    return folder


def expert_name(expert: int | None) -> str:
    """The folder of an expert, or of the base (None)."""
    return "base" if expert is None else f"expert_{expert:02d}"


def deviation(preset: Preset, seed: int, expert: int, number: int) -> float:
    """Standard deviation of an expert from the base in tensor `number` of the layout."""
    tensor = layout(preset)[number]
    z = _random(seed, expert, _LAYERS).standard_normal(preset.layers + 3)
    own = _random(seed, expert, _TENSOR, number).standard_normal()
    exponent = _BY_EXPERT * z[0] + _BY_LAYER * z[2 + tensor.layer] + _BY_TENSOR * own
    return _SIGMA * math.exp(exponent) * (_NORM_STD / _BASE_STD if tensor.is_norm else 1.0)


def make_model(folder: Path, preset: Preset, seed: int, expert: int | None) -> None:
    """Make one model, under a hidden name until every byte of it is on disk."""
    making = Path(tempfile.mkdtemp(prefix=_MAKING, dir=folder))
    for name, text in small_files(preset).items():
        (making / name).write_text(text)
    if expert is None:
        _write_weights(making, preset, _shards(preset, None), seed, None, None)
    else:
        with open(folder / "base" / "model.safetensors", "rb") as base:
            base.seek(int.from_bytes(base.read(8), "little"), os.SEEK_CUR)
            _write_weights(making, preset, _shards(preset, expert), seed, expert, base)
    os.chmod(making, 0o755)
    os.rename(making, folder / expert_name(expert))


def _shards(preset: Preset, expert: int | None) -> list[Sequence[int]]:
    """Numbers of the tensors of each file; two files have about equally many bytes."""
    sizes = np.cumsum([tensor.numel for tensor in layout(preset)])
    everything = range(len(sizes))
    if expert is None or expert % _SHARDED_EVERY != 1:
        return [everything]
    half = int(np.searchsorted(sizes, sizes[-1] / 2)) + 1
    return [everything[:half], everything[half:]]


def _write_weights(
    folder: Path,
    preset: Preset,
    shards: Sequence[Sequence[int]],
    seed: int,
    expert: int | None,
    base: BinaryIO | None,
) -> None:
    """All files, and the index if there are several. `base` stands at its first tensor's bytes."""
    tensors = layout(preset)
    weight_map = {}
    for part, numbers in enumerate(shards, 1):
        name = f"model-{part:05d}-of-{len(shards):05d}" if len(shards) > 1 else "model"
        name += ".safetensors"
        with open(folder / name, "wb") as file:
            file.write(_header([tensors[number] for number in numbers]))
            for number in numbers:
                weight_map[tensors[number].name] = name
                if base is None or expert is None:
                    chunks = _base_values(seed, number, tensors[number])
                else:
                    std = deviation(preset, seed, expert, number)
                    chunks = _expert_values(seed, expert, number, tensors[number], std, base)
                for values in chunks:
                    _bfloat16(values).tofile(file)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        total = 2 * sum(tensor.numel for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _header(tensors: Sequence[Tensor]) -> bytes:
    """The safetensors header of bfloat16 tensors that follow each other without gaps."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 2 * tensor.numel
        entries[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _base_values(seed: int, number: int, tensor: Tensor) -> Iterator[F32]:
    random = _random(seed, None, _VALUES, number)
    mean, std = (1.0, _NORM_STD) if tensor.is_norm else (0.0, _BASE_STD)
    for start in range(0, tensor.numel, _CHUNK_ELEMS):
        values = random.standard_normal(min(_CHUNK_ELEMS, tensor.numel - start), np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        yield values


def _expert_values(
    seed: int, expert: int, number: int, tensor: Tensor, std: float, base: BinaryIO
) -> Iterator[F32]:
    """The base's values, read on from where `base` stands, with the expert's deviation."""
    random = _random(seed, expert, _VALUES, number)
    width = tensor.shape[-1]
    rows = tensor.numel // width
    changed = np.ones(rows, dtype=bool)
    if tensor.is_embedding:
        order = _random(seed, expert, _ROWS, number).permutation(rows)
        changed[order[round(_CHANGED_ROWS * rows) :]] = False
    step = max(1, _CHUNK_ELEMS // width)
    for start in range(0, rows, step):
        mask = changed[start : start + step]
        bits = np.fromfile(base, dtype=np.uint16, count=len(mask) * width)
        values = (bits.astype(np.uint32) << 16).view(np.float32).reshape(-1, width)
        delta = random.standard_normal((int(mask.sum()), width), np.float32)
        delta *= np.float32(std)
        if mask.all():
            values += delta
        else:
            values[mask] += delta
        yield values


def _bfloat16(values: F32) -> Bits:
    """Rounded to nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    odd = (bits >> 16) & 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    return odd.astype(np.uint16)


#: What a random stream is for: no two purposes share one.
_VALUES, _ROWS, _LAYERS, _TENSOR = range(4)


def _random(seed: int, expert: int | None, purpose: int, number: int = 0) -> np.random.Generator:
    address = (seed, 0 if expert is None else expert + 1, purpose, number)
    return np.random.Generator(np.random.SFC64(address))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One maker at a time."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _claim(folder: Path, parameters: dict[str, object]) -> None:
    """Write down what the family is, or check that it is this one."""
    file = folder / "family.json"
    if not file.exists():
        if any(folder.glob("[!.]*")):
            raise SystemExit(f"{folder} is not empty and holds no family; take another folder")
        hidden = folder / ".family.json"
        hidden.write_text(json.dumps(parameters, indent=2))
        hidden.rename(file)
    found = json.loads(file.read_text())
    if found != parameters:
        raise SystemExit(
            f"{folder} holds another family. Expected {parameters}, found {found}. "
            "Next: take another folder, or remove this one."
        )


def _end_with_parent() -> None:
    """A worker that outlived its parent would write where the next one cleans up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Make a family, and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-0.6b")
    parser.add_argument("-k", type=int, default=10, help="number of experts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, help="default: FAMILIES/PRESET")
    args = parser.parse_args()
    if args.out:
        print(make_family(args.out, PRESETS[args.preset], args.k, args.seed))
    else:
        print(cached_family(args.families, args.preset, args.k, args.seed))


if __name__ == "__main__":
    main()
