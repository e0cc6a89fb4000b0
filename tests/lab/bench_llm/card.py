"""Experts that learn side by side on a GPU: each one's step is a graph, and all graphs run at once.

A step of a small model is thousands of kernels of some microseconds each, which a processor starts
more slowly than the GPU ends them, and which fill a tenth of it. No GPU has run this yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from mergepipe_pipeline.demo.skills import quiet
from mergepipe_pipeline.storage.atomic import remove_tree
from tests.lab.bench_llm.encoded import DEVICE, Batch, Encoder, encoder
from tests.lab.bench_llm.tasks import Item, Task
from tests.lab.bench_llm.tune import BATCH, Run, Schedule, is_flat

#: Steps before the first of a graph, which PyTorch wants; and those after which losses are read.
_FIRST, _LOOK = 3, 50
#: What `cross_entropy` leaves out.
_NONE = -100


@dataclass(frozen=True, slots=True)
class Wanted:
    """An expert that is not there yet."""

    task: Task
    seed: int
    folder: Path


def tuned_together(base: Path, schedule: Schedule, wanted: Sequence[Wanted]) -> None:
    """Make the experts; one that was not ended begins anew.

    Losses are read every some steps, so that a run that is flat ends some steps later than alone.
    """
    with quiet():
        runs = [_Steps(base, schedule, w) for w in wanted]
        going = runs
        for step in range(_FIRST, schedule.steps):
            if step % _LOOK == 0:
                going = [run for run in going if not is_flat(run.losses())]
                last = [run.losses()[-1] for run in runs]
                print(f"step {step}, {len(going)} go on, losses {mean(last):.3f}", flush=True)
            for run in going:
                run.take()
        for run in runs:
            run.publish()


class _Steps:
    """An expert on its way: its weights, moments, batches and losses stay on the GPU."""

    def __init__(self, base: Path, schedule: Schedule, wanted: Wanted) -> None:
        torch.manual_seed(wanted.seed)
        self._wanted, self._taken = wanted, _FIRST
        state = wanted.folder.with_name(f"{wanted.folder.name}.state")
        remove_tree(state)  # of a run on a CPU
        self._run = Run(base, schedule, state)
        items = wanted.task.items("train", wanted.seed)
        self._batches = stacked(encoder(base), items, schedule.steps)
        self._rates = torch.tensor(schedule.rates(), device=DEVICE)
        self._losses = torch.zeros(schedule.steps, device=DEVICE)
        self._at = torch.zeros(1, dtype=torch.long, device=DEVICE)
        self._stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_FIRST):
                self._step()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._step()

    def take(self) -> None:
        """Ask for a step."""
        self._taken += 1
        with torch.cuda.stream(self._stream):
            self._graph.replay()

    def losses(self) -> list[float]:
        """The losses so far; waits for the steps that were asked for."""
        self._stream.synchronize()
        losses: list[float] = self._losses[: self._taken].tolist()
        return losses

    def publish(self) -> None:
        """Write the expert."""
        self._run.publish(self._wanted.folder, self.losses())

    def _step(self) -> None:
        ids, mask, rows, places, targets = (self._now(x) for x in self._batches)
        loss = self._run.step(Batch(ids, mask, rows, places, targets), self._now(self._rates))
        self._losses.index_copy_(0, self._at, loss[None])
        self._at += 1

    def _now(self, steps: Tensor) -> Tensor:
        return steps.index_select(0, self._at).squeeze(0)


def stacked(encoder: Encoder, items: Sequence[Item], steps: int) -> tuple[Tensor, ...]:
    """The fields of each step's batch, all of one shape: [steps, …].

    A mask is that of a text without padding, since no token sees what is behind it.
    """
    size = steps * BATCH
    whole = encoder.batch([items[n % len(items)] for n in range(size)])
    step = whole.rows // BATCH  # [answer tokens]
    counts = step.bincount(minlength=steps)
    slot = torch.arange(len(step), device=DEVICE) - (counts.cumsum(0) - counts)[step]

    def spread(values: Tensor, rest: int) -> Tensor:
        of_steps = values.new_full((steps, int(counts.max())), rest)
        of_steps[step, slot] = values
        return of_steps

    length = whole.ids.shape[1]
    sees = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    return (
        whole.ids.view(steps, BATCH, length),
        sees.expand(steps, 1, 1, length, length),
        spread(whole.rows % BATCH, 0),
        spread(whole.places, 0),
        spread(whole.targets, _NONE),
    )
