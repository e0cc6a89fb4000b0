"""How much memory a merge may hold: the one place that decides it.

A window is a run of elements of one tensor that is read, merged and written together. Its length
falls as the number of experts rises, so that the bytes held stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mergepipe_pipeline.concurrency.threads import merging
from mergepipe_pipeline.spec.segments import COARSE_ELEMS, FINE_ELEMS

_QUANTUM = FINE_ELEMS
#: Longer windows are no faster: they drain and fill for longer. From a quarter of a million
#: elements on, time hardly depends on the length.
_MOST_ELEMS = 5 << 18
#: What the plan holds in memory of one tensor of one expert: places, ranges, rules, a digest.
_INPUT_NBYTES = 13 << 8


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Knobs that change speed and memory, never bits.

    `memory_bytes` bounds what a merge holds beside the program: its plan, and windows in the rest,
    at least half of it. `window_elems` overrides the length that follows from it; `threads` workers
    each read and merge windows: one more than there are cores, so that some read while others
    compute. `device` is where operators work: cpu, cuda or cuda:N.

    Measured with a ties merge of 20 experts of 0.6B, read cold, on 2 cores, in turn: 64 MiB 24.5
    and 27.5 s, 128 MiB 22.4 and 22.9 s, 192 MiB 24.9 and 21.7 s.
    """

    memory_bytes: int = 128 << 20
    window_elems: int | None = None
    threads: int = field(default_factory=merging)
    device: str = "cpu"

    @property
    def in_flight(self) -> int:
        """Windows begun and not yet written: each worker's, and some that wait for their turn.

        They are written in order, and one that takes long should not stop the others.
        """
        return 2 * self.threads + 2

    def window_for(
        self, working_bytes: int, out_bytes: int, row_elems: int = 1, n_inputs: int = 0
    ) -> int:
        """Window length in elements for a tensor that takes so many bytes per element.

        `working_bytes` while a worker is on it, `out_bytes` of result until they are written.
        `n_inputs`: tensors of experts in the whole plan. A multiple of `row_elems`, so a row longer
        than a window is held whole.
        """
        if self.window_elems is not None:
            elems = self.window_elems
        else:
            plan = min(self.memory_bytes // 2, n_inputs * _INPUT_NBYTES)
            each = self.threads * working_bytes + self.in_flight * out_bytes
            fits = (self.memory_bytes - plan) // each
            # Whole segments, where there is room for one: their ends would have to be copied.
            quantum = COARSE_ELEMS if fits >= COARSE_ELEMS else _QUANTUM
            elems = int(max(_QUANTUM, min(_MOST_ELEMS, fits // quantum * quantum)))
        return max(1, elems // row_elems) * row_elems


def cut(numel: int, window_elems: int) -> Iterator[tuple[int, int]]:
    """Half-open element ranges that cover a tensor in order."""
    for start in range(0, numel, window_elems):
        yield start, min(numel, start + window_elems)
