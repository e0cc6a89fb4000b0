"""Texts without the secrets of addresses: passwords, signatures and tokens never leave the process.

Addresses with secrets are refused where they are read. What repeats them all the same, as messages
of client libraries do, passes through here: every error, every line for people, what is logged.
"""

from __future__ import annotations

import re

#: An address in a text, which keeps one slash of two where it was taken for a path.
_ADDRESS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://|\b(?:https?|hf|s3|gs|az):/)"
    r"(?P<place>[^\s?#\"'<>`]*)(?P<query>[?#]?[^\s\"'<>`]*)"
)
#: Host and port, or a name with a revision.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:]*)(:[0-9]*)?[.,:;)]*")

#: What names of tensors begin with, in the address of a training run's checkpoint on this machine.
_PREFIX = re.compile(r"(\?prefix=[A-Za-z0-9_.-]*)?[.,:;)]*")


def discreet(text: str) -> str:
    """Text for people and records: addresses in it without user, password and query.

    What stands behind `?` and `#` may be a signature or a token, and so may a user's name.
    """
    return _ADDRESS.sub(_without_secrets, text) if ":/" in text else text


def _without_secrets(match: re.Match[str]) -> str:
    scheme, place, query = match["scheme"], match["place"], match["query"]
    if scheme.startswith("dcp:") and "@" not in place and _PREFIX.fullmatch(query):
        return match[0]
    first, slash, rest = place.partition("/")
    user, sign, host = first.rpartition("@")
    if sign and (not scheme.startswith("hf:") or ":" in user):  # hf://model@revision
        place = f"***@{host}{slash}{rest}"
    elif ":" in first and not _HOST.fullmatch(first):  # a password with a slash in it
        place = f"***@{place.rpartition('@')[2]}" if "@" in place else f"***{slash}{rest}"
    return f"{scheme}{place}" + (f"{query[0]}…" if len(query) > 1 else query)
