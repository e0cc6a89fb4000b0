"""What this process asked of servers: requests and bytes of bodies, by address."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests sent and bytes of bodies that came, those of failed requests among them."""

    requests: int = 0
    nbytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests + other.requests, self.nbytes + other.nbytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.nbytes - other.nbytes)


class Meter:
    """Counts the traffic of a process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: dict[str, Traffic] = {}
        self._listeners: list[Callable[[int], None]] = []

    def count(self, address: str, traffic: Traffic) -> None:
        """Add traffic of an address."""
        with self._lock:
            self._by_address[address] = self._by_address.get(address, Traffic()) + traffic
            listeners = tuple(self._listeners)
        for listener in listeners if traffic.nbytes else ():
            listener(traffic.nbytes)

    @property
    def total(self) -> dict[str, Traffic]:
        """All traffic so far, by address."""
        with self._lock:
            return dict(self._by_address)

    def since(self, before: Mapping[str, Traffic]) -> dict[str, Traffic]:
        """What came after `before`, as `total` gave it, by address."""
        moved = {a: t - before.get(a, Traffic()) for a, t in sorted(self.total.items())}
        return {address: traffic for address, traffic in moved.items() if traffic != Traffic()}

    @contextmanager
    def told(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Tell `listener` of the bytes that come meanwhile, in whichever thread they do."""
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)


#: Of the whole process, as connections are.
METER = Meter()
