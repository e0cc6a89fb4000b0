"""What reading and decoding packs take, where nobody has measured this machine."""

from __future__ import annotations

#: Seconds of one core to decode an element of an exact level: frames of zstd, and the base's bits
#: added. Measured with bfloat16 weights of a 0.6B model.
DECODE_EXACT_ELEM_S = 2.7e-9
#: The same of an approximate level, its tiers together.
DECODE_NEAR_ELEM_S = 0.9e-9
#: The same to pack one: both models read and compared, all tiers encoded, the exact ones decoded
#: again, hashed and written.
ENCODE_ELEM_S = 25e-9
#: The same to merge an element of an expert, by the usual methods.
MERGE_ELEM_S = 1.0e-9
