"""Experts' deltas to their base, encoded in tiers; `spec.pack` says what a pack is.

`codec` turns chunks into frames and back by the compiled loops of `ternary` (the approximate tiers)
and `exact` (the others); `frames` says how a frame is laid out.
"""
