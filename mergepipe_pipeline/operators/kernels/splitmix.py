"""SplitMix64, written once for NumPy arrays and for compiled loops.

Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"; multipliers of
Stafford's variant 13.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: From one state to the next: 2**64 over the golden ratio.
GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mixed(states: Any) -> Any:
    """64 well-mixed bits of each state, uint64 or an array of them, changed in place."""
    states ^= states >> np.uint64(30)
    states *= np.uint64(0xBF58476D1CE4E5B9)
    states ^= states >> np.uint64(27)
    states *= np.uint64(0x94D049BB133111EB)
    states ^= states >> np.uint64(31)
    return states
