"""Servers on this machine, of a folder, of the hub's protocol, of S3, with the faults asked for.

All count what they were asked and what they sent, on their side of the wire.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

#: A fault of one answer: a status, or one of cut, stall, byte (one, then the end), whole (no
#: ranges), other (wrong range), gzip (compressed unasked), lie (another last byte), tag (another
#: one), total (another length of the file), digits (numbers that are none), and a URL, to which it
#: redirects.
Fault = int | str | None


@dataclass
class Seen:
    """What a server was asked and what it sent: (method, path, bytes of body)."""

    requests: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def gets(self) -> int:
        return sum(method == "GET" for method, *_ in self.requests)

    @property
    def nbytes(self) -> int:
        return sum(n for *_, n in self.requests)

    def of(self, text: str) -> list[tuple[str, str, int]]:
        """Requests with `text` in their path."""
        return [r for r in self.requests if text in r[1]]


class Server(ThreadingHTTPServer):
    """A server in threads of this process. `fault` is asked of each request, with its number."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.seen = Seen()
        self.fault: Callable[[str, str, int], Fault] = lambda method, path, number: None
        self.retry_after, self.asks_by = "0", "Retry-After"
        self.stall_s = 5.0
        self.latency_s = self.drip_s = 0.0
        self.lock = threading.Lock()
        self.began = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away."""


class Handler(BaseHTTPRequestHandler):
    """Answers with faults where the server says so, and counts."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        with self.server.lock:
            self.server.began += 1
            number = self.server.began
        if self.server.latency_s:
            time.sleep(self.server.latency_s)
        self.fault = self.server.fault(self.command, self.path, number)
        if isinstance(self.fault, int):
            self.reply(self.fault, {self.server.asks_by: self.server.retry_after}, b"not now")
        elif str(self.fault).startswith("http"):
            self.reply(302, {"Location": str(self.fault)})
        elif self.fault == "stall" and self.command == "GET":
            self.count(0)
            time.sleep(self.server.stall_s)
            self.close_connection = True
        else:
            self.serve()

    def serve(self) -> None:
        """Answer the request as a sound server does."""
        raise NotImplementedError

    def count(self, nbytes: int) -> None:
        with self.server.lock:
            self.server.seen.requests.append((self.command, self.path, nbytes))

    def reply(self, status: int, headers: dict[str, str], body: bytes | memoryview = b"") -> None:
        """Send an answer, a part of it where it is to be cut."""
        head = {"Content-Length": str(len(body)), **headers}
        sent = body if self.command != "HEAD" else b""
        if self.fault == "cut" and len(sent) > 1:
            sent, self.close_connection = sent[: len(sent) // 2], True
        if self.fault == "byte" and len(sent) > 1:
            sent, self.close_connection = sent[:1], True
        # Counted before it is sent: who has the answer may look at once.
        self.count(len(sent))
        self.send_response(status)
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        if self.server.drip_s and len(sent) > 1:
            for at in range(len(sent)):
                self.wfile.write(sent[at : at + 1])
                time.sleep(self.server.drip_s)
        else:
            self.wfile.write(sent)

    def reply_file(self, path: Path, headers: dict[str, str]) -> None:
        """A file or a range of it."""
        nbytes, asked = path.stat().st_size, self.headers.get("Range")
        tag = headers.get("ETag")
        if self.fault == "tag":
            headers = headers | {"ETag": '"another"'}
        if self.headers.get("If-Match") not in (None, tag):
            self.reply(412, {})
        elif self.fault == "gzip" and self.command == "GET":
            packed = gzip.compress(_read(path, 0, nbytes))
            self.reply(200, headers | {"Content-Encoding": "gzip"}, packed)
        elif asked is None or self.fault == "whole":
            whole = {"Content-Length": str(nbytes)} if self.command == "HEAD" else {}
            if whole and self.fault == "digits":
                whole = {"Content-Length": "9" * 5000}
            self.reply(200, headers | whole, self._sent(path, 0, nbytes) if not whole else b"")
        else:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last or nbytes) + 1, nbytes)
            start += 16 * (self.fault == "other")
            total = {"total": str(nbytes + 1), "digits": "9" * 5000}.get(str(self.fault), nbytes)
            told = {"Content-Range": f"bytes {start}-{stop - 1}/{total}"}
            self.reply(206, headers | told, self._sent(path, start, stop))

    def _sent(self, path: Path, start: int, stop: int) -> bytes:
        data = _read(path, start, stop)
        if self.fault == "lie" and stop == path.stat().st_size:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data


