"""Reads runs of frames in one compiled call, so that no other thread waits for the interpreter.

A window of a merge reads each tier of each pack: of 20 experts of 0.6B these are 40,000 reads, and
each costs Python more than the disk.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import BoolArray, I32Array, I64Array, U8Array, U32Array
from mergepipe_pipeline.jit import cached_njit
from mergepipe_pipeline.packs.xxh3 import Hashes, are_equal
from mergepipe_pipeline.storage.compiled_reads import pages_nbytes, pread
from mergepipe_pipeline.storage.uncached import PAGE_NBYTES

#: Fields of a run: its tier, its first chunk, where it begins in the file, its bytes, and where in
#: the buffer its first page lies.
RUN_FIELDS = 5


# It keeps the interpreter's lock: to let it go and to get it back takes longer.
@cached_njit()
def lay_out(
    frame_starts: I64Array,
    sizes: U32Array,
    wanted: BoolArray,
    first: int,
    starts: I64Array,
    nbytes: I64Array,
    runs: I64Array,
) -> tuple[int, int]:
    """Find the runs of wanted frames, each of neighbours, and give them whole pages of a buffer.

    Args:
        frame_starts: where each frame begins in its tier's file, [tiers, chunks + 1].
        sizes: their bytes, [tiers, chunks].
        wanted: whether they are read, likewise.
        first: the first chunk that is looked at; `starts` says how many.
        starts: gets where they come to lie in the buffer, [tiers, looked at].
        nbytes: gets their bytes, 0 for what is not wanted.
        runs: gets the runs, [tiers · looked at, RUN_FIELDS].

    Gives how many runs there are, and the bytes of the buffer.
    """
    n_runs, size = 0, 0
    for tier in range(len(starts)):
        chunk, stop = first, first + starts.shape[1]
        while chunk < stop:
            begin = chunk
            while chunk < stop and wanted[tier, chunk]:
                chunk += 1
            start = frame_starts[tier, begin]
            n = frame_starts[tier, chunk] - start
            if n:
                lead = start % PAGE_NBYTES
                for c in range(begin, chunk):
                    starts[tier, c - first] = size + lead + frame_starts[tier, c] - start
                    nbytes[tier, c - first] = sizes[tier, c]
                runs[n_runs] = tier, begin, start, n, size
                size += pages_nbytes(lead + n)
                n_runs += 1
            chunk += 1
    return n_runs, size


@cached_njit(nogil=True)
def read_runs(
    runs: I64Array,
    descriptors: I32Array,
    direct: BoolArray,
    buffer: U8Array,
    starts: I64Array,
    nbytes: I64Array,
    checksums: Hashes,
    first: int,
) -> tuple[int, bool]:
    """Read `runs` from each tier's file, and compare the frames as `are_equal` does.

    `direct` are the files whose pages are read past the page cache. Gives how many runs were read
    whole, one after the other, and whether all were and have what is expected.
    """
    for r in range(len(runs)):
        tier, _, start, n, at = runs[r]
        lead, place = start % PAGE_NBYTES, np.uint64(buffer.ctypes.data) + np.uint64(at)
        if direct[tier]:
            size = np.uint64(pages_nbytes(lead + n))
            n_read = pread(descriptors[tier], place, size, start - lead) - lead
        else:
            n_read = pread(descriptors[tier], place + np.uint64(lead), np.uint64(n), start)
        if n_read < n:
            return r, False
    return len(runs), are_equal(buffer, starts, nbytes, checksums, first)
