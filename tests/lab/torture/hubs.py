"""Servers that lie: what comes is right or refused, and an honest one is right with what is kept.

Each try asks a server of a drawn kind with a drawn fault, and then an honest one, with one folder
of downloads and one warehouse. Both are processes of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from tests.lab.torture import child, judge
from tests.lab.torture.tally import Outcome, Problem
from tests.remote.servers import (
    Fault,
    FolderServer,
    HubServer,
    S3FolderServer,
    Server,
    s3_environment,
)

_SHORT, _LONG = 6, 400
_HANGS_S = 60.0
_KINDS = ("hub", "mirror", "web", "s3")
#: Verbs of a try, each after those before it; `{base}` and `{expert}` are addresses.
_VERBS: dict[str, tuple[tuple[str, ...], ...]] = {
    "land": (("land", "{expert}", "--name", "x"),),
    "analyze": (
        ("register", "{base}", "--name", "b"),
        ("register", "{expert}", "--name", "x"),
        ("analyze", "x", "--base", "b"),
    ),
    "merge": (("merge", "{recipe}", "--out", "{out}"),),
}
_FAULTS = (
    *("lie", "lie", "lie", "cut", "byte", "other", "whole", "gzip", "tag", "total", "digits"),
    *("stall", "drip", "redirect", "404", "429", "503", "weak"),
)
_WISHES = ("0", "²", "9" * 5000, "-1", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 99 Oct 9999 1:1:1")
_FILES = (".safetensors", ".json", "")
#: What clouds tell their machines; a port where nobody answers, since buckets' client goes there.
_INSIDE, _CLOSED = "http://169.254.169.254/latest", "http://127.0.0.1:9/"


@dataclass(frozen=True)
class Try:
    """A kind of server, its fault, where and how often it has it, and what is asked of it."""

    kind: str
    fault: str
    files: str
    every: int
    method: str
    wish: str
    verb: str

    def __str__(self) -> str:
        wish = f", wishes {self.wish[:12]}" if self.fault in ("429", "503") else ""
        return (
            f"{self.verb} from a {self.kind}, {self.fault} at each {self.every}. {self.method} of "
            f"*{self.files}{wish}"
        )


class Hubs:
    """The campaign."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._short = world, short
        self._served = folder / "served"
        self._served.mkdir(parents=True)
        (self._served / "org").symlink_to(world)
        for path in world.glob("*/*"):  # as files are that nobody writes to at the moment
            os.utime(path, (10**9, 10**9))
        recipe, out = folder / "r.yml", folder / "local"
        recipe.write_text(_recipe(str(world / "base"), str(world / "expert_00")))
        args = ["merge", str(recipe), "--out", str(out), "--home", str(folder / "w")]
        done = child.run(args, folder / "logs")
        assert done.code == 0, done.err
        self._merged = _files(out)

    def tries(self, seed: int) -> Iterator[Try]:
        """Drawn ones; every fault comes early."""
        draw = Random(seed)
        faults = draw.sample(_FAULTS, len(_FAULTS))
        for number in range(_SHORT if self._short else _LONG):
            fault = faults[number % len(faults)]
            kind = draw.choice(_KINDS[:2] if fault == "lie" else _KINDS)
            yield Try(
                kind,
                fault,
                draw.choice(_FILES),
                draw.choice((1, 1, 2, 3)),
                draw.choice(("GET", "GET", "GET", "HEAD", "")),
                draw.choice(_WISHES),
                draw.choice(tuple(_VERBS)),
            )

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Ask the server with the fault, then an honest one, and look at what is there."""
        server = self._server(one)
        honest = self._server(one) if one.kind == "mirror" else server
        problems: list[Problem] = []
        with _running(server, one):
            codes = self._ask(one, server, folder, problems, patience_s=1.0)
        refused = any(codes)
        problems += self._look(one, folder, f"{one}", right=not refused)
        with _running(honest, None):
            codes = self._ask(one, honest, folder, problems)
        if any(codes):
            told = (folder / "logs" / "err").read_text()[-700:]
            problems.append(Problem("lost", str(one), f"the honest one ends with {codes}: {told}"))
        problems += self._look(one, folder, f"{one}, then honest", right=not any(codes))
        for made in (server, honest):
            made.server_close()
        return Outcome.of(f"{one.kind}, {'refused' if refused else 'right'}", problems)

    def _server(self, one: Try) -> Server:
        if one.kind in ("hub", "mirror"):
            return HubServer(self._served)
        if one.kind == "s3":
            return S3FolderServer(self._served)
        return FolderServer(self._served, "weak" if one.fault == "weak" else "etag")

    def _ask(
        self,
        one: Try,
        server: Server,
        folder: Path,
        problems: list[Problem],
        patience_s: float = 60.0,
    ) -> list[int]:
        place = {"hub": "hf://org", "mirror": "hf://org", "s3": "s3://box/org"}
        at = place.get(one.kind, f"{server.url}/org")
        recipe, out = folder / "r.yml", folder / "out"
        recipe.write_text(_recipe(f"{at}/base", f"{at}/expert_00"))
        shutil.rmtree(out, ignore_errors=True)
        words = {"base": f"{at}/base", "expert": f"{at}/expert_00", "recipe": recipe, "out": out}
        codes: list[int] = []
        for args in _VERBS[one.verb]:
            if any(codes):
                break
            filled = [a.format(**words) for a in args]
            done = child.run(
                [*filled, "--home", str(folder / "w")],
                folder / "logs",
                before=partial(_environment, server.url, folder, patience_s),
                hangs_s=_HANGS_S,
            )
            problems += judge.ending(done, f"{one}, {args[0]}")
            codes.append(done.code)
        return codes

    def _look(self, one: Try, folder: Path, where: str, *, right: bool) -> list[Problem]:
        """What is wrong with what the verb left, which is the right thing or nothing."""
        wanted, found = None, None
        if one.verb == "land":
            wanted, found = _files(self._world / "expert_00"), _files(folder / "w" / "inbox" / "x")
        elif one.verb == "merge":
            wanted, found = self._merged, _files(folder / "out")
        if wanted is not None and found != (wanted if right else {}):
            differing = sorted(n for n in wanted if found and found.get(n) != wanted[n])
            return [Problem("wrong", where, f"{differing or sorted(found or ())} is not as it was")]
        left = [p.name for p in (folder / "w" / "inbox").glob(".*")]
        return [Problem("wrong", where, f"left in the inbox: {left}")] if left else []


def _recipe(base: str, expert: str) -> str:
    return (
        f"merge_method: ties\nbase_model: {base}\nmodels:\n  - model: {expert}\n"
        "    parameters: {weight: 0.7, density: 0.4}\ndtype: bfloat16\n"
    )


def _files(folder: Path) -> dict[str, bytes]:
    """Weights, config and tokenizer: what has no name of a place in it."""
    found = sorted(folder.glob("*")) if folder.is_dir() else []
    return {p.name: p.read_bytes() for p in found if p.name.startswith(("model", "token", "conf"))}


def _environment(url: str, folder: Path, patience_s: float) -> None:
    """Let the child ask this server, wait for milliseconds, and keep what comes in the folder."""
    from huggingface_hub import constants

    from mergepipe_pipeline.remote import bucket, fetch

    constants.HF_HUB_OFFLINE = False
    os.environ.pop("HF_HUB_OFFLINE", None)
    os.environ |= s3_environment(url) | {
        "HF_ENDPOINT": url,
        "HF_HUB_CACHE": str(folder / "cache"),
        "MERGEPIPE_DOWNLOADS": str(folder / "downloads"),
    }
    fetch.PAUSE_S, fetch.PATIENCE_S = 0.002, patience_s
    vars(bucket)["TIMEOUT_S"] = 10.0


@contextmanager
def _running(server: Server, one: Try | None) -> Iterator[None]:
    """The server in a process, with the fault of a try or none."""
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            _break(server, one)
            # A worker that is stopped at the campaign's end leaves no server behind.
            server.service_actions = lambda: None if os.getppid() == parent else os._exit(0)  # type: ignore[method-assign]
            server.serve_forever(0.05)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _break(server: Server, one: Try | None) -> None:
    if one is None:
        return
    server.fault, server.retry_after, server.stall_s = _fault(one), one.wish, 0.1
    if one.fault == "drip":
        server.drip_s = 0.1


def _fault(one: Try) -> Callable[[str, str, int], Fault]:
    def fault(method: str, path: str, number: int) -> Fault:
        name = path.partition("?")[0]
        if one.fault in ("drip", "weak") or not name.endswith(one.files):
            return None
        if one.method not in ("", method) or number % one.every:
            return None
        if one.fault == "redirect":
            return _CLOSED if one.kind == "s3" else _INSIDE
        return int(one.fault) if one.fault.isdecimal() else one.fault

    return fault
