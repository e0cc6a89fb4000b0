"""A server of the hub's protocol for writing, which the real `huggingface_hub` client talks to.

Repositories, branches and commits are kept in memory; large files by digest, as git-lfs does.
Sources: https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md, the client's own requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

#: Files of this size or more are large, as are weights.
_LARGE_NBYTES = 10_000_000

Tree = dict[str, bytes]


@dataclass
class Repo:
    """A repository: its trees by commit, and the commit of each branch."""

    private: bool
    commits: dict[str, Tree] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, tree: Tree) -> str:
        """Let a branch be this tree."""
        text = repr((branch, len(self.commits), sorted(tree)))
        found = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[found] = tree
        self.branches[branch] = found
        return found

    def revision(self, name: str) -> str | None:
        """The commit of a branch or of a commit's id."""
        return self.branches.get(name) or (name if name in self.commits else None)


@dataclass
class Hub:
    """What the server holds; `sent` are the large files that were sent, by digest, in order."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    #: Called before each request with method and path; gives a status to refuse with, or None.
    before: Callable[[str, str], int | None] = lambda method, path: None

    def tree(self, repo: str, branch: str = "main") -> Tree:
        """The files of a branch, large ones with their content."""
        found = self.repos[repo]
        return found.commits[found.branches[branch]]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        refused = self.hub.before(self.command, path)
        if refused is not None:
            self._answer(refused, {"error": "refused by the test"})
            return
        for method, pattern, serve in _ROUTES:
            found = re.fullmatch(pattern, path)
            if method == self.command and found:
                serve(self, body, **found.groupdict())
                return
        self._answer(404, {"error": f"no such place: {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _answer(self, status: int, value: Any = None, **headers: str) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self._bytes(status, body, {"Content-Type": "application/json", **headers})

    def _bytes(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError, ConnectionResetError):  # its client was killed
                self.wfile.write(body)

    def _found(self, repo: str, revision: str) -> tuple[Repo, str] | None:
        known = self.hub.repos.get(repo)
        commit = known.revision(revision) if known else None
        if known is None or commit is None:
            code = "RepoNotFound" if known is None else "RevisionNotFound"
            self._answer(404, {"error": code}, **{"X-Error-Code": code})
            return None
        return known, commit

    def create(self, body: bytes) -> None:
        said = json.loads(body)
        name = "/".join(filter(None, (said.get("organization"), said["name"])))
        if name in self.hub.repos:
            self._answer(409, {"error": "there is one", "url": f"{self.hub.endpoint}/{name}"})
            return
        made = self.hub.repos[name] = Repo(said.get("visibility") == "private")
        made.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self._answer(200, {"url": f"{self.hub.endpoint}/{name}"})

    def branch(self, body: bytes, repo: str, branch: str) -> None:
        known = self.hub.repos[repo]
        start = json.loads(body or b"{}").get("startingPoint", "main")
        known.branches.setdefault(branch, known.branches[start])
        self._answer(200, {})

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        found = self._found(repo, revision)
        if found is not None:
            tree = found[0].commits[found[1]]
            said = {"id": repo, "sha": found[1], "private": found[0].private}
            self._answer(200, said | {"siblings": [_sibling(n, d) for n, d in tree.items()]})

    def list(self, body: bytes, repo: str, revision: str) -> None:
        found = self._found(repo, revision)
        if found is not None:
            tree = found[0].commits[found[1]]
            self._answer(200, [_entry(name, data) for name, data in tree.items()])

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if _is_large(f["path"], f["size"]) else "regular",
                "shouldIgnore": False,
            }
            for f in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            href = {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"}
            known = wanted["oid"] in self.hub.large
            objects.append({**wanted, **({} if known else {"actions": {"upload": href}})})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "other bytes"})
            return
        self.hub.large[oid] = body
        self.hub.sent.append(oid)
        self._answer(200)

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        found = self._found(repo, revision)
        if found is None:
            return
        lines = [json.loads(line) for line in body.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != found[1]:
            self._answer(412, {"error": "A commit has happened since."})
            return
        tree = dict(found[0].commits[found[1]])
        for value, kind in ((line["value"], line["key"]) for line in lines[1:]):
            if kind == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                tree[value["path"]] = self.hub.large[value["oid"]]
            else:
                del tree[value["path"]]
        made = found[0].commit(revision, tree)
        url = f"{self.hub.endpoint}/{repo}/commit/{made}"
        self._answer(200, {"commitUrl": url, "commitOid": made})

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        found = self._found(repo, revision)
        if found is None:
            return
        data = found[0].commits[found[1]][name]
        entry = _entry(name, data)
        digest = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"X-Repo-Commit": found[1], "ETag": f'"{digest}"'}
        asked = self.headers.get("Range")
        if asked is None:
            self._bytes(200, data, headers)
            return
        start, last = map(int, asked.removeprefix("bytes=").split("-"))
        told = {"Content-Range": f"bytes {start}-{last}/{len(data)}"}
        self._bytes(206, data[start : last + 1], headers | told)

    def yaml(self, body: bytes) -> None:
        self._answer(200, {"errors": [], "warnings": []})


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("POST", "/api/validate-yaml", _Handler.yaml),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<branch>.+)", _Handler.branch),
    ("GET", rf"/api/models/{_REPO}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>[^/]+)", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)", _Handler.list),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", _Handler.commit),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.upload),
    ("HEAD", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
    ("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
]


def _is_large(name: str, nbytes: int) -> bool:
    return name.endswith(".safetensors") or nbytes >= _LARGE_NBYTES


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data), "oid": _git_id(data)}
    if _is_large(name, len(data)):
        oid = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
    return entry


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    entry = _entry(name, data)
    told: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": entry["oid"]}
    if "lfs" in entry:
        told["lfs"] = {"sha256": entry["lfs"]["oid"], "size": len(data), "pointerSize": 134}
    return told


@contextmanager
def hub_for_writing() -> Iterator[Hub]:
    """The server, in threads of this process, until the context ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