class FolderServer(Server):
    """Serves the files below a folder.

    `tags`: what tells of changes, "etag", "time", "weak" (a weak ETag beside the time), "weak
    alone" or "none".

    With `page`, it answers with this web page where there is no file.
    """

    page = b""

    def __init__(self, folder: Path, tags: str = "etag") -> None:
        super().__init__(_FolderHandler)
        self.folder, self.tags = folder, tags


class _FolderHandler(Handler):
    server: FolderServer

    def serve(self) -> None:
        path = self.server.folder / unquote(self.path.lstrip("/"))
        if not path.is_file():
            page = self.server.page
            self.reply(200 if page else 404, {"Content-Type": "text/html", "ETag": '"p"'}, page)
            return
        headers = {}
        if self.server.tags == "etag":
            headers["ETag"] = f'"{_digest(path)[:32]}"'
        if self.server.tags.startswith("weak"):
            headers["ETag"] = 'W/"same"'
        if self.server.tags in ("time", "weak"):
            headers["Last-Modified"] = formatdate(path.stat().st_mtime, usegmt=True)
        self.reply_file(path, headers)


class HubServer(Server):
    """The hub's protocol for reading: models are the folders `org/model` below a folder.

    The commit of a model is made of its files; `private` ones ask for the token, and files of
    `gated` ones nobody gets. Another token is refused everywhere. Weights are served by the path
    `/cdn/`, to which the hub sends its readers, as by another host.
    """

    def __init__(self, folder: Path, handler: type[Handler] | None = None) -> None:
        super().__init__(handler or HubHandler)
        self.folder = folder
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.token, self.signature = "hf_test", "1"
        self.revisions: dict[str, Path] = {}
        #: What it says that a file has, of the bytes that it has.
        self.told_nbytes: Callable[[int], int | None] = lambda nbytes: nbytes

    def commit(self, repo: str) -> str:
        """The newest commit of a model."""
        folder = self.folder / repo
        told = [(str(p.relative_to(folder)), _digest(p)) for p in sorted(_files(folder))]
        commit = hashlib.sha1(json.dumps(told).encode()).hexdigest()
        self.revisions[commit] = folder
        return commit


class HubHandler(Handler):
    """Answers as the hub does."""

    server: HubServer

    def serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("authorization")
        if not path.startswith("/cdn/") and token not in (None, f"Bearer {self.server.token}"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"))
        elif path.startswith("/cdn/"):
            if "authorization" in self.headers:
                raise AssertionError("a token was sent to the place of the bytes")
            file = self.server.folder / path.removeprefix("/cdn/")
            self.reply_file(file, {"ETag": f'"cdn-{_digest(file)[:16]}"'})
        else:
            self._resolve(path.lstrip("/"))

    def _info(self, rest: str) -> None:
        repo, _, revision = rest.partition("/revision/")
        folder = self.server.folder / repo
        if not folder.is_dir() or self._is_hidden(repo):
            self.reply(404, {"X-Error-Code": "RepoNotFound"}, b'{"error":"Repository not found"}')
            return
        commit = self.server.commit(repo)
        if revision not in ("", "main", commit):
            self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b'{"error":"no revision"}')
            return
        files = []
        for path in sorted(_files(folder)):
            nbytes = self.server.told_nbytes(path.stat().st_size)
            told: dict[str, object] = {"rfilename": str(path.relative_to(folder)), "size": nbytes}
            told["blobId"] = blob_id(path)
            if _is_large(path):
                told["lfs"] = {"sha256": _digest(path), "size": told["size"], "pointerSize": 130}
            files.append(told)
        info = {"id": repo, "modelId": repo, "sha": commit, "siblings": files, "tags": []}
        body = json.dumps(info | {"private": False, "downloads": 0, "likes": 0}).encode()
        self.reply(200, {"Content-Type": "application/json"}, body)

    def _resolve(self, path: str) -> None:
        repo, _, rest = path.partition("/resolve/")
        commit, _, name = rest.partition("/")
        if repo in self.server.gated:
            said = f"Access to model {repo} is restricted. Visit its page to ask for access."
            self._refuse(403, "GatedRepo", said)
            return
        file = self.server.folder / repo / name
        if self._is_hidden(repo) or not file.is_file():
            self.reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        now = self.server.commit(repo)
        headers = {"X-Repo-Commit": commit if len(commit) == 40 else now}
        if not _is_large(file):
            self.reply_file(file, headers | {"ETag": f'"{blob_id(file)}"'})
            return
        size = str(file.stat().st_size)
        headers |= {"X-Linked-Etag": f'"{_digest(file)}"', "X-Linked-Size": size}
        port = self.server.server_address[1]
        headers["Location"] = (
            f"http://localhost:{port}/cdn/{repo}/{name}?signature={self.server.signature}"
        )
        self.reply(302, headers)

    def _refuse(self, status: int, code: str, said: str) -> None:
        headers = {"X-Error-Message": said, **({"X-Error-Code": code} if code else {})}
        self.reply(status, headers, json.dumps({"error": said}).encode())

    def _is_hidden(self, repo: str) -> bool:
        wanted = f"Bearer {self.server.token}"
        return repo in self.server.private and self.headers.get("authorization") != wanted


