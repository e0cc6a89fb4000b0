"""One streaming pass per expert and base: what later merges know without reading.

`stream` reads windows, `statistics` describes them, `thresholds` and `scales` refine tensor-scope
facts, `digests` names contents, `conflicts` compares experts from what was kept. Returns facts;
stores nothing.
"""
