"""An S3 server (moto) that is watched: it remembers requests, and refuses or holds some."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import obstore
from moto.moto_server.threaded_moto_server import make_server  # type: ignore[attr-defined]
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from obstore.store import S3Store

#: What the server answers instead of moto, as (status line, code of S3's error).
Answer = tuple[str, str]


class _Quiet(MotoRequestHandler):
    def log_request(self, *_: object) -> None:
        return


@dataclass
class WatchedS3:
    """A server at `endpoint`. `seen` has (method, path) of each request, parts of an upload too."""

    endpoint: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    #: Called before each request with method and path: gives an answer, or waits, or does nothing.
    before: Callable[[str, str], Answer | None] = lambda method, path: None

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which clients find it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def store(self, bucket: str) -> S3Store:
        """A client of its own, for what tests look at."""
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            access_key_id="user",
            secret_access_key="secret",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def make(self, bucket: str) -> None:
        """Make an empty bucket."""
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")
        urllib.request.urlopen(request).close()

    def keys(self, bucket: str, below: str = "") -> list[str]:
        """The keys of all objects below a prefix, sorted."""
        store = self.store(bucket)
        found = [o["path"] for chunk in obstore.list(store, prefix=below or None) for o in chunk]
        return sorted(found)

    def puts(self) -> list[str]:
        """The last parts of the paths of all writes so far, in order."""
        return [path.rpartition("/")[2] for method, path in self.seen if method in ("PUT", "POST")]

    def clear(self) -> None:
        """Forget requests and faults."""
        self.seen.clear()
        self.before = lambda method, path: None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.seen.append((method, path))
        answer = self.before(method, path)
        if answer is None and method == "PUT":
            with self._writing:  # S3 compares and writes in one step, moto in two
                return self._moto(environ, start_response)
        if answer is None:
            return self._moto(environ, start_response)
        status, code = answer
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
        start_response(status, [("Content-Length", str(len(body)))])
        return [body]

    def __post_init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._writing = threading.Lock()


@contextmanager
def watched_s3() -> Iterator[WatchedS3]:
    """The server, in threads of this process, until the context ends."""
    app = WatchedS3()
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    app.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield app
    finally:
        server.shutdown()
        thread.join()
