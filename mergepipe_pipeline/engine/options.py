"""A user's options for how a merge runs: its speed, its memory and its device, never its bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mergepipe_pipeline.concurrency.threads import READING, cores, merging, prepass, waiting
from mergepipe_pipeline.domain.segments import COARSE_ELEMS, FINE_ELEMS

_QUANTUM = FINE_ELEMS
#: Longer windows are no faster: they drain and fill for longer. From a quarter of a million
#: elements on, time hardly depends on the length.
_MOST_ELEMS = 5 << 18
#: Memory of the plan for one tensor of one expert: places, ranges, rules, a digest.
_INPUT_NBYTES = 13 << 8
#: Memory of a worker that decodes: 64 chunks of trits at once, or the tables of a stream, at most.
_UNPACKED_NBYTES = 17 << 20

#: Default memory of a merge beside the program: usually, when it reads past the page cache, and
#: when it reads packs.
_MEMORY_NBYTES, _PAST_CACHE_NBYTES, _PACKS_NBYTES = 128 << 20, 192 << 20, 222 << 20
#: Memory beside that for bytes that a merge reads twice.
_HELD_NBYTES = 192 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options that change speed and memory, never bits.

    `memory_bytes` bounds what a merge holds beside the program: its plan, what packs are unpacked
    into (up to three quarters), and windows in the rest, at least half of it. `window_elems`
    overrides the length that follows from it. Each of `threads` workers reads and merges windows;
    some read while others compute. None: what suits the plan. `device` is where operators work:
    cpu, cuda or cuda:N. `reads_ahead`: others read for the workers, as with packs.
    """

    memory_bytes: int | None = None
    window_elems: int | None = None
    held_bytes: int = 0
    threads: int | None = None
    device: str = "cpu"
    reads_ahead: bool = False

    @property
    def workers(self) -> int:
        """Threads that read and merge windows."""
        return self.threads or merging()

    @property
    def most_bytes(self) -> int:
        """Bytes of plan, unpacked frames and windows."""
        return self.memory_bytes or _MEMORY_NBYTES

    def with_packs(self) -> EngineOptions:
        """The options for a plan that reads packs; options that the user set stay.

        Decoding keeps the cores busy, and what it decodes is read ahead by other threads: one more
        worker only waits. What a window asks of each pack takes as long for a short one as for a
        long one.
        """
        memory_bytes = _PACKS_NBYTES + (self.threads or cores()) * _UNPACKED_NBYTES
        return replace(self._suited(cores(), memory_bytes), reads_ahead=True)

    def past_cache(self) -> EngineOptions:
        """The options for a plan that reads past the page cache; options that the user set stay.

        More workers wait for the disk, and longer reads are faster. Measured with a ties merge of
        20 experts of 0.6B on 2 cores, in turn, two to seven times, where the disk gave 1.35 GB/s: 3
        threads and 128 MiB take 31.4 s, 4 and 192 28.8 s, 6 and 192 26.1 s, 8 and 128 33.3 s, 8 and
        256 26.5 s; where it gave 0.8 GB/s there was no difference. From the page cache more workers
        take 5 to 15 % longer.
        """
        return self._suited(waiting(), _PAST_CACHE_NBYTES)

    def _suited(self, threads: int, memory_bytes: int) -> EngineOptions:
        return replace(
            self, threads=self.threads or threads, memory_bytes=self.memory_bytes or memory_bytes
        )

    def with_second_reading(self) -> EngineOptions:
        """The options for a plan that reads experts for their norms before it merges them.

        `held_bytes` keep what was read, as far as they go, beside the windows' memory; they are
        half of `memory_bytes` if that is set. Longer tensors wait in the page cache, if they fit
        there: to fill it and read it again takes more of a core, but less than the disk.
        """
        if self.memory_bytes is None:
            return replace(self, held_bytes=_HELD_NBYTES)
        half = self.memory_bytes // 2
        return replace(self, memory_bytes=self.memory_bytes - half, held_bytes=half)

    def check(self) -> None:
        """Raise DeviceError if the device is not there, before anything is read."""
        if self.device != "cpu":
            from mergepipe_pipeline.engine.accelerator import device_of

            device_of(self.device)

    @property
    def prepass_threads(self) -> int:
        """Windows read for norms at once."""
        return self.threads or prepass()

    @property
    def in_flight(self) -> int:
        """Windows begun and not yet written: each worker's, and some that wait for their turn.

        They are written in order, and one that takes long should not stop the others. Those whose
        frames were read ahead wait with them, so they are few.
        """
        return self.workers + 2 if self.reads_ahead else 2 * self.workers + 2

    def window_for(
        self,
        working_bytes: int,
        out_bytes: int,
        row_elems: int = 1,
        n_inputs: int = 0,
        ahead_bytes: int = 0,
    ) -> int:
        """Window length in elements for a tensor that takes so many bytes per element.

        Args:
            working_bytes: while a worker is on it.
            out_bytes: of result, until they are written.
            row_elems: the length is a multiple, so a row longer than a window is held whole.
            n_inputs: tensors of experts in the whole plan.
            ahead_bytes: of what is read before a worker is on it.
        """
        if self.window_elems is not None:
            elems = self.window_elems
        else:
            memory_bytes = self.most_bytes
            if self.reads_ahead:
                unpacked = self.workers * _UNPACKED_NBYTES
                memory_bytes = max(memory_bytes // 4, memory_bytes - unpacked)
            plan = min(memory_bytes // 2, n_inputs * _INPUT_NBYTES)
            each = self.workers * working_bytes + self.in_flight * out_bytes
            each += (READING + self.in_flight) * ahead_bytes
            fits = (memory_bytes - plan) // each
            # Whole segments, where there is room for one: their ends would have to be copied.
            quantum = COARSE_ELEMS if fits >= COARSE_ELEMS else _QUANTUM
            elems = int(max(_QUANTUM, min(_MOST_ELEMS, fits // quantum * quantum)))
        return max(1, elems // row_elems) * row_elems
