"""Where a server may send its readers: one rule for web servers, and for the hub and its client.

A redirect never leads from https to http, nor to an address of this machine or of a network that
the address given is not in: a server outside must not make this process ask services inside. Names
are resolved before the request, and the address that was connected to is looked at after it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from mergepipe_pipeline.errors import RemoteError
from mergepipe_pipeline.remote.fetch import watched
from mergepipe_pipeline.remote.listing import RequestError
from mergepipe_pipeline.secrets import discreet

Reach = Literal["public", "private", "loopback", "link-local"]
#: From which addresses one of another reach may be redirected to.
_FROM: Mapping[Reach, frozenset[Reach]] = {
    "public": frozenset({"public", "private", "loopback", "link-local"}),
    "private": frozenset({"private", "loopback"}),
    "loopback": frozenset({"loopback"}),
    "link-local": frozenset({"link-local"}),
}
#: Where clouds tell their machines credentials, beside 169.254.169.254.
_METADATA = frozenset({"fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"})
_NAT64 = ip_network("64:ff9b::/96")
_MOST_HOPS = 5
_PORTS = {"http": 80, "https": 443}


def permitted(given: str, asked: str, location: str, *, within_origin: bool = False) -> str:
    """The URL to ask next, when `asked` answers with `location`; `given` is the user's server.

    Raises RemoteError for a place that a server may not send readers to.
    """
    try:
        url = urljoin(asked, location)
        here, there = _origin(asked), _origin(url)
    except ValueError:
        raise _refused(asked, location, "an address that can be read") from None
    if there == here:
        return url
    if within_origin:
        raise _refused(asked, url, "a place of the same scheme, host and port")
    if there[0] != "https" and here[0] == "https":
        raise _refused(asked, url, "https, as before")
    reach_of_given = _reaches(_origin(given)[1])
    for reach in _reaches(there[1]):
        if not _FROM[reach] & reach_of_given:
            raise _refused(asked, url, "a public address", f", which is {reach}")
    return url


def refuse_other_peer(given: str, answer: Any) -> None:
    """Raise RemoteError for an answer from an address that its name did not have when asked."""
    stream, url = answer.extensions.get("network_stream"), str(answer.url)
    peer = stream.get_extra_info("server_addr") if stream is not None else None
    host = _origin(url)[1]
    if not isinstance(peer, tuple) or not peer or is_proxied(url) or _origin(given)[1] == host:
        return
    if not _FROM[_reach(str(peer[0]))] & _reaches(_origin(given)[1]):
        raise _refused(given, url, "a public address", f", connected to {peer[0]}")


@contextmanager
def answer_of(
    client: Any,
    method: str,
    url: str,
    headers: Mapping[str, str],
    timeout_s: float,
    *,
    given: str | None = None,
    within_origin: bool = False,
) -> Iterator[Any]:
    """The answer to a request, by the client's library, at the end of permitted redirects.

    What `headers` has for the server asked goes to no other one. Raises RemoteError.
    """
    given, asked = given or url, dict(headers)
    for _ in range(_MOST_HOPS):
        options = {"headers": asked, "timeout": timeout_s, "follow_redirects": False}
        with client.stream(method, url, **options) as answer:
            if not answer.has_redirect_location:
                refuse_other_peer(given, answer)
                yield answer
                return
            target = permitted(given, url, answer.headers["location"], within_origin=within_origin)
        if _origin(target) != _origin(url):
            asked.pop("authorization", None)
        url = target
    raise RequestError(f"more than {_MOST_HOPS} redirects", "3xx", retries=False)


def guarded(client: Any, given: str) -> Any:
    """A client of the hub's library, which follows redirects by itself, made to keep the rule."""
    hooks = client.event_hooks
    if not any(isinstance(hook, _Guard) for hook in hooks["response"]):
        client.event_hooks = {**hooks, "response": [*hooks["response"], _Guard(given)]}
    return client


class _Guard:
    """Looks at every answer before the client follows it, and at its body while it is read."""

    def __init__(self, given: str) -> None:
        self._given = given

    def __call__(self, answer: Any) -> None:
        refuse_other_peer(self._given, answer)
        library = import_module(type(answer).__module__.partition(".")[0])
        answer.stream = watched(answer.stream, library)
        if answer.has_redirect_location:
            permitted(self._given, str(answer.url), answer.headers["location"])


def is_proxied(url: str) -> bool:
    """Whether a proxy of the environment resolves the name of a server, and connects to it."""
    scheme, host, _ = _origin(url)
    proxies = getproxies()
    return bool(proxies.get(scheme) or proxies.get("all")) and not proxy_bypass(host)


def _origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port. Raises ValueError for what has none."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]


@lru_cache(maxsize=256)
def _reaches(host: str) -> frozenset[Reach]:
    """The kinds of a host's addresses; a name that only a proxy may know counts as public."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset({"public"})
    return frozenset(_reach(str(address[0])) for *_, address in found)


def _reach(text: str) -> Reach:
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (0, None))[1]
        if inner is None and address in _NAT64:
            return _reach(str(ip_address(int(address) & 0xFFFFFFFF)))
        if inner is not None:
            return _reach(str(inner))
    if address.is_loopback or address.is_unspecified:
        return "loopback"
    if address.is_link_local or str(address) in _METADATA or address.is_multicast:
        return "link-local"
    return "public" if address.is_global else "private"


def _refused(asked: str, location: str, expected: str, why: str = "") -> RemoteError:
    return RemoteError(
        "A server sends its readers to a place where they must not go",
        where=discreet(asked),
        expected=f"a redirect to {expected}",
        found=f"{discreet(location)}{why}",
        next_step="if you trust that place, give its address in place of this one; else download "
        "the model and give its folder",
    )
