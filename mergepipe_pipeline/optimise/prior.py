"""How much each layer is expected to matter before anything is evaluated: the prior of AP-BMM.

`length_scales(mixed_scores(with_head(parameter), with_head(activation)))` is what the paper's code
computes (arXiv 2512.09972). A short length-scale says that an objective changes fast along a
dimension. In the paper only ranks enter; `proportional_length_scales` keeps how far scores are
apart.
"""

from __future__ import annotations

import numpy as np

from mergepipe_pipeline.arrays import F64Array

#: Consistent with a standard deviation, for normal scores.
_MAD_SCALE = 1.4826
_SMALL = 1e-8
#: Where a sigmoid is flat.
_FAR = 50.0
#: Up to this rank, as a share of the last one, dimensions start at this length-scale.
_LENGTHS = ((0.15, 0.5), (0.40, 1.0), (0.70, 2.0), (1.0, 5.0))


def with_head(scores: F64Array) -> F64Array:
    """Scores of layers, and their mean for the dimension that the final norm and head share."""
    return np.append(scores, scores.mean())


def mixed_scores(parameter: F64Array, activation: F64Array | None = None) -> F64Array:
    """Scores between 0.05 and 1 from differences of parameters and, if known, of activations.

    Each is normalised, both are averaged and smoothed over neighbours. What is not finite counts as
    the middle.
    """
    kinds = [parameter] if activation is None else [parameter, activation]
    mixed = np.mean([_normalised(scores) for scores in kinds], axis=0)
    smooth = mixed.copy()
    smooth[1:-1] = mixed[:-2] / 4 + mixed[1:-1] / 2 + mixed[2:] / 4
    scores: F64Array = np.clip(smooth, 0.05, 1.0)
    return scores


def length_scales(scores: F64Array) -> F64Array:
    """Length-scales by rank: 0.5 for the highest 15 %, 1 to 40 %, 2 to 70 %, then 5."""
    rank = np.empty(len(scores))
    rank[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    share = rank / max(len(scores) - 1, 1)
    limits, lengths = np.array(_LENGTHS).T
    scales: F64Array = lengths[np.searchsorted(limits, share)]
    return scales


def proportional_length_scales(scores: F64Array) -> F64Array:
    """Length-scales in inverse proportion to scores above 0: 0.5 for a score of 1.

    Ranks give many dimensions short ones even where a prior names three.
    """
    lengths: F64Array = _LENGTHS[0][1] / scores
    return lengths


def _normalised(scores: F64Array) -> F64Array:
    """0 to 1 about the median, robustly; between the extremes where most scores are equal."""
    known = scores[np.isfinite(scores)]
    middle = np.full(len(scores), 0.5)
    if not len(known):
        return middle
    median = np.median(known)
    spread = np.median(np.abs(known - median))
    if spread >= _SMALL:
        apart = (scores - median) / (_MAD_SCALE * spread + _SMALL)
        scaled = 1 / (1 + np.exp(-np.clip(apart, -_FAR, _FAR)))
    elif np.ptp(known) >= _SMALL:
        scaled = (scores - known.min()) / np.ptp(known)
    else:
        return middle
    return np.where(np.isfinite(scores), scaled, middle)
