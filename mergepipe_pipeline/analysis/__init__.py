"""One streaming pass per expert and base: what later merges know without reading.

`stream` reads windows, `statistics` describes them and `magnitudes` lists what occurs in them,
`order` finds ranks in them, `cuts`, `thresholds` and `scales` give facts of one expert, `measure`
those of several together, `digests` names contents, `conflicts` compares experts from what was
kept. Returns facts; stores nothing.
"""
