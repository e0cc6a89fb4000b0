"""Windows merged on an accelerator: stored bytes go there, are widened, merged and cast there.

Reading, decoding packs, hashing and writing stay on the CPU, and so do the first pass for L1 norms
and tensors that are only copied. Each worker has pinned memory and a stream of its own, so that
while one window's arithmetic runs, the next one's bytes and those of a finished one are copied.

Why the bits should be the CPU's (the tests on a GPU decide): operators work element by element, one
operation after the other, and in IEEE arithmetic an operation has one result. What could differ:
- additions come in recipe order, per element, on either side;
- `linear` adds fused products: nvcc by default makes a fused multiply-add of torch's a + alpha·b;
- division is by tensors: by a Python number, CUDA multiplies with its rounded reciprocal;
- maxima of zeros of both signs differ; votes add a zero to lose the sign;
- random numbers are integers; ranks of DELLA come from a stable sort (`operators.steps.on_device`);
- `sce` works in float64 per element;
- factors of spheres (slerp and its relatives, model_stock) and of rescaled drops are in the plan or
  found by the CPU;
- a low-rank product is made by the CPU and added here.
The rest stays on the CPU (`stays_on_cpu`): sums along rows and exponentials round in several ways.
One difference remains: the bits of a NaN, in an output that is not bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mergepipe_pipeline.arrays import U8Array
from mergepipe_pipeline.bfloat16 import NAN_BITS
from mergepipe_pipeline.checkpoints.stored import torch_dtype
from mergepipe_pipeline.domain.plan import TensorTask
from mergepipe_pipeline.engine.window import BufferPool, Window, count_cut_off
from mergepipe_pipeline.errors import DeviceError
from mergepipe_pipeline.text import whole_number

_MOST_DEVICES = 999


def device_of(name: str) -> torch.device:
    """The device `cuda` or `cuda:N`. Raises DeviceError if it is another or is not there."""
    kind, _, text = name.partition(":")
    number = 0 if name == kind else whole_number(text, _MOST_DEVICES)
    if kind != "cuda" or number is None:
        raise DeviceError(
            "There is no such device to merge on",
            where=f"device {name!r}",
            expected="cpu, cuda or cuda:0, cuda:1 and so on",
            found=repr(name),
            next_step="name one of these, or leave out the device for the CPU",
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        has_cuda = torch.version.cuda is not None
        build = f"torch {torch.__version__} {'with' if has_cuda else 'built without'} CUDA"
        raise DeviceError(
            "The device to merge on is not there",
            where=f"device {name!r}",
            expected="a torch with CUDA that sees this GPU",
            found=f"{build}, which sees {count} GPUs",
            next_step="look at nvidia-smi and CUDA_VISIBLE_DEVICES, or merge on the CPU"
            if has_cuda
            else "install the CUDA build of torch (constraints.txt takes the CPU's), or merge on "
            "the CPU",
        )
    return torch.device("cuda", number) if text else torch.device("cuda")


def stays_on_cpu(task: TensorTask) -> bool:
    """Whether an accelerator might round a task's merge otherwise: it sums rows or exponentiates.

    Equal keys of layers promise equal bits, so these are always merged on the CPU.
    """
    params = dict(task.params)
    return (
        task.operator in ("arcee_fusion", "mean")
        or (task.operator == "model_stock" and bool(params.get("filter_wise", False)))
        or (task.operator == "nuslerp" and not params.get("nuslerp_flatten", True))
    )


class DeviceBufferPool(BufferPool):
    """Buffers in pinned memory, with float32 rows on a device and a stream for the window.

    Without CUDA, as in tests on a CPU, neither is pinned nor has a stream.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._there = torch.empty(0, device=device)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Send the device's work to the worker's stream, and wait for it in the end.

        Raises DeviceError if the device has no memory left.
        """
        try:
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    self._stream.synchronize()  # other threads of Python go on meanwhile
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                "A window does not fit the device's memory",
                where=f"device {self._device}",
                expected="room for the windows that are worked on",
                found=str(error).splitlines()[0],
                next_step="give less --memory or fewer --threads, or merge on the CPU",
            ) from error

    def rows_there(self, k: int, n: int) -> torch.Tensor:
        """An uninitialised [k, n] float32 matrix on the device; the one before becomes invalid."""
        if k * n > self._there.numel():
            self._there = torch.empty(k * n, device=self._device)
        return self._there[: k * n].view(k, n)

    def bring(self, values: torch.Tensor) -> U8Array:
        """The bytes of [n] `values` of any type in host memory, complete after `at_work`."""
        raw = values.view(torch.uint8)
        host = self.take(len(raw))
        torch.from_numpy(host).copy_(raw, non_blocking=True)
        return host

    def _allocated(self, nbytes: int) -> U8Array:
        if self._stream is None:
            return super()._allocated(nbytes)
        pinned: U8Array = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned


class DeviceWindow(Window[DeviceBufferPool]):
    """A window that is merged on the device of its buffers, unless it stays on the CPU."""

    def run(self, buffers: DeviceBufferPool) -> U8Array:
        """Read, merge and give the bytes; see `Window.run`."""
        job, task = self._job, self._job.task
        if job.unchanged or job.is_copy or stays_on_cpu(task):
            return super().run(buffers)
        self._buffers = buffers
        self._clear()
        with buffers.at_work():
            rows = buffers.rows_there(1 + len(task.experts), self._n)
            base = self._fetch_base()
            values = base.values(rows[0]) if base else None
            merged = self._applied(values, self._fill(rows[1:], values, base))
            narrowed = cast(merged, task.out_dtype)
            if task.out_dtype == "F8_E4M3":
                self.n_cut_off = count_cut_off(merged, narrowed.view(torch.uint8))
            out_bytes = buffers.bring(narrowed)
        return out_bytes.copy()  # the buffers are used again before these bytes are written


def cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """[n] float32 cast once to `dtype`, to nearest even; bfloat16 has one NaN."""
    narrowed = values.to(torch_dtype(dtype))
    if dtype == "BF16":
        narrowed.view(torch.int16).masked_fill_(values.isnan(), int(NAN_BITS))
    return narrowed
