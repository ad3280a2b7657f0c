"""Random warm-ups, failures, exits, swaps and scaling: the promises of `next_action` after every step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.rollout import Drain, GiveUp, Phase, Rollback, Spawn, WorkerView, next_action


class Fleet(RuleBasedStateMachine):
    """An arbiter in miniature: it obeys at once and keeps what `server.arbiter` keeps."""

    @initialize(size=st.integers(1, 4), surge=st.integers(0, 2))
    def boot(self, size: int, surge: int) -> None:
        self.size, self.surge = size, surge
        self.pid = 0
        self.workers: dict[int, WorkerView] = {}
        self.generation = self.target = 1
        self.way_back: int | None = None
        self.proven: set[int] = set()
        self.peak = size + surge
        self.obey()

    def ready(self) -> int:
        return sum(w.phase is Phase.READY for w in self.workers.values())

    def alive(self) -> int:
        return sum(w.phase is not Phase.FAILED for w in self.workers.values())

    def obey(self) -> None:
        for _ in range(100):
            before = self.ready()
            action = next_action(
                list(self.workers.values()),
                target=self.target,
                size=self.size,
                surge=self.surge,
                proven=self.target in self.proven,
            )
            if action is None:
                self.note_settled()
                return
            self.act(action, before)
        raise AssertionError("it never comes to rest")

    def act(self, action: object, before: int) -> None:
        if isinstance(action, Spawn):
            assert action.generation == self.target
            assert self.alive() < self.size + self.surge, "more in memory than size + surge"
            self.pid += 1
            self.workers[self.pid] = WorkerView(self.pid, action.generation, Phase.WARMING)
        elif isinstance(action, Drain):
            worker = self.workers[action.pid]
            assert worker.phase in (Phase.WARMING, Phase.READY, Phase.DEFUNCT)
            if worker.phase is Phase.DEFUNCT:
                self.workers[action.pid] = replace(worker, phase=Phase.DRAINING)
            elif worker.phase is Phase.READY:
                floor = self.size if self.surge else self.size - 1
                assert before - 1 >= floor, "drained below what has to stay ready"
                self.workers[action.pid] = replace(worker, phase=Phase.DRAINING)
            else:
                del self.workers[action.pid]
        elif isinstance(action, Rollback):
            assert self.way_back is not None, "a rollback of a rollback"
            self.abandon()
        elif isinstance(action, GiveUp):
            assert not self.ready(), "gave up while something served"
            if self.way_back is None:
                self.generation += 1  # the next older version
                self.target = self.generation
                self.workers = {p: w for p, w in self.workers.items() if w.phase is not Phase.FAILED}
            else:
                self.abandon()

    def abandon(self) -> None:
        assert self.way_back is not None
        self.target, self.way_back = self.way_back, None
        self.workers = {p: w for p, w in self.workers.items() if w.phase is not Phase.FAILED}

    def note_settled(self) -> None:
        fresh = [w for w in self.workers.values() if w.generation == self.target]
        if len(fresh) == len(self.workers) and self.ready() >= self.size:
            self.way_back = None
            self.proven = {self.target}

    def pick(self, phase: Phase, data: st.DataObject) -> WorkerView | None:
        pids = sorted(p for p, w in self.workers.items() if w.phase is phase)
        return self.workers[data.draw(st.sampled_from(pids))] if pids else None

    @rule(data=st.data())
    def becomes_ready(self, data: st.DataObject) -> None:
        if worker := self.pick(Phase.WARMING, data):
            self.workers[worker.pid] = replace(worker, phase=Phase.READY)
            self.obey()

    @rule(data=st.data())
    def fails_to_warm(self, data: st.DataObject) -> None:
        if worker := self.pick(Phase.WARMING, data):
            self.workers[worker.pid] = replace(worker, phase=Phase.FAILED, reason="x")
            self.obey()

    @rule(data=st.data(), phase=st.sampled_from([Phase.READY, Phase.DRAINING]))
    def ends(self, data: st.DataObject, phase: Phase) -> None:
        if worker := self.pick(phase, data):
            del self.workers[worker.pid]
            self.obey()

    @rule(data=st.data())
    def wears_out(self, data: st.DataObject) -> None:
        if worker := self.pick(Phase.READY, data):
            self.workers[worker.pid] = replace(worker, worn=True)
            self.obey()

    @rule(data=st.data())
    def breaks(self, data: st.DataObject) -> None:
        if worker := self.pick(Phase.READY, data):
            self.workers[worker.pid] = replace(worker, phase=Phase.DEFUNCT)
            self.obey()

    @rule()
    def back_off_ends(self) -> None:
        self.workers = {p: w for p, w in self.workers.items() if w.phase is not Phase.FAILED}
        self.obey()

    @precondition(lambda self: self.way_back is None and self.target in self.proven)
    @rule()
    def swap(self) -> None:
        self.generation += 1
        self.way_back, self.target = self.target, self.generation
        self.obey()

    @rule(size=st.integers(1, 4))
    def scale(self, size: int) -> None:
        self.size = size
        self.peak = max(self.peak, size + self.surge)
        self.obey()

    @invariant()
    def never_more_in_memory_than_allowed(self) -> None:
        if hasattr(self, "workers"):
            assert self.alive() <= self.peak

    def teardown(self) -> None:
        """Left alone, with every warm-up succeeding, it settles on *size* ready workers of the target."""
        if not hasattr(self, "workers"):
            return
        for _ in range(60):
            self.workers = {
                p: replace(w, phase=Phase.READY) if w.phase is Phase.WARMING else w
                for p, w in self.workers.items()
                if w.phase not in (Phase.FAILED, Phase.DRAINING)
            }
            self.obey()
        settled = list(self.workers.values())
        assert [w.generation for w in settled] == [self.target] * self.size
        assert all(w.phase is Phase.READY and not w.worn for w in settled)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
