"""What can be read, with what it costs and saves, and how a budget goes down that list.

An item is one or more candidates that are read together. Items of one chain build on each
other: a later one is read only after the earlier. Strategies make the list, `spend` goes down it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from mergepipe_pipeline.arrays import F64Array, I64Array
from mergepipe_pipeline.concurrency import threads
from mergepipe_pipeline.concurrency.workers import Workers
from mergepipe_pipeline.planner.candidates import Candidates, Choice, Group
from mergepipe_pipeline.planner.constraints import Constraints
from mergepipe_pipeline.planner.inner_products import Batch, Gram

#: What is not finite counts as this much, so that sums of it stay numbers.
_HUGE = 1e100


@dataclass(frozen=True)
class Items:
    """Item p is the candidates `members[first[p] : first[p + 1]]` of chain `chain[p]`.

    It saves `saved[p]` of the squared error. Within a chain, items stand in order.
    """

    chain: I64Array
    saved: F64Array
    first: I64Array
    members: I64Array


def single_items(c: Candidates, units: I64Array) -> Items:
    """Units as items, each a chain of its own, worth ‖c·δ‖²."""
    starts = c.unit_first[units]
    counts = np.append(c.unit_first, len(c.unit))[units + 1] - starts
    first = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(first[-1]) - np.repeat(first[:-1] - starts, counts)
    return Items(c.n_out_blocks + units, c.unit_gain[units], first, places)


def chain_items(c: Candidates, free: Choice) -> Items:
    """The items of every output block worth making in a row, from the candidates in `free`."""
    nbytes = np.where(free, c.nbytes, 0)
    # The threads of a BLAS would fight over matrices of this size, and take ten times as long.
    with threadpool_limits(1, "blas"), Workers(threads.PLANNING) as workers:
        return joined(list(workers.map(lambda group: _out_block_items(group, nbytes), c.groups())))


def joined(parts: Sequence[Items]) -> Items:
    """Several lists of items as one; chains keep their numbers."""
    counts = [np.diff(p.first) for p in parts]
    none = [np.zeros(0, np.int64)]
    return Items(
        np.concatenate([p.chain for p in parts] or none),
        np.concatenate([p.saved for p in parts] or [np.zeros(0)]),
        np.concatenate([[0], np.cumsum(np.concatenate(counts or none))]).astype(np.int64),
        np.concatenate([p.members for p in parts] or none),
    )


def _out_block_items(group: Group, free_nbytes: I64Array) -> Items:
    from mergepipe_pipeline.planner.chains import hull_of

    shape, nbytes = group.members.shape, group.table(free_nbytes)
    order, residual = _chain(group, nbytes)
    item = np.full(shape, -1, np.int64)
    saved, cost = np.zeros(shape), np.zeros(shape, np.int64)
    hull_of(order, residual, nbytes, item, saved, cost)
    out_blocks, places = np.nonzero(item >= 0)
    numbers = item[out_blocks, places]
    starts = np.flatnonzero((places == 0) | (np.diff(numbers, prepend=-1) != 0))
    return Items(
        group.first_out_block + out_blocks[starts],
        saved[out_blocks[starts], numbers[starts]],
        np.append(starts, len(out_blocks)),
        group.members[out_blocks, order[out_blocks, places]],
    )


def _chain(group: Group, nbytes: I64Array) -> tuple[I64Array, F64Array]:
    """A greedy order [out_blocks, E], and the residual after each item [out_blocks, E + 1]."""
    c = group.candidates
    curve = c.curves.get(group.tensor)
    n_blocks, count = group.members.shape
    if curve is None:
        from mergepipe_pipeline.planner.chains import additive_chains

        order = np.full((n_blocks, count), -1, np.int64)
        residual = np.zeros((n_blocks, count + 1))
        size = np.nan_to_num(group.size, nan=_HUGE, posinf=_HUGE, neginf=-_HUGE)
        for batch, cosine in cosine_batches(group, cautious=True):
            into = (nbytes[batch], order[batch], residual[batch])
            additive_chains(size[batch], group.kept[batch], cosine, *into)
        return order, residual
    sq_norm = np.where(nbytes, group.table(c.sq_norm), 0.0)
    worth = sq_norm / np.maximum(nbytes, 1)
    order = np.argsort(-np.where(nbytes, worth, -1.0), axis=1, kind="stable")
    bought = np.cumsum(np.take_along_axis(sq_norm, order, axis=1), axis=1)
    total = group.table(c.sq_norm).sum(axis=1, keepdims=True)
    before = total - bought[:, -1:]
    share = np.hstack([before, before + bought]) / np.where(total > 0, total, 1.0)
    share = np.where(total > 0, np.clip(share, 0, 1), 1.0)
    residual = curve.factor * total * np.interp(share, curve.share, curve.residual)
    order = np.where(np.take_along_axis(nbytes, order, axis=1) > 0, order, -1)
    return order, residual


def cosine_batches(group: Group, *, cautious: bool) -> Iterator[Batch]:
    """Cosines of a group's blocks; deltas without a sketch count as orthogonal to the others."""
    sketches = [r.block_sketch for r in group.rows]
    present = [s for s in sketches if s is not None]
    if len(present) == len(sketches):
        gram = Gram(present)
        yield from gram.cautious() if cautious else gram.plain()
        return
    alone = np.eye(len(sketches), dtype=np.float32)
    yield slice(0, group.n_out_blocks), np.broadcast_to(alone, (group.n_out_blocks, *alone.shape))


def spend(c: Candidates, items: Items, order: I64Array, constraints: Constraints) -> Choice:
    """The candidates read along `order` as long as they fit; pinned ones come first."""
    from mergepipe_pipeline.planner.chains import affordable

    counts = np.diff(items.first)[order]
    first = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(first[-1]) - np.repeat(first[:-1] - items.first[:-1][order], counts)
    members = items.members[places]
    chain = items.chain[order]
    nbytes = c.nbytes[members]
    cost = np.add.reduceat(nbytes, first[:-1]) if len(order) else np.zeros(0, np.int64)
    pinned = constraints.pinned & ~c.zero
    spent = np.bincount(c.expert[pinned], c.nbytes[pinned], len(constraints.caps)).astype(np.int64)
    taken = affordable(
        cost,
        chain,
        c.expert[members],
        nbytes,
        first.astype(np.int64),
        constraints.budget_bytes - int(c.nbytes[pinned].sum()),
        constraints.caps - spent,
        int(chain.max(initial=-1)) + 1,
    )
    chosen = pinned.copy()
    chosen[members[np.repeat(taken, counts)]] = True
    return chosen & ~c.zero
