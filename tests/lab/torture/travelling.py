"""Packs and snapshots of strangers in a bucket: refused by name, or taken and right.

Each try changes one thing of a sound one before it is sealed, and lets it come into a warehouse. No
command may end by a defect or take much memory, and the warehouse is as sound as it was.
"""

from __future__ import annotations

import atexit
import json
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import quote
from xml.etree import ElementTree

from mergepipe_pipeline.digest import SEAL_KEY, digest_json, sha256_hex, unseal
from tests.lab.torture import child, judge
from tests.lab.torture.packed import Files, Forger, each, odd_leaf, sealed
from tests.lab.torture.tally import Outcome, Problem
from tests.lab.torture.world import copy_place

_SHORT, _LONG = 6, 700
#: Bytes that a command may have beside what the warmed-up process has.
_MOST_NBYTES = 700 << 20
_SERVER = """
import sys
from tests.remote.writing.watched_s3 import watched_s3
with watched_s3() as s3:
    s3.make("travel")
    print(s3.endpoint, flush=True)
    sys.stdin.read()
"""
#: The server compares no signatures, but wants to see one.
_SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=user/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0",
    "Content-Type": "application/octet-stream",
}
_SNAPSHOTS = ("manifest", "provenance", "ref", "object", "side")


@dataclass(frozen=True)
class Try:
    """One pack or snapshot: what of it is changed, and the number of the draw."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"travelling {self.kind} {self.number}"


class Travelling:
    """The campaign, with a server of S3 in a process of its own."""

    def __init__(self, world: Path, folder: Path, *, short: bool) -> None:
        self._world, self._count = world, _SHORT if short else _LONG
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        atexit.register(server.kill)
        assert server.stdout is not None
        self._endpoint = server.stdout.readline().decode().strip()
        here = folder / "here"
        here.mkdir(parents=True)
        for args in (
            ("register", str(world / "base"), "--name", "base"),
            ("register", str(world / "expert_00"), "--name", "expert", "--base", "base"),
            ("pack", "expert"),
            ("push", "--pack", "expert", "s3://travel/pack"),
            ("merge", str(world / "full.yml"), "--publish"),
        ):
            self._sound(here, *args, bucket="s3://travel/mirror" if args[0] == "merge" else "")
        files = self._get("pack/packs/")
        (self._expert,) = {name.partition("/")[0] for name in files}
        self._pack = {n.removeprefix(f"{self._expert}/"): d for n, d in files.items()}
        self._mirror = self._get("mirror/")
        self._there = folder / "there"
        self._there.mkdir()
        self._sound(self._there, "register", str(world / "base"), "--name", "base")
        self._sound(self._there, "merge", str(self._recipe(folder, str(world / "expert_00"))))
        self._layers = _layers_in(self._there)

    def tries(self, seed: int) -> Iterator[Try]:
        """Packs, and a snapshot after every second one."""
        draw = Random(seed)
        for count, (kind, number) in enumerate(each(lambda: draw.randrange(1 << 40), self._count)):
            yield Try(kind, number)
            if count % 2:
                yield Try(_SNAPSHOTS[count // 2 % len(_SNAPSHOTS)], draw.randrange(1 << 40))

    def judge(self, one: Try, folder: Path) -> Outcome:
        """Let it come; then check the warehouse, and use what came."""
        place, prefix = folder / "place", f"try-{one.kind.replace(' ', '-')}-{one.number}"
        copy_place(self._there, place)
        if one.kind in _SNAPSHOTS:
            files, wanted = self._snapshot(one.kind, Random(one.number))
            verbs = [["pull", wanted, "--from", f"s3://travel/{prefix}"]]
        else:
            pack_id, files = Forger(self._pack, Random(one.number)).files(one.kind)
            files = {f"packs/{pack_id}/{name}": data for name, data in files.items()}
            verbs = [["pull-pack", f"s3://travel/{prefix}", "--json"]]
        for name, data in files.items():
            with suppress(OSError):  # a name that no server takes
                self._put(f"{prefix}/{name}", data)
        done = self._run(place, *verbs[0])
        problems = judge.ending(done, str(one))
        if one.kind == "sound" and done.code:
            problems.append(Problem("wrong", str(one), f"refused: {done.err[-600:]}"))
        kind = f"{one.kind}, {'taken' if done.code == 0 else 'refused'}"
        if done.code == 0:
            problems += self._used(one, place, done.out, prefix)
        for verb in (["verify", "--all"], ["ls"], ["sql", "from snapshot_inputs"]):
            after = self._run(place, *verb)
            if after.code:  # a finding of `verify` is no error
                told = f"exit {after.code}: {after.out[-600:]}{after.err[-600:]}"
                problems.append(Problem("wrong", f"{one}, {verb[0]}", told))
        return Outcome.of(kind, problems)

    def _used(self, one: Try, place: Path, told: str, prefix: str) -> list[Problem]:
        """What comes of using what was taken: a merge has the layers that it has without it."""
        problems = []
        verbs = [["push", "full", f"s3://travel/{prefix}-again"], ["publish", "full", "--ref", "x"]]
        if one.kind not in _SNAPSHOTS:
            names = [pack["name"] for pack in json.loads(told)]
            recipe = self._recipe(place, names[0])
            verbs = [["merge", str(recipe)], ["unpack", names[0], "--to", str(place / "out")]]
        elif one.kind != "ref":
            ids = sorted(p.name for p in (place / "w" / "snapshots").iterdir())
            verbs = [[*(i if i != "full" else ids[-1] for i in verb)] for verb in verbs]
            verbs += [["explain", i] for i in ids] + [["diff", *ids]] * (len(ids) == 2)
        for verb in verbs:
            done = self._run(place, *verb)
            problems += judge.ending(done, f"{one}, {verb[0]}")
            if verb[0] == "merge" and done.code == 0 and _layers_in(place) != self._layers:
                problems.append(Problem("wrong", str(one), "a merge has other layers"))
        return problems

    def _snapshot(self, kind: str, draw: Random) -> tuple[Files, str]:
        """The files of a bucket with a snapshot of which one thing is wrong, and its id or ref."""
        files = dict(self._mirror)
        (ref,) = (n for n in files if n.startswith("refs/"))
        names = {n.rpartition("/")[2]: n for n in files if n.startswith("snapshots/")}
        manifest = unseal(files.pop(names["manifest.json"]), "")
        sides = {n: files.pop(place) for n, place in names.items() if n != "manifest.json"}
        if kind == "manifest":
            odd_leaf(draw, manifest)
        elif kind == "provenance":
            value = unseal(sides["provenance.json"], "")
            odd_leaf(draw, value)
            sides["provenance.json"] = sealed(value)
        elif kind == "ref":
            value = unseal(files[ref], "")
            odd_leaf(draw, value)
            files[ref] = sealed(value)
            wanted = "full"
        elif kind == "side":
            side = draw.choice(manifest["side_files"])
            data = sides[side["file"]]
            data = data[: draw.randrange(len(data))] + draw.randbytes(draw.randint(0, 40))
            sides[side["file"]] = data
            side["sha256"], side["nbytes"] = sha256_hex(data), len(data)
        else:
            shard = draw.choice(manifest["shards"])
            flipped = bytearray(files[f"objects/{shard['sha256'][:2]}/{shard['sha256']}"])
            at = draw.choice((draw.randrange(8), draw.randrange(200), draw.randrange(len(flipped))))
            flipped[at] ^= 1 << draw.randrange(8)
            data = bytes(flipped)
            shard["sha256"], shard["nbytes"] = sha256_hex(data), len(data)
            files[f"objects/{shard['sha256'][:2]}/{shard['sha256']}"] = data
        try:
            snapshot_id = digest_json({k: v for k, v in manifest.items() if k != SEAL_KEY})[:32]
        except (ValueError, RecursionError):
            snapshot_id = "0" * 32
        folder = f"snapshots/{snapshot_id}"
        files |= {f"{folder}/{name}": side for name, side in sides.items()}
        files[f"{folder}/manifest.json"] = sealed(manifest)
        return files, wanted if kind == "ref" else snapshot_id

    def _recipe(self, folder: Path, expert: str) -> Path:
        path = folder / "r.yml"
        path.write_text(
            f"merge_method: ties\nbase_model: base\nmodels: [{{model: {json.dumps(expert)}, "
            "parameters: {weight: 0.7}}]\nparameters: {density: 0.3}\ndtype: bfloat16\n"
        )
        return path

    def _sound(self, place: Path, *args: str, bucket: str = "") -> None:
        done = self._run(place, *args, bucket=bucket)
        assert done.code == 0, done.err

    def _run(self, place: Path, *args: str, bucket: str = "") -> child.Done:
        environment = {
            "AWS_ENDPOINT_URL": self._endpoint,
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "MERGEPIPE_BUCKET": bucket,
        }

        def before() -> None:
            import os

            os.environ |= {key: value for key, value in environment.items() if value}
            used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_DATA, (used + _MOST_NBYTES,) * 2)

        home = str(place / "w")
        done = child.run([*args, "--home", home], place / "logs", before=before)
        if "no more memory" in done.err:
            return child.Done(70, done.out, f"Traceback (most recent call last)\n{done.err}",
                              done.hung, done.seconds)  # fmt: skip
        return done

    def _get(self, prefix: str) -> Files:
        url = f"{self._endpoint}/travel?list-type=2&prefix={prefix}"
        listing = ElementTree.fromstring(urllib.request.urlopen(url).read())
        keys = [e.text or "" for e in listing.iter() if e.tag.endswith("}Key")]
        return {key.removeprefix(prefix): self._asked("GET", key) for key in keys}

    def _put(self, key: str, data: bytes) -> None:
        self._asked("PUT", key, data)

    def _asked(self, method: str, key: str, data: bytes | None = None) -> bytes:
        url = f"{self._endpoint}/travel/{quote(key)}"
        request = urllib.request.Request(url, data, _SIGNED, method=method)
        with urllib.request.urlopen(request) as answer:
            got: bytes = answer.read()
            return got


def _layers_in(place: Path) -> set[str]:
    """The digests of all merged layers of a warehouse."""
    return {path.name for path in (place / "w" / "objects").glob("*/*")}
