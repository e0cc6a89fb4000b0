"""Groups neighbouring layers that differ about equally much, so that they share a weight."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mergepipe_pipeline.arrays import F64Array


def grouped(scores: F64Array, count: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of layers in `count` runs with the least sum of squared errors about their means.

    By dynamic programming over the ends of runs, in n² · count steps.
    """
    n = len(scores)
    sums, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (scores, scores**2))

    def error(start: int, stop: int) -> float:
        total = sums[stop] - sums[start]
        return float(squares[stop] - squares[start] - total * total / (stop - start))

    best = [[np.inf] * (n + 1) for _ in range(count + 1)]
    came = [[0] * (n + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for runs in range(1, count + 1):
        for stop in range(runs, n + 1):
            options = [
                best[runs - 1][start] + error(start, stop) for start in range(runs - 1, stop)
            ]
            least = int(np.argmin(options))
            best[runs][stop], came[runs][stop] = options[least], runs - 1 + least
    cuts = [n]
    for runs in range(count, 0, -1):
        cuts.append(came[runs][cuts[-1]])
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(reversed(cuts)))