class S3FolderServer(Server):
    """Reading by S3's protocol: a folder is the bucket of whatever name. For files of gigabytes.

    moto, which tests use, reads a whole object for each range of it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_S3Handler)
        self.folder = folder


class _S3Handler(Handler):
    server: S3FolderServer

    def serve(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path.strip("/")).partition("/")[2]
        if "list-type=2" in url.query:
            self._list(parse_qs(url.query).get("prefix", [""])[0])
            return
        path = self.server.folder / key
        if not path.is_file():
            self.reply(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        self.reply_file(path, _s3_headers(path))

    def _list(self, prefix: str) -> None:
        rows = []
        for path in sorted((self.server.folder / prefix).iterdir()):
            if path.is_file():
                told = _s3_headers(path)
                rows.append(
                    f"<Contents><Key>{prefix}{path.name}</Key><Size>{path.stat().st_size}</Size>"
                    f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{told['ETag'].replace(chr(34), '&quot;')}</ETag></Contents>"
                )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}"
        self.reply(200, {"Content-Type": "application/xml"}, f"{body}</ListBucketResult>".encode())


def _s3_headers(path: Path) -> dict[str, str]:
    found = path.stat()
    tag = hashlib.sha256(f"{path} {found.st_mtime_ns} {found.st_size}".encode()).hexdigest()[:32]
    return {"ETag": f'"{tag}"', "Last-Modified": formatdate(found.st_mtime, usegmt=True)}


class ProxyServer(Server):
    """Stands before another server, to count and to break what passes."""

    def __init__(self, upstream: str) -> None:
        super().__init__(_ProxyHandler)
        self.upstream = urlsplit(upstream).netloc


class _ProxyHandler(Handler):
    server: ProxyServer

    def serve(self) -> None:
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        skipped = ("connection", "transfer-encoding", "date", "server")
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in skipped}
        if self.command != "HEAD":
            headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
        self.reply(answer.status, headers, data)
        connection.close()

    do_PUT = do_POST = do_DELETE = Handler.do_GET


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A server that answers while the context lasts."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 server (moto) in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the S3 server ended"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=10)


def s3_environment(endpoint: str) -> dict[str, str]:
    """The environment variables by which an S3 server on this machine is reached."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


def s3_upload(endpoint: str, bucket: str, prefix: str, folder: Path) -> None:
    """Put the files of a folder below a prefix of a bucket, which is made."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=60)
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
    }
    targets = [(f"/{bucket}", b"")]
    targets += [
        (f"/{bucket}/{prefix}/{p.relative_to(folder)}", p.read_bytes()) for p in _files(folder)
    ]
    for target, body in targets:
        connection.request("PUT", target, body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status in (200, 409), answer.status
    connection.close()


def _files(folder: Path) -> Iterator[Path]:
    return (Path(at) / name for at, _, names in os.walk(folder) for name in names)


def _read(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _is_large(path: Path) -> bool:
    return path.suffix in (".safetensors", ".bin")


def blob_id(path: Path) -> str:
    """The digest that git, and so the hub, gives a small file."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_DIGESTS: dict[tuple[str, int, int], str] = {}


def _digest(path: Path) -> str:
    found = path.stat()
    key = str(path), found.st_mtime_ns, found.st_size
    if key not in _DIGESTS:
        _DIGESTS[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return _DIGESTS[key]
