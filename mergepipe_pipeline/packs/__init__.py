"""Experts' deltas to their base, encoded in tiers; `domain.pack` says what a pack is.

`codec` turns chunks into frames and back by the compiled loops of `ternary` (the approximate tiers)
and `exact` (the others); `frames` and `sparse` say how a frame is laid out. `index`, `store` and
`writer` keep packs in files; `reader` reads what a plan names, `elements` hands it to windows,
where `rows` makes δ or T of it and of what checkpoints store.
"""
