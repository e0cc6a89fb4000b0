"""Upgrades of candidates, and how many of those to stored elements a budget covers.

Those that read packs are compiled in `hulls`, which plans that read none do without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mergepipe_pipeline.arrays import BoolArray, F64Array, I32Array, I64Array


class Upgrades(NamedTuple):
    """Upgrades, [upgrades] each: a candidate to a level for so many more bytes, and what it saves.

    Those of a candidate stand together and in order, those of a row behind its rungs', which its
    first free candidate stands for.
    """

    candidate: I32Array
    level: npt.NDArray[np.int8]
    nbytes: I64Array
    saved: F64Array

    def at(self, places: I64Array | slice) -> Upgrades:
        """Those in some places."""
        return Upgrades(
            self.candidate[places], self.level[places], self.nbytes[places], self.saved[places]
        )


def joined(some: Upgrades, others: Upgrades) -> Upgrades:
    """Both in the order of their candidates."""
    together = Upgrades(
        np.append(some.candidate, others.candidate),
        np.append(some.level, others.level),
        np.append(some.nbytes, others.nbytes),
        np.append(some.saved, others.saved),
    )
    return together.at(np.argsort(together.candidate, kind="stable"))


def affordable(nbytes: I64Array, expert: I64Array, budget_bytes: int, caps: I64Array) -> BoolArray:
    """Do as `hulls.affordable_levels` for upgrades that are each the only one of its candidate."""
    fits, caps = np.zeros(len(nbytes), np.bool_), caps.copy()
    rest = np.arange(len(nbytes))  # [upgrades] that may fit, as all in the loop
    while len(rest := rest[nbytes[rest] <= np.minimum(budget_bytes, caps[expert[rest]])]):
        # All up to the first that does not fit: below, cost so far by expert, then by place.
        order = np.argsort(expert[rest], kind="stable")
        cost, of = nbytes[rest][order], expert[rest][order]
        so_far = np.cumsum(cost)
        is_first = np.diff(of, prepend=-1) != 0
        of_others = np.maximum.accumulate(np.where(is_first, so_far - cost, 0))
        is_over = np.cumsum(nbytes[rest]) > budget_bytes
        is_over[order] |= so_far - of_others > caps[of]
        taken = rest[: int(is_over.argmax()) if is_over.any() else len(rest)]
        fits[taken] = True
        budget_bytes -= int(nbytes[taken].sum())
        caps -= np.bincount(expert[taken], nbytes[taken], len(caps)).astype(np.int64)
        rest = rest[len(taken) :]
    return fits
