"""What compiled loops are told of a merge: a table of its experts, and how they become one update.

Without the compiler: schemas and plans load without it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: The steps on one expert's δ, in this order, and where its elements lie.
ROW = np.dtype(
    [
        ("is_delta", np.bool_),  # stored is δ, not T
        ("trims", np.bool_),  # keeps what is larger, or ties before the stop
        ("drops_outliers", np.bool_),  # drops what is larger, or ties before the stop
        ("draws", np.bool_),  # keeps what has a number in `stream` below `keep_below`
        ("trim_threshold", np.float32),
        ("next_threshold", np.float32),  # the next float32 above: what beats a tie
        ("outlier_threshold", np.float32),
        ("trim_stop_elem", np.int64),  # of the tensor; ties before it are kept
        ("outlier_stop_elem", np.int64),
        ("stream", np.uint64),
        ("keep_below", np.uint32),
        ("scale", np.float32),
        ("divisor", np.float32),
        ("weight", np.float32),
        ("place", np.int64),  # row of `experts`
    ],
    align=True,
)


class Mixing(NamedTuple):
    """How weighted deltas become one update: λ times their sum, or that of the elected sign.

    A sum is divided by `divisor`; a vote, if `normalize`, by the sum of the weights that agree.
    """

    votes: bool
    normalize: bool
    divisor: np.float32
    minus_lambda: np.float32
