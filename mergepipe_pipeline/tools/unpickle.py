"""Reads one pickled weight file as data for its parent: a script that runs in a process of its own.

torch's loader of weights builds tensors and plain containers and runs nothing that a file
names. The process may take no more memory than the file asks for, can write no file, and dies with
its parent. It prints one line of JSON that describes the tensors, then the bytes of each tensor
whose number comes on stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

#: Where trainers put the weights beside an optimizer, in the order in which they are looked for.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_PDEATHSIG = 1
_SPARE_NBYTES = 1 << 30
_PIECE_NBYTES = 1 << 20


def main(path: str, cpu_s: str) -> None:
    """Describe the file's tensors on stdout, then serve them until stdin ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    import torch

    _limit(os.stat(path).st_size, int(cpu_s))
    try:
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
        tensors, left_out = _tensors(state)
        described = list(_described(tensors))
    except Exception as error:
        _answer(out, {"error": f"{type(error).__name__}: {error}"})
        return
    _answer(out, {"tensors": described, "left_out": left_out})
    values = list(tensors.values())
    for line in sys.stdin:
        _send(out, values[int(line)])


def _limit(file_nbytes: int, cpu_s: int) -> None:
    """Bound memory by what the file may need twice over, time, and written files to none."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for resource_id, most in (
        (resource.RLIMIT_AS, now + 3 * file_nbytes + _SPARE_NBYTES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_id, (most, most))


def _tensors(state: Any) -> tuple[dict[str, Any], list[str]]:
    """The tensors of a state dict by name, and the names of what is none."""
    import torch

    if not isinstance(state, Mapping):
        raise TypeError(f"it holds a {type(state).__name__}, not tensors by name")
    if not any(isinstance(v, torch.Tensor) for v in state.values()):
        inner = (state[key] for key in _WRAPPERS if isinstance(state.get(key), Mapping))
        state = next(inner, state)
    tensors = {str(k): v.detach() for k, v in state.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise TypeError("it holds no tensors by name")
    return tensors, [str(k) for k in state if str(k) not in tensors]


def _described(tensors: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Name, dtype, shape, and the first name of the same memory ("" for a tensor's own)."""
    import torch

    seen: dict[tuple[Any, ...], str] = {}
    for name, t in tensors.items():
        if t.layout != torch.strided or t.is_quantized or t.device.type != "cpu":
            raise TypeError(f"tensor {name} is sparse, quantized or without data")
        place = (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) if t.numel() else (name,)
        first = seen.setdefault(place, name)
        yield [
            name,
            str(t.dtype).removeprefix("torch."),
            list(t.shape),
            first if first != name else "",
        ]


def _send(out: BinaryIO, tensor: Any) -> None:
    import torch

    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    data = memoryview(flat.numpy())
    for start in range(0, len(data), _PIECE_NBYTES):
        out.write(data[start : start + _PIECE_NBYTES])
    out.flush()


def _answer(out: BinaryIO, value: dict[str, Any]) -> None:
    out.write(json.dumps(value).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
