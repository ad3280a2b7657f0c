"""The shell around the swap: gunicorn's arbiter, specialised to take snapshots, ask, act and log.

Decisions about workers are `server.rollout.next_action`'s, those about versions `server.swaps`'; this
file forks, signals, reaps and keeps the board. It computes nothing and starts no thread: forks follow.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from gunicorn import sock
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer

from server import events, listeners, metric_files
from server.board import Board, BoardFull
from server.children import tell, wait_for_any_child
from server.crew import Crew, Member
from server.device_context import DeviceContextMade, has_device_context
from server.devices import Devices
from server.events import emit
from server.fold import fold
from server.generation import Generation, MemoryUse
from server.memory import private_bytes
from server.preparation import Refusal, name_exit
from server.quarantine import Quarantine
from server.rollout import Action, Drain, GiveUp, Phase, Rollback, Spawn, next_action
from server.settings import Settings
from server.station import Station
from server.swaps import GaveUp, Swaps
from server.systemd import Notifier
from server.upgrade import start_new_master
from server.worker import FOR_WORKERS, WarmWorker
from weights.residency import memory_limit_bytes
from weights.store import Store

LOG = logging.getLogger("warmserve")

EXIT_NOTHING_TO_SERVE = 3  # gunicorn's own code for "a worker failed to boot"
LOOP_S = 1.0  # gunicorn's loop turns at least this often
KILL_GRACE_S = 2.0  # a draining worker ends by itself at its own deadline; this is for one that cannot


class WarmArbiter(Arbiter):  # type: ignore[misc]
    """gunicorn's master process over generations of mapped versions."""

    settings: Settings
    reexec_pid: int

    @classmethod
    def adopt(cls, arbiter: Any, settings: Settings) -> None:
        """Turn gunicorn's own Arbiter into this one, before it opens sockets or handles signals."""
        arbiter.__class__ = cls
        arbiter._begin(settings)

    def _begin(self, settings: Settings) -> None:
        self.settings = settings
        self.notifier = Notifier.take_from(os.environ)
        store = Store(settings.models)
        self.swaps = Swaps(store, Quarantine(settings.run_dir, store))
        self.crew = Crew()
        self.devices = Devices(settings.device)
        self.started = False  # some worker has been ready
        self.stopping = False
        self.answering = False  # a HUP for which the service manager waits
        self.LISTENERS = self._bind()
        self.board = Board.create(settings.run_dir)
        self.metrics = metric_files.create(settings.run_dir)
        self.unfolded = False  # some dead worker's counters are still in files of their own
        self._report(pid=os.getpid(), started_unix=time.time())
        emit(LOG, logging.INFO, events.ARBITER_STARTED, models=settings.models, workers=self.num_workers)

    def _bind(self) -> list[Any]:
        handed = listeners.handed_over(os.environ)
        self.systemd = handed.by_systemd
        data = listeners.bind_data(self.cfg, self.log, handed.data)
        admin = listeners.bind_admin(self.settings.admin_bind, self.cfg, self.log, handed.admin)
        return [*data, admin]

    # ---- the loop -------------------------------------------------------------------------------

    def manage_workers(self) -> None:
        """Take a snapshot, ask, act, until there is nothing to do but wait. gunicorn's loop calls this."""
        for step in (self._enforce_deadlines, self._decide, self._fold_metrics, self._report, self._notify):
            self._survive(step)

    def _survive(self, step: Callable[[], None]) -> None:
        """Do *step*; its failure is logged. gunicorn's master would end with it, and the service too."""
        try:
            step()
        except GaveUp as gave_up:
            self._give_up(gave_up)
        except Exception:
            emit(LOG, logging.ERROR, events.LOOP_FAILED, step=getattr(step, "__name__", ""), exc_info=True)

    def _decide(self) -> None:
        now = time.monotonic()
        self.crew.forget_failures(now)
        self.swaps.begin(
            measure=self._memory, timeout_s=self.settings.boot_timeout_s, objection=self._objection()
        )
        while self.swaps.target and (action := self._next_action()) is not None:
            if isinstance(action, Spawn) and now < self.crew.hold_until:
                break
            self._obey(action)
            now = time.monotonic()
        self._settle(now)

    def _next_action(self) -> Action | None:
        return next_action(
            self.crew.views(replace_worn=self._objection() is None),
            target=self.swaps.target,
            size=self.num_workers,
            surge=self._surge(),
            proven=self.swaps.proven,
        )

    def _surge(self) -> int:
        """Return SURGE, or what of it the device has room for; a single worker is not left without one."""
        if self.num_workers == 1 and not self.settings.allow_gap:
            return self.settings.surge
        members, target = self.crew.members.values(), self.swaps.target
        return self.devices.surge(self.settings.surge, members, target=target, workers=self.num_workers)

    def _obey(self, action: Action) -> None:
        match action:
            case Spawn(generation):
                self._spawn(self.swaps.generations[generation])
            case Drain(pid):
                self._drain(self.crew.members[pid])
            case Rollback(reason) | GiveUp(reason):
                failed = self.swaps.target
                detail = next(f.detail for f in self.crew.failures if f.generation == failed)
                self.crew.forget_generation(failed)
                self.swaps.abandon(Refusal(reason, detail))

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        if self.swaps.preparation is not None:
            self.swaps.preparation.expire(now)
        for member in self.crew.members.values():
            phase = member.phase()
            if phase is Phase.DRAINING and not member.draining:  # somebody else told it to leave
                self._give_notice(member)
            beats = phase in (Phase.READY, Phase.DEFUNCT)
            late = self._is_stuck(member, now) if beats else now > member.deadline
            if late and not member.overdue:
                member.overdue = True
                emit(LOG, logging.WARNING, events.WORKER_OVERDUE, worker=member.pid,
                     generation=member.generation, phase=phase.value)  # fmt: skip
                tell(member.pid, signal.SIGKILL)

    def _is_stuck(self, member: Member, now: float) -> bool:
        """Whether the worker's loop has not turned for gunicorn's `timeout`."""
        beat = member.reported().get("beat", now)
        return bool(self.timeout) and now - float(str(beat)) > self.timeout

    def murder_workers(self) -> None:
        """Nothing: a worker has a deadline while it warms or drains, and its beat while it is ready."""

    def _settle(self, now: float) -> None:
        for member in self.crew.members.values():
            if member.phase() is not Phase.READY:
                continue
            if member.ready_since is None:
                member.ready_since = now
                self.started = True
            elif now - member.ready_since > self.settings.crash_window_s:
                self.crew.note_stable()
        self.swaps.settle(
            ready=self.crew.ready_count(self.swaps.target),
            size=self.num_workers,
            alive={m.generation for m in self.crew.members.values()},
        )

    def _objection(self) -> Refusal | None:
        """Return why no swap may begin at all, whatever the version."""
        if self.settings.surge == 0 and self.num_workers == 1 and not self.settings.allow_gap:
            return Refusal("gap_not_allowed", "SURGE=0 with one worker leaves a gap; ALLOW_GAP=1 accepts it")
        return None

    def _give_up(self, gave_up: GaveUp) -> None:
        emit(LOG, logging.CRITICAL, events.ARBITER_GAVE_UP, **gave_up.refusal.__dict__)
        self._report(failure=str(gave_up))
        raise HaltServer(str(gave_up), EXIT_NOTHING_TO_SERVE) from None

    def _memory(self) -> MemoryUse:
        mapped = {k: size for g in self.swaps.generations.values() for k, size in g.files.items()}
        limit = self.settings.memory_limit_bytes or memory_limit_bytes()
        at_most = self.num_workers + self.settings.surge
        return MemoryUse(limit, private_bytes(os.getpid(), self.crew.members, at_most), mapped)

    # ---- processes ------------------------------------------------------------------------------

    def spawn_workers(self) -> None:
        """Nothing: gunicorn's own count-and-spawn is `manage_workers` here."""

    def _spawn(self, generation: Generation) -> None:
        if has_device_context():
            self._refuse_to_fork(DeviceContextMade())
            return
        try:
            slot_number = self.board.free_slot(self.crew.slots())
        except BoardFull as error:
            self._could_not_fork("board_full", error)
            return
        slot = self.board.slots[slot_number]
        others = tuple(g for g in self.swaps.generations.values() if g is not generation)
        members = self.crew.members.values()
        place = self.devices.place(members, target=generation.number, workers=self.num_workers)
        station = Station(generation, others, self.settings, self.board, slot, self.num_workers, place)
        self.worker_class = functools.partial(WarmWorker, station=station)
        now = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKERS)
        try:
            pid = self.spawn_worker()
        except OSError as error:
            self._could_not_fork("fork_failed", error)
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_WORKERS)
        self.crew.members[pid] = Member(
            pid, generation.number, generation.version.name, slot_number, slot,
            now + self.settings.boot_timeout_s, place.uuid,
        )  # fmt: skip
        emit(LOG, logging.INFO, events.WORKER_SPAWNED, worker=pid, generation=generation.number,
             version=generation.version.name)  # fmt: skip

    def _refuse_to_fork(self, error: DeviceContextMade) -> None:
        if not self.started:
            raise GaveUp(Refusal(error.reason, str(error)))
        self._could_not_fork(error.reason, error)

    def _could_not_fork(self, reason: str, error: Exception) -> None:
        """Wait a moment before the next try: the machine has no room, which is no version's fault."""
        self.crew.hold(time.monotonic())
        emit(LOG, logging.ERROR, events.WORKER_FAILED, reason=reason, detail=str(error))

    def _give_notice(self, member: Member) -> None:
        member.draining = True
        member.deadline = time.monotonic() + self.settings.drain_timeout_s + KILL_GRACE_S
        emit(LOG, logging.INFO, events.WORKER_DRAINING, worker=member.pid, generation=member.generation)

    def _drain(self, member: Member) -> None:
        phase = member.phase()
        if (reason := member.worn()) and member.generation == self.swaps.target:
            self.crew.count_restart(reason)
        self._give_notice(member)
        # One that still warms serves nobody: there is nothing to finish.
        tell(member.pid, signal.SIGKILL if phase is Phase.WARMING else signal.SIGTERM)
        if phase is Phase.DEFUNCT:
            self._note_death(member, reason)

    def reap_workers(self) -> None:
        """Collect every ended child. A worker's end never ends the arbiter, whatever its exit code."""
        while (ended := wait_for_any_child()) is not None:
            pid, status = ended
            if pid == self.reexec_pid:
                self.reexec_pid = 0
            elif self.swaps.preparation is not None and pid == self.swaps.preparation.pid:
                self._survive(functools.partial(self.swaps.checked, status))
            elif pid in self.crew.members:
                member, code = self.crew.members.pop(pid), os.waitstatus_to_exitcode(status)
                self._survive(functools.partial(self._bury, member, code))

    def _bury(self, member: Member, code: int) -> None:
        worker = self.WORKERS.pop(member.pid, None)
        if worker is not None:
            worker.tmp.close()
            self.cfg.child_exit(self, worker)
        phase, reported = member.phase(), member.reported()
        member.slot.clear()
        self.unfolded = True
        who: dict[str, Any] = {"worker": member.pid, "generation": member.generation}
        who["version"] = member.version
        if phase is Phase.DRAINING:
            emit(LOG, logging.INFO, events.WORKER_DRAINED, **who, exit=name_exit(code))
        elif phase in (Phase.READY, Phase.DEFUNCT):
            emit(LOG, logging.ERROR, events.WORKER_DIED, **who, exit=name_exit(code))
            self.crew.count_restart(name_exit(code))
            self._note_death(member, name_exit(code))
        else:
            reason = str(reported.get("reason") or ("boot_timeout" if member.overdue else name_exit(code)))
            detail = str(reported.get("detail") or f"a worker ended before it was ready ({name_exit(code)})")
            self.crew.add_failure(member.pid, member.generation, reason, detail)
            self.crew.count_restart(reason)
            emit(LOG, logging.ERROR, events.WORKER_FAILED, **who, reason=reason, detail=detail)

    def _note_death(self, member: Member, how: str) -> None:
        """One death under traffic is replaced at once; too many within the window are the version's fault."""
        window_s = self.settings.crash_window_s
        if self.crew.note_death(member.generation, time.monotonic(), window_s) < self.settings.crash_limit:
            return
        detail = f"{self.settings.crash_limit} workers broke or died within {window_s:g} s, the last: {how}"
        if member.generation == self.swaps.target and not self.swaps.retreat(
            Refusal("crashing", detail), measure=self._memory, timeout_s=self.settings.boot_timeout_s
        ):
            # Nowhere to go: keep trying, more and more slowly.
            self.crew.add_failure(member.pid, member.generation, "crashing", detail)

    # ---- signals --------------------------------------------------------------------------------

    def reload(self) -> None:
        """HUP: read the configuration again, then move to the current version, rolling."""
        self.notifier.reloading()
        self.answering = True
        try:
            self._reread_settings()
        except (Exception, SystemExit) as error:
            refusal = Refusal.of(error, "settings_refused")
            emit(LOG, logging.ERROR, events.SETTINGS_REFUSED, detail=refusal.detail)
            self.swaps.refuse_request(refusal)
        else:
            self.swaps.request()

    def _reread_settings(self) -> None:
        """Read gunicorn.conf.py and WARMSERVE_* again; on any mistake the old ones stay.

        Raises:
            SettingsError, SystemExit: as the configuration file raises them.
        """
        before = self.app.cfg
        try:
            settings = Settings.load()
            self.app.reload()
        except (Exception, SystemExit):
            self.app.cfg = before
            raise
        for name in settings.changed_needing_restart(self.settings):
            emit(LOG, logging.WARNING, events.SETTING_NEEDS_RESTART, setting=name)
        self.settings = settings.with_restart_values_of(self.settings)
        self.setup(self.app)
        self.log.reopen_files()

    def stop(self, graceful: bool = True) -> None:
        """Stop as gunicorn does, and end what is being prepared."""
        self.notifier.stopping()
        if self.swaps.preparation is not None:
            self.swaps.preparation.cancel()
            self.swaps.preparation = None
        for member in self.crew.members.values():
            member.draining = True
        self.stopping = True  # on the board: leaving workers answer what is queued, nobody else will
        self._survive(self._report)
        self._close_listeners()
        super().stop(graceful)

    def _close_listeners(self) -> None:
        """Close and unlink as gunicorn does, also where somebody has removed a socket's file."""
        mine = self.reexec_pid == self.master_pid == 0 and not self.systemd and not self.cfg.reuse_port
        for listener in self.LISTENERS:
            try:
                sock.close_sockets([listener], mine)
            except OSError as error:
                LOG.warning("listener %s: %s", listener, error)
        self.LISTENERS = []

    def reexec(self) -> None:
        """USR2: start a new master beside this one, on the same sockets."""
        if self.reexec_pid or self.master_pid:
            self.log.warning("USR2 signal ignored: another master is there already")
            return
        self.reexec_pid = start_new_master(self)

    # ---- what others see ------------------------------------------------------------------------

    def _notify(self) -> None:
        """Tell the service manager what it waits for: the first warm worker, the end of a reload."""
        now = time.monotonic()
        self.notifier.beat(now)
        if not self.started:
            self.notifier.extend(10 * LOOP_S)
        elif not self.notifier.said_ready:
            self.notifier.ready("serving")
        elif self.answering and self.swaps.last and self.swaps.last["covers"] >= self.swaps.requests:
            self.answering = False
            self.notifier.ready(f"serving {self.swaps.name_of(self.swaps.target)}")

    def _report(self, **fields: Any) -> None:
        self.board.arbiter.update(
            size=self.num_workers, started=self.started, stopping=self.stopping,
            restarts=self.crew.restarts, **self.swaps.facts(), **fields,
        )  # fmt: skip

    def _fold_metrics(self) -> None:
        if not self.unfolded:
            return
        try:
            self.unfolded = not fold(self.metrics, self.crew.members.keys())
        except Exception as error:
            # Nobody stops serving over a metric: the files stay as they are until the next burial.
            self.unfolded = False
            emit(LOG, logging.WARNING, events.METRICS_NOT_FOLDED, reason=type(error).__name__,
                 detail=str(error))  # fmt: skip
