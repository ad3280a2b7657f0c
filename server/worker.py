"""A gunicorn thread worker that warms before it accepts, and accepts only when it can serve.

The main thread runs the event loop; a builder thread makes the pool; data requests and admin requests
have threads of their own, so a probe never waits behind a model. Connections are `server.intake`'s.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import signal
import sys
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

import torch
from gunicorn import util
from gunicorn.http.errors import NoMoreData
from gunicorn.workers.gthread import ThreadWorker

from server import events
from server.api.admin import create_admin_app
from server.api.batching import batch_limit
from server.api.exchange import Exchange, Served
from server.app import create_app
from server.claim import claim, pin
from server.connections import NEVER, Connection, has_left, reset
from server.data_queue import DataQueue
from server.device_memory import DeviceMemory
from server.errors import ResponseAborted
from server.events import emit
from server.fitness import STUCK_GRACE_S, Fitness
from server.intake import Intake
from server.keepalive import KeepAlive, Kept, is_spare
from server.memory import weights_outside
from server.metric_files import metrics_directory
from server.metrics import Instruments, made_for
from server.preparation import Refusal, die_with_parent
from server.rollout import Phase
from server.settings import bytes_of
from server.station import Station
from server.warmup import timed, warm_up
from weights.residency import memory_limit_bytes

if TYPE_CHECKING:
    from server.tracing import Tracing

LOG = logging.getLogger("warmserve")

BEAT_S = 0.5
SHED_CHECK_S = 0.02  # so often a worker without capacity looks at the queue, and one that is due for a moment
GATHER_S = 0.002  # and one that could take more into its next pass, which idle workers have not taken
MEMORY_EVERY_S = 5.0
ADMIN_THREADS = 4
LINGER_S = 2.0  # a draining worker's wait for a request on a connection it has accepted already
EXIT_WARMUP_FAILED = 1
# Told to a worker between its fork and its own handlers, these would be lost in the arbiter's.
FOR_WORKERS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
BOARD_TIERS = {"load": "load_ms", "inference": "warmup_ms", "keepalive": "keepalive_ms"}


class WarmWorker(ThreadWorker):  # type: ignore[misc]
    """One process: its pool, its warm-up, its connections."""

    _accepting: bool
    instruments: Instruments
    intake: Intake
    queue: DataQueue
    fitness: Fitness
    served_model: Served
    keep_alive: KeepAlive
    max_requests: int

    def __init__(self, *args: Any, station: Station) -> None:
        super().__init__(*args)
        self.station = station
        self.slot = station.slot
        self.generation = station.generation
        *self.data_listeners, self.admin_listener = self.sockets
        self.local = threading.local()
        self.ready = False
        self.served = 0
        # gunicorn would end the worker at its limit, before there is another: `Fitness` asks for one first.
        self.recycle_after = 0 if self.max_requests == sys.maxsize else self.max_requests
        self.max_requests = sys.maxsize
        self.farewell = 0  # queued connections still to be taken, once the whole service stops
        self.beat_due = self.memory_due = 0.0
        self.data_app: Any = None
        self.admin_app: Any = None
        self.tracing: Tracing | None = None

    # ---- birth ----------------------------------------------------------------------------------

    def init_process(self) -> None:
        """Become a worker: shed what belongs to the arbiter, then run gunicorn's start."""
        pin(self.station.place)
        for other in self.station.others:
            other.close()
        self.station.board.release_lock()
        self.slot.update(
            pid=os.getpid(), generation=self.generation.number, version=self.generation.version.name,
            model=self.generation.manifest.name, phase=Phase.WARMING.value, born=time.monotonic(),
            beat=time.monotonic(), pool_size=self.station.settings.pool_size, in_flight=0, served=0,
            device=self.station.place.name,
        )  # fmt: skip
        settings = self.station.settings
        self.fitness = Fitness(
            self.slot, self._wake_arbiter, generation=self.generation.number,
            recycle_after=self.recycle_after,
            memory_limit_bytes=bytes_of(settings.worker_memory_limit, memory_limit_bytes()),
            device=DeviceMemory.of(self.station.place, settings),
        )  # fmt: skip
        torch.set_num_threads(
            self.station.settings.torch_threads_for(self.station.workers, os.cpu_count() or 1)
        )
        self.admin_pool = futures.ThreadPoolExecutor(ADMIN_THREADS, thread_name_prefix="admin")
        super().init_process()

    def load_wsgi(self) -> None:
        """Make the admin application now; the data application comes with the pool."""
        # After gunicorn has changed the user, which makes the kernel forget it: finish and go with it.
        die_with_parent(self.ppid, signal.SIGTERM)
        self.admin_app = create_admin_app(self.station.settings, self.station.board)
        self.wsgi = self._dispatch

    def _build(self) -> None:
        """Build and warm the pool (builder thread); tell the main thread how it went."""
        try:
            app = self._warm_pool()
        except BaseException as error:  # also SystemExit: in a thread it would pass for nothing
            try:
                LOG.error("warm-up failed", exc_info=True)
                refusal = Refusal.of(error, "warmup_failed")
                self.slot.update(reason=refusal.reason, detail=refusal.detail)
            finally:
                os._exit(EXIT_WARMUP_FAILED)
        self.method_queue.defer(self._open_doors, app)

    def _warm_pool(self) -> Any:
        generation, settings = self.generation, self.station.settings
        self.instruments = made_for(
            generation.manifest.name, generation.version.name, metrics_directory(self.station.board)
        )
        with timed(functools.partial(self._note_warmed, "load")):
            device = claim(self.station.place)
            instances = generation.build_instances(settings.pool_size, device)
        outside = weights_outside((i.module for i in instances), generation.mapped.contains)
        self.slot.update(weights_private_bytes=outside)
        self.served_model = generation.serve(
            instances, device, functools.partial(self.method_queue.defer, self._break_down, "device_failed")
        )
        inputs = generation.manifest.warmup or generation.family.warmup_inputs()
        with timed(functools.partial(self._note_warmed, "inference")):
            usual_s = warm_up(generation.family, instances, inputs, self.served_model.threads)
        self.fitness.accept_memory()
        self.keep_alive = KeepAlive(
            generation.family, self.served_model.pool, inputs[0], usual_s=usual_s,
            interval_s=settings.keepalive_s, turn=settings.run_dir / "keepalive.lock",
        )  # fmt: skip
        if settings.tracing:
            from server.tracing import create_tracing  # an optional extra

            self.tracing = create_tracing()
        trace = self.tracing.trace if self.tracing else None
        return create_app(settings, [self.served_model], self.instruments.observe, trace)

    def _note_warmed(self, tier: str, took_ms: float) -> None:
        """Log, export and show what one tier of warm-up took."""
        emit(LOG, logging.INFO, events.WARMED, generation=self.generation.number, tier=tier, ms=took_ms)
        self.instruments.warmed(tier, took_ms)
        self.slot.update(**{BOARD_TIERS[tier]: took_ms})

    def _open_doors(self, app: Any) -> None:
        """Listen and accept: from here on this worker takes requests (main thread)."""
        self.data_app = app
        for listener in self.data_listeners:
            listener.listen(self.cfg.backlog)
        self.ready = True
        self.slot.update(phase=Phase.READY.value, ready_at=time.monotonic(), beat=time.monotonic())
        emit(LOG, logging.INFO, events.WORKER_READY, generation=self.generation.number,
             version=self.generation.version.name)  # fmt: skip
        self._wake_arbiter()

    def _wake_arbiter(self) -> None:
        # gunicorn's arbiter looks at its children on SIGCHLD; there is nothing to reap, only to read.
        try:
            os.kill(self.ppid, signal.SIGCHLD)
        except PermissionError:
            pass  # --user made this worker another user's; the arbiter looks once a second anyway

    def init_signals(self) -> None:
        """Take over the signals that the arbiter blocked before the fork; those that came since come now."""
        super().init_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_WORKERS)

    def handle_quit(self, sig: int, frame: Any) -> None:
        """INT and QUIT: leave at once. Interpreter shutdown would wait for the model's threads."""
        os._exit(0)

    # ---- the loop -------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to leave, then finish what was accepted."""
        self.poller.register(
            self.method_queue.fileno(), selectors.EVENT_READ, self.method_queue.run_callbacks
        )
        self.intake = Intake(
            cfg=self.cfg, settings=self.station.settings, poller=self.poller, slot=self.slot,
            start=self._start, batch=batch_limit(self.generation.family, self.station.settings),
        )  # fmt: skip
        self.queue = DataQueue(
            self.data_listeners, self.intake, board=self.station.board, slot=self.slot,
            refused=lambda count: self.instruments.reject("queue_full", count),
        )  # fmt: skip
        self.admin_listener.setblocking(False)
        self.poller.register(self.admin_listener, selectors.EVENT_READ, self.intake.accept_admin)
        threading.Thread(target=self._build, name="builder", daemon=True).start()
        while self.alive and self.is_parent_alive():
            self._turn()
        self._drain()
        if self.tracing:
            self.tracing.close()
        logging.shutdown()
        # Interpreter shutdown waits for threads that may be inside the model for good.
        os._exit(0)

    def _turn(self) -> None:
        self.notify()
        self._beat(time.monotonic())
        self.intake.admit_waiting()
        serving = self.ready and (self.alive or self.farewell > 0)
        due = self.ready and self.alive and self.keep_alive.is_due
        if due:
            self._keep_warm()
        free = serving and self.intake.is_free
        self.set_accept_enabled(free)
        gathering = serving and not free and self.intake.may_gather
        if gathering:
            self.queue.gather()
        idle_s = GATHER_S if gathering else SHED_CHECK_S if due or (serving and not free) else BEAT_S
        self.wait_for_and_dispatch_events(min(idle_s, self.intake.patience_s))
        self.intake.enforce(time.monotonic())
        if serving and not free:
            self.queue.shed()

    def _beat(self, now: float) -> None:
        if now >= self.beat_due:  # not at each turn: a busy worker has thousands a second
            self.beat_due = now + BEAT_S / 2
            self.slot.update(beat=now)
        if now >= self.memory_due:
            self.memory_due = now + MEMORY_EVERY_S
            # Milliseconds, in which the loop could not accept.
            self.admin_pool.submit(self.fitness.report_memory)
        if self.ready:
            self._look_for_stuck_instances()

    def _look_for_stuck_instances(self) -> None:
        lent_s, limit_s = self.served_model.pool.longest_lent_s, self.station.settings.request_timeout_s
        if lent_s > limit_s + STUCK_GRACE_S:
            detail = f"an instance has been computing for {lent_s:.0f} s, REQUEST_TIMEOUT_S is {limit_s:g}"
            self._break_down("instance_stuck", detail)

    def _break_down(self, reason: str, detail: str) -> None:
        """Take nothing new, finish what can be finished; the arbiter sends another worker."""
        self.ready = False
        self.fitness.break_down(reason, detail)
        if reason == "device_failed":  # what runs there is no answer any more
            self.served_model.pool.close()
        self.intake.refuse_waiting()

    def _keep_warm(self) -> None:
        """Let the idlest instance compute, on a place of its own, where that makes nobody wait."""
        board = self.station.board
        spare = self.intake.is_free and not self.queue.length
        if (
            not spare
            or self.fitness.worn
            or not is_spare(board.workers().values(), self.pid, time.monotonic())
        ):
            return
        self.intake.take_place()
        self.served_model.threads.submit(self.keep_alive.run).add_done_callback(
            lambda future: self.method_queue.defer(self._kept_warm, future)
        )

    def _kept_warm(self, future: futures.Future[Kept | None]) -> None:
        self.intake.return_place()
        if (kept := future.result()) is None:
            return
        self._note_warmed("keepalive", kept.took_s * 1000)
        if kept.device_broke:
            self._break_down("device_failed", kept.fault)
        elif kept.fault:
            self.fitness.wear("keepalive_failed", kept.fault)

    def _drain(self) -> None:
        """Take nothing new; finish running responses within the drain timeout."""
        self.slot.update(phase=Phase.DRAINING.value)
        now = time.monotonic()
        deadline = now + self.cfg.graceful_timeout
        self.intake.hurry(now + LINGER_S)
        if (self.station.board.arbiter.read() or {}).get("stopping"):
            self.farewell = self.queue.length  # nobody else will take them
        while (self.intake.has_data_work or self._takes_leave()) and time.monotonic() < deadline:
            self._turn()
        # A probe or a scrape that this worker took is answered; the next one is another worker's.
        self.poller.unregister(self.admin_listener)
        self.set_accept_enabled(False)
        deadline = min(deadline, time.monotonic() + LINGER_S)
        while self.intake.open and time.monotonic() < deadline:
            self._turn()

    def _takes_leave(self) -> bool:
        """Whether the queue of a stopping service still holds what it held when it was told to stop."""
        self.farewell = min(self.farewell, self.queue.length)
        return self.ready and self.farewell > 0

    def set_accept_enabled(self, enabled: bool) -> None:
        """Take data connections, or leave them in the kernel's queue for a worker that is free."""
        if enabled == self._accepting:
            return
        for listener in self.data_listeners:
            if enabled:
                listener.setblocking(False)
                self.poller.register(listener, selectors.EVENT_READ, self._accept_data)
            else:
                self.poller.unregister(listener)
        self._accepting = enabled

    def _accept_data(self, listener: Any) -> None:
        self.intake.accept_data(self.queue.first(listener))
        self.farewell = max(0, self.farewell - 1)
        if not self.intake.is_free:  # at once: the kernel would go on offering connections to this worker
            self.set_accept_enabled(False)

    # ---- requests -------------------------------------------------------------------------------

    def _start(self, conn: Connection) -> None:
        pool = self.admin_pool if conn.admin else self.tpool
        pool.submit(self.handle, conn).add_done_callback(
            lambda future: self.method_queue.defer(self._ended, conn, future)
        )

    def handle(self, conn: Connection) -> None:
        """Read one request, answer it, close (a thread of the pool)."""
        req = None
        self.local.conn = conn
        try:
            conn.sock.setblocking(True)
            conn.init()
            req = next(conn.parser)
            if req:
                self.handle_request(req, conn)
        except ResponseAborted as error:
            self.log.debug("response aborted: %s", error)
            if req is not None and req.version < (1, 1):
                reset(conn.sock)
        except (NoMoreData, StopIteration, BlockingIOError, ConnectionError) as error:
            self.log.debug("connection ended early: %s", error)
        except Exception as error:
            self.handle_error(req, conn.sock, conn.client, error)
        finally:
            if not conn.computing:
                self._vacate(conn)
            util.close_graceful(conn.sock)  # here and not in the loop: it waits for the client's side

    def _ended(self, conn: Connection, future: futures.Future[None]) -> None:
        self.intake.open.discard(conn)
        if not conn.admin:
            self.served += 1
            self.slot.note(served=self.served)
            self.fitness.note_served(self.served)
        if (error := future.exception()) is not None:
            LOG.error("connection thread failed", exc_info=error)

    def _vacate(self, conn: Connection) -> None:
        self.method_queue.defer(self.intake.vacate, conn)

    def _dispatch(self, environ: dict[str, Any], start_response: Any) -> Any:
        conn: Connection = self.local.conn
        if conn.admin:
            conn.read_deadline = NEVER
            return self.admin_app(environ, start_response)
        environ[Exchange.KEY] = Exchange(
            note_read=functools.partial(setattr, conn, "read_deadline", NEVER),
            keep_place=functools.partial(setattr, conn, "computing", True),
            free_place=functools.partial(self._vacate, conn),
            client_left=functools.partial(has_left, conn.sock),
        )
        return self.data_app(environ, start_response)
