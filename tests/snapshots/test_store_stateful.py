"""Commit, publish, roll back, collect and crash in any order: a dict says what must be true."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mergepipe_pipeline.errors import NotFoundError
from mergepipe_pipeline.snapshots.collection import collect
from mergepipe_pipeline.snapshots.commit import verify_snapshot
from mergepipe_pipeline.snapshots.find import list_snapshots
from mergepipe_pipeline.storage import atomic
from tests.snapshots.tiny import Crash, Store, crash_at
from tests.support.laws import examples

CONTENTS = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(
    lambda c: tuple(sorted(c))
)
NAMES = st.sampled_from(["prod", "dev"])


class StoreMachine(RuleBasedStateMachine):
    """`ids`: snapshots that must exist by content; `history`: what each ref's versions name."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.store = Store(self.root)
        self.ids: dict[tuple[int, ...], str] = {}
        self.history: dict[str, list[str]] = {}
        self.runs = 0

    @rule(contents=CONTENTS)
    def commit(self, contents: tuple[int, ...]) -> None:
        self.runs += 1
        made = self.store.commit(contents, self.runs).snapshot_id
        assert self.ids.setdefault(contents, made) == made

    @rule(contents=CONTENTS, step=st.integers(0, 14))
    def commit_and_crash(self, contents: tuple[int, ...], step: int) -> None:
        self.runs += 1
        crash_at(step)
        try:
            self.ids[contents] = self.store.commit(contents, self.runs).snapshot_id
        except Crash:
            pass
        finally:
            atomic.crash_hook = None

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), name=NAMES, crash=st.booleans())
    def publish(self, data: st.DataObject, name: str, crash: bool) -> None:
        wanted = data.draw(st.sampled_from(sorted(self.ids.values())))
        versions = self.history.setdefault(name, [])
        if crash:
            crash_at(1)
        try:
            ref = self.store.refs.publish(name, wanted, "", expected=len(versions))
        except Crash:
            return
        finally:
            atomic.crash_hook = None
        if versions[-1:] != [wanted]:
            versions.append(wanted)
        assert ref.number == len(versions)

    @rule(name=NAMES)
    def roll_back(self, name: str) -> None:
        versions = self.history.get(name, [])
        older = [v for v in versions if v != versions[-1]]
        try:
            ref = self.store.refs.rollback(name, None, "back")
        except NotFoundError:
            assert not older
            return
        assert ref.snapshot_id == older[-1]
        versions.append(older[-1])

    @rule()
    def collect(self) -> None:
        collect(
            self.store.objects,
            self.store.snapshots,
            self.store.staging,
            older_than_s=0.0,
            dry_run=False,
        )
        needed = {c for contents in self.ids for c in contents}
        assert len(self.store.objects.all_objects()) == len(needed)
        assert len(self.store.objects.all_actions()) == len(needed)

    @invariant()
    def all_snapshots_are_there_and_whole(self) -> None:
        found = list_snapshots(self.store.snapshots)
        assert {s.snapshot_id for s in found} == set(self.ids.values())
        for snapshot in found:
            verify_snapshot(Path(snapshot.path))

    @invariant()
    def refs_name_what_was_published(self) -> None:
        published = {name: v for name, v in self.history.items() if v}
        assert self.store.refs.names() == sorted(published)
        for name, versions in published.items():
            assert [r.snapshot_id for r in self.store.refs.history(name)] == versions

    def teardown(self) -> None:
        atomic.crash_hook = None
        shutil.rmtree(self.root)


StoreMachine.TestCase.settings = settings(max_examples=examples(12), stateful_step_count=12)
TestStore = StoreMachine.TestCase
