"""The one home of every hash: content digests, ids from canonical JSON, sealed JSON files.

SHA-256 for what is written and for ids: CPUs have instructions for it and every tool can check it.
An id is the digest of a canonical JSON value, so that equal facts have equal ids in every process.
BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) for the contents of input tensors, which an
analysis hashes as it reads them, and for the catalog's files.
XXH3 (https://github.com/Cyan4973/xxHash) of 64 bits for what a merge reads again: it finds damage,
not forgery, which `verify --inputs` finds by BLAKE3.

Measured with the CPU's SHA instructions, GB per second of one core: SHA-256 1.8; BLAKE3 6.5 in
cache, 4.8 from memory; XXH3 35 in cache, 15 from memory. SHA-256 of five experts of 0.6B was a
quarter of an analysis' CPU time; BLAKE3 of 20 experts, whose segments a TIES merge reads, is 7 s of
27, XXH3 2. On a disk that moves 2 GB/s in all, a merge's output takes SHA-256 37 % of a core for
one expert, 11 % for eight.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import xxhash
from blake3 import blake3

from mergepipe_pipeline.errors import CorruptionError

SEAL_KEY = "sha256"
_RESTORE = (
    "restore the file from a copy, or remove it (a snapshot's with its folder), then run again"
)
#: Half a BLAKE3: nobody finds other bytes with the same one.
_BLAKE3_NBYTES = 16
#: An XXH3 of 64 bits: damage that keeps it has a chance of 2⁻⁶⁴.
CHECKSUM_NBYTES = 8
#: The stored digest of a segment: both, one after the other.
SEGMENT_DIGEST_NBYTES = _BLAKE3_NBYTES + CHECKSUM_NBYTES


def new_hash() -> hashlib._Hash:
    """A fresh streaming hash of what is written (SHA-256)."""
    return hashlib.sha256()


def new_content_hash() -> blake3:
    """A fresh streaming hash of what is read (BLAKE3, 32 bytes)."""
    return blake3()


def segment_digests(raw: memoryview, segment_nbytes: int, *, is_made: bool = False) -> bytes:
    """Per `segment_nbytes` of a tensor's stored bytes its BLAKE3 (16 bytes) and XXH3 (8).

    Zeros stand for the BLAKE3 of what `is_made` of stored bytes: theirs is known.
    """
    parts = (raw[a : a + segment_nbytes] for a in range(0, len(raw), segment_nbytes))
    if is_made:
        return b"".join(bytes(_BLAKE3_NBYTES) + xxhash.xxh3_64_digest(part) for part in parts)
    return b"".join(
        blake3(part).digest(_BLAKE3_NBYTES) + xxhash.xxh3_64_digest(part) for part in parts
    )


def segment_checksums(raw: memoryview, segment_nbytes: int) -> bytes:
    """Per `segment_nbytes` of a tensor's stored bytes its XXH3 alone (8 bytes)."""
    starts = range(0, len(raw), segment_nbytes)
    return b"".join(xxhash.xxh3_64_digest(raw[a : a + segment_nbytes]) for a in starts)


def checksums_of(digests: bytes) -> bytes:
    """The XXH3 in digests of segments, as `segment_checksums` gives them."""
    starts = range(0, len(digests), SEGMENT_DIGEST_NBYTES)
    return b"".join(digests[a + _BLAKE3_NBYTES : a + SEGMENT_DIGEST_NBYTES] for a in starts)


def content_digest(digests: bytes) -> str:
    """The digest of an input tensor's content: BLAKE3 (64 hex) over the BLAKE3 of its segments."""
    starts = range(0, len(digests), SEGMENT_DIGEST_NBYTES)
    return blake3(b"".join(digests[a : a + _BLAKE3_NBYTES] for a in starts)).hexdigest()


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal characters."""
    return hashlib.sha256(data).hexdigest()


def blake3_hex(*parts: bytes | memoryview) -> str:
    """BLAKE3 of the parts, one after the other, as 64 hexadecimal characters."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def canonical_json(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """The one byte form of a JSON value: sorted keys, no blanks, UTF-8, no NaN.

    `default` gives a JSON value for what is none. Raises ValueError for NaN or infinity and
    TypeError for what JSON cannot hold.
    """
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
        default=default,
    ).encode()


def digest_json(value: Any) -> str:
    """SHA-256 (64 hex) of the canonical JSON of `value`: the id of a fact."""
    return sha256_hex(canonical_json(value))


def seal(value: dict[str, Any]) -> bytes:
    """Canonical file bytes of a JSON object with its own digest under `sha256`."""
    sealed = {**value, SEAL_KEY: digest_json(value)}
    return (
        json.dumps(sealed, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    ).encode()


def unseal(data: bytes, where: str, load: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """The object in sealed JSON bytes, as `load` reads it. A flipped bit raises CorruptionError."""
    try:
        value = load(data)
        stated = value.pop(SEAL_KEY)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CorruptionError(
            "A sealed JSON file cannot be read",
            where=where,
            expected=f"an object with {SEAL_KEY!r}",
            found=str(error),
            next_step=_RESTORE,
        ) from error
    try:
        if seal(value) == data:
            assert isinstance(value, dict)
            return value
        found = digest_json(value)
    except (ValueError, RecursionError):  # NaN, half a character, a depth that nobody writes
        found = "of nothing"
    raise CorruptionError(
        "A sealed JSON file was changed after it was written",
        where=where,
        expected=f"sha256 {str(stated)[:16]}",
        found=f"sha256 {found[:16]}",
        next_step=_RESTORE,
    )


def seal_line(line: bytes) -> bytes:
    """File bytes of one line of any length, with its digest on a second.

    For JSON that is too long to be laid out twice, as `seal` does. `head -n 1 FILE | sha256sum`
    gives the digest.
    """
    return line + b"\n" + _line_seal(line)


def unseal_line(data: bytes, where: str) -> bytes:
    """The line of `seal_line`. Any flipped bit raises CorruptionError."""
    line, _, stated = data.partition(b"\n")
    computed = _line_seal(line)
    if stated != computed:
        raise CorruptionError(
            "A sealed line was changed after it was written",
            where=where,
            expected=stated[: len(computed)].decode(errors="replace").strip() or "a second line",
            found=computed.decode().strip(),
            next_step="restore the file, or delete it and run again",
        )
    return line


def _line_seal(line: bytes) -> bytes:
    digest = new_hash()
    digest.update(line)
    digest.update(b"\n")
    return canonical_json({SEAL_KEY: digest.hexdigest()}) + b"\n"
