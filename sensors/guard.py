"""Has a code server serve definitions again after the process that did so was killed.

A code server hands questions on to a child, which loads definitions and evaluates sensors. Where a
child is killed, as for want of memory, Dagster starts no other: nothing is indexed or merged until
somebody reloads. So each child has a guard, a process of this module that gets the address and
sleeps until the child ends, then asks the server for another if there is none.
"""

import json
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster._grpc.client import DagsterGrpcClient

#: Seconds that loading definitions may take.
RELOAD_TIMEOUT_S = 180
#: Seconds in which a server whose child ended well has another one, or has ended itself.
_GRACE_S = 10.0


def guard(server: Namespace) -> None:
    """Start the guard of this process, the child of a code server; only the first call does."""
    _start(json.dumps({name: getattr(server, name) for name in ("host", "port", "socket")}))


@cache
def _start(address: str) -> subprocess.Popen[bytes]:
    # The pipe to its standard input is closed when this process ends, however it does.
    return subprocess.Popen(
        [sys.executable, "-m", "mergepipe_pipeline.sensors.guard", address], stdin=subprocess.PIPE
    )


def client_of(server: Namespace) -> "DagsterGrpcClient":
    """A client of the code server that listens at `port` and `host`, or at `socket`."""
    from dagster._grpc.client import DagsterGrpcClient

    host = server.host or "localhost"
    port = int(server.port) if server.port else None
    return DagsterGrpcClient(host=host, port=port, socket=None if port else server.socket)


def main() -> None:
    """Wait until who started this has ended, and then until the server has a child or is gone."""
    server = Namespace(**json.loads(sys.argv[1]))
    sys.stdin.buffer.read()
    with suppress(Exception):  # of the server, which is gone
        while True:
            time.sleep(_GRACE_S)
            client = client_of(server)
            client.heartbeat()  # the server answers this itself, and a ping its child
            if _is_served(client):
                return
            # It starts another child first, and then fails to end the one that is gone.
            with suppress(Exception):
                client.reload_code(timeout=RELOAD_TIMEOUT_S)


def _is_served(client: "DagsterGrpcClient") -> bool:
    try:
        client.ping("")
    except Exception:
        return False
    return True


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
