"""Times of reading and decoding packs, the same for every machine: plans follow from them."""

from __future__ import annotations

#: Seconds of one core to decode an element of an exact level: frames of zstd, and the base's bits
#: added. What whole merges of 20 models of 0.6B in bfloat16 take on two busy cores, less merging:
#: 1.8 to 2.2 ns.
DECODE_EXACT_ELEM_S = 2.1e-9
#: The same of an approximate level, its tiers together, of a plan of 10 %.
DECODE_NEAR_ELEM_S = 0.7e-9
#: The same to pack one: both models read and compared, all tiers encoded, the exact ones decoded
#: again, hashed and written.
ENCODE_ELEM_S = 25e-9
#: The same to merge an element of an expert, by the usual methods.
MERGE_ELEM_S = 1.0e-9
#: Bytes per second that a disk is taken to read.
READ_BYTES_PER_S = 1e9
