"""A role as a process: one event loop, one worker thread that the role lives in, links to its
peers, timers and watchers.

Whatever happens (a letter, a timer, a finished computation) becomes one call of the role; calls are
made one at a time, in order, in the role's thread. What has come while the disk was busy is handled
together and shares the next write to it. Only when that is durable are letters handed to the links.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.connection import LinkOptions
from fedbcd.engines.deploy.links.dialer import Dialer
from fedbcd.engines.deploy.links.endpoint import trouble_of
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import Change, Listener, Welcomes
from fedbcd.engines.deploy.links.refusals import Counts
from fedbcd.engines.deploy.links.tls import Credentials, Plain, Security
from fedbcd.engines.deploy.processes.clock import OFF_S, SteadyClock, wall
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.engines.deploy.processes.failpoints import Failpoint, hit
from fedbcd.engines.deploy.processes.health import Health, note_port
from fedbcd.engines.deploy.processes.logs import Log
from fedbcd.engines.deploy.processes.metrics import Metrics, totals
from fedbcd.engines.deploy.processes.options import Deploy, split_address
from fedbcd.engines.deploy.processes.skew import Skews
from fedbcd.engines.deploy.processes.timeouts import Timeouts
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.engines.deploy.roles.checks import check_notice, is_time
from fedbcd.errors import FedBCDError, ProtocolError, Refused
from fedbcd.protocol.messages import Actor, Event, RetryDue
from fedbcd.record.eventlog import Transition

PING, PONG = "ping", "pong"  # notices by which peers learn how long the other takes to answer
GROUP = 64  # calls that share one write to disk, at most
GOODBYE_S = 5.0  # how long a process that was told to stop waits for what is under way


Call = Callable[[float], list[Letter]]  # of a role, at a time


class Process(ABC):
    """What the three kinds of processes share. Subclasses say whom to listen to or dial, and which
    timers run.
    """

    AT_ONCE: ClassVar[frozenset[str]] = frozenset(
        {"upload"}
    )  # messages that a peer answers without waiting for anybody else

    def __init__(self, role: Role, options: Deploy, declared: Declared, log: Log) -> None:
        self.clock = SteadyClock(options.epoch, partial(wall, role.actor))
        self._event_at = 0.0  # the earliest time that the event under way may have
        self.role = role
        self.options = options
        self.declared = declared
        self.security: Security = (
            Plain()
            if options.plain
            else Credentials(options.certificates_of(role.actor), role.actor, log)
        )
        self.listener: Listener | None = None
        self.dialer: Dialer | None = None
        role.watch = self.seen
        role.warn = lambda peer, remark: log.warning("remark", peer=peer, sentence=remark)
        self.log = log
        self.metrics = Metrics(role.actor)
        self.skews = Skews(self.metrics, log)
        self.counts = Counts()
        self.timeouts = Timeouts(options.retry_s, options.lost_s, options.peer_s)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="role")
        self._turn = asyncio.Lock()  # one group of events at a time
        self._queue: deque[tuple[Call, asyncio.Future[None]]] = (
            deque()
        )  # of events, first come, first served
        self._ended: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: set[asyncio.Task[None]] = set()  # under way, or waiting for their turn
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._unanswered: tuple[str, object] | None = (
            None  # what was said last and has no answer yet: its kind, and which
        )
        self._since = 0.0
        self._attempt = 0
        self._cause: tuple[str, float] | None = None  # what it waits for, since when
        self._pings: dict[
            Actor, tuple[int, float]
        ] = {}  # peer -> the ping that it has not answered, and when that went out
        self._ponged: dict[
            Actor,
            float,
            # peers that have answered on this connection, and when that ping went out; older ones
            # do not
        ] = {}
        self._beats = 0

    # ---------------------------------------------------------------------------------------------
    # for subclasses
    @abstractmethod
    async def open_links(self) -> None:
        """Listen, dial."""

    @abstractmethod
    def begin(self) -> None:
        """Called once, when links are open: start what a fresh or recovered role has to do."""

    @abstractmethod
    def after(self, letters: list[Letter]) -> None:
        """Called after each event that changed something: set timers, notify peers."""

    @abstractmethod
    def waits_for(self) -> str:
        """What the role waits for, in a word for the metrics."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it can do its work."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """What it is doing, beyond what all roles tell."""

    def seen(self, step: Transition) -> None:  # noqa: B027
        """Called in the role's thread with every transition that has become durable."""

    async def noticed(self, sender: Actor, kind: str, body: dict[str, Any]) -> None:  # noqa: B027
        """A peer tells something that is not part of the protocol."""

    # ---------------------------------------------------------------------------------------------
    # links
    async def listen(self, welcomes: Welcomes, change: Change | None = None) -> None:
        """Let peers dial in, and operators ask."""
        host, port = self.options.listens_at(self.role.actor)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.listener = Listener(
            self.role.actor,
            address,
            welcomes=welcomes,
            status=self.full_status,
            change=change,
            **self._common(),
        )
        self.log.info("listening", port=await self.listener.start())

    def dial(self, peer: Actor) -> None:
        """Keep a connection to a peer, for ever."""
        self.dialer = Dialer(
            self.role.actor, peer, self.options.addresses_of(peer), **self._common()
        )
        self.spawn(self.dialer.run())

    def _common(self) -> dict[str, Any]:
        return {
            "model": self.declared,
            "security": self.security,
            "on_letter": self.receive,
            "on_connect": self.connected,
            "on_disconnect": self.disconnected,
            "on_notice": self.heard,
            "about": lambda: self.role.hello() | {"clock": self.now()},
            "options": self._link_options(),
            "log": self.log,
            "counts": self.counts,
        }

    def _link_options(self) -> LinkOptions:
        gone_s = self.timeouts.peer.seconds()
        return LinkOptions(gone_s=gone_s, keepalive_s=gone_s)

    async def connected(self, peer: Actor, about: dict[str, Any]) -> None:
        """A connection is new: what was said on the old one may be lost."""
        self._forget_pings(peer)
        if is_time(about.get("clock")):
            self.skews.at_least(peer, about["clock"] - self.now())
        self.metrics.connections.set(len(self.peers()))
        if self.dialer is not None and peer == self.dialer.peer:
            self.say_again_now()

    async def greet(self, peer: Actor, greeting: Callable[[float], list[Letter]]) -> bool:
        """Let the role look at who has dialled in; one that it does not accept is told why, and
        hung up on.
        """
        try:
            await self.do(greeting)
        except ProtocolError as error:
            assert self.listener is not None
            self.listener.refuse(peer, getattr(error, "reason", "protocol"), str(error))
            return False
        return True

    async def disconnected(self, peer: Actor) -> None:
        """A connection has ended; the dialler tries again by itself, as patiently as experience
        says.
        """
        self._forget_pings(peer)
        self.skews.forget(peer)
        self.metrics.connections.set(len(self.peers()))
        if self.dialer is not None and peer == self.dialer.peer:
            self.dialer.options = self._link_options()

    def peers(self) -> frozenset[Actor]:
        """Who is connected."""
        ends = (end for end in (self.listener, self.dialer) if end is not None)
        return frozenset().union(*(end.connected for end in ends))

    async def send(self, letter: Letter) -> bool:
        """Hand a letter to the link that leads to its receiver; False: dropped, and the machines
        will say it again.
        """
        end = self._end_of(letter.to)
        return end is not None and await end.send(letter)

    def _end_of(self, peer: Actor) -> Dialer | Listener | None:
        return (
            self.dialer if self.dialer is not None and peer == self.dialer.peer else self.listener
        )

    async def broadcast(self, kind: str, body: dict[str, Any]) -> None:
        """Tell all peers that have dialled in."""
        if self.listener is not None:
            for peer in sorted(self.listener.connected):
                await self.listener.notice(peer, kind, body)

    async def _hang_up(self) -> None:
        if self.listener is not None:
            await self.listener.stop()

    # ---------------------------------------------------------------------------------------------
    # running
    def now(self) -> float:
        """Seconds since the run began; never less than before."""
        return self.clock.now()

    def settled(self) -> float:
        """No event that is yet to come will be earlier than this."""
        return self._event_at if self._turn.locked() else self.role.earliest(self.now())

    async def run(self) -> ExitCode:
        """Until SIGTERM, SIGINT or an error that ends it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end, ExitCode.DONE)
        health = Health(self._metrics_text, self.full_status, self.is_ready)
        try:
            await self._open(health)
            code = await self._ended
        except FedBCDError as error:
            code = self._complain(error)
        finally:
            await self._close(health)
        self.log.info("ended", code=int(code), meaning=code.name)
        return code

    def end(self, code: ExitCode) -> None:
        """Stop: what is durable stays, what is under way is started again next time."""
        if not self._ended.done():
            self._ended.set_result(code)

    @property
    def is_ending(self) -> bool:
        """Whether it has been told to stop, or has failed: what is asked of it now does not
        happen.
        """
        return self._ended.done()

    async def _open(self, health: Health) -> None:
        port = await health.start(*split_address(self.options.health, "deploy.health"))
        note_port(self.options.folder_of(self.role.actor), port)
        await self.open_links()
        self.log.info("started", health_port=port, **self.status())
        self.begin()
        self.at(PING, self.timeouts.peer.seconds(), self.beat)
        self._refresh()

    async def _close(self, health: Health) -> None:
        for timer in self._timers.values():
            timer.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                async with self._turn:  # the event under way becomes durable first
                    await self._hang_up()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._events, return_exceptions=True)
        await health.close()
        self._worker.shutdown(wait=True)
        self.role.close()

    # ---------------------------------------------------------------------------------------------
    # one event
    async def receive(self, letter: Letter) -> None:
        """A letter came; raises a `ProtocolError`, so that the link can tell the peer why, also
        when that it came had consequences.
        """
        self.metrics.letters.labels(direction="in", event=type(letter.event).__name__).inc()
        self.skews.at_least(letter.sender, letter.clock - self.now())
        refused: list[Refused] = []
        await self.do(lambda now: self.take(letter, now, refused.append))
        for why in refused:
            raise why

    def take(self, letter: Letter, now: float, refused: Callable[[Refused], None]) -> list[Letter]:
        """In the role's thread."""
        return self.role.receive(letter, now, refused)

    async def tell(self, event: Event) -> None:
        """One of its own timers went off."""
        await self.do(lambda now: self.role.tell(event, now))

    async def do(self, call: Call) -> None:
        """One call of the role, in its turn and in its thread; then its letters go out.

        Once begun it is brought to its end, also when the connection that brought the letter is
        gone meanwhile: what the role has taken in must have its consequences (letters, timers,
        work), or nobody would ever see to them.
        """
        event = asyncio.get_running_loop().create_task(self._do(call))
        self._events.add(event)
        event.add_done_callback(self._events.discard)
        await asyncio.shield(event)

    async def _do(self, call: Call) -> None:
        handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((call, handled))
        async with self._turn:
            if not handled.done():  # nobody before took it along
                await self._handle_next()
        await handled

    async def _handle_next(self) -> None:
        """A group of events from the front of the queue."""
        group = [self._queue.popleft() for _ in range(min(len(self._queue), GROUP))]
        try:
            if not self._ended.done():
                await self._handle(group)
        except Exception as error:
            self._fail(error)  # machine and disk may disagree now: end, and recover from the disk
            raise
        finally:
            for _, handled in group:
                if not handled.done():
                    handled.set_result(None)

    async def _handle(self, group: Sequence[tuple[Call, "asyncio.Future[None]"]]) -> None:
        began, self._event_at = time.perf_counter(), self.role.earliest(self.now())
        calls = [partial(call, self.now()) for call, _ in group]
        outcomes = await asyncio.get_running_loop().run_in_executor(
            self._worker, self.role.together, calls
        )
        took = time.perf_counter() - began
        for outcome, (_, handled) in zip(outcomes, group, strict=True):
            self.metrics.handling.observe(took)
            if isinstance(outcome, ProtocolError):
                self.log.debug("refused", sentence=str(outcome))
                handled.set_exception(outcome)
            else:
                await self.post(outcome)
                self.after(outcome)
        self._note_wait()

    async def post(self, letters: list[Letter]) -> None:
        """Hand letters to the links."""
        for letter in letters:
            self.metrics.letters.labels(direction="out", event=type(letter.event).__name__).inc()
            await self.send(letter)
            hit(Failpoint.AFTER_SEND, type(letter.event).__name__)

    # ---------------------------------------------------------------------------------------------
    # timers
    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside; an error that nobody expects ends the process."""
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refused as error:
            self.log.warning("refused_own", sentence=str(error))
        except Exception as error:  # noqa: BLE001  whatever it is, the process must not go on half dead
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._ended.done():
            return
        if isinstance(error, FedBCDError):
            self.end(self._complain(error))
        else:
            self.log.error(
                "bug", sentence=str(error), trace="".join(traceback.format_exception(error))
            )
            self.end(ExitCode.BUG)

    def _complain(self, error: FedBCDError) -> ExitCode:
        code = ExitCode(error.exit_code)
        self.log.error("failed", code=int(code), meaning=code.name, sentence=str(error))
        return code

    def at(self, key: object, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` after so many seconds; a timer of the same key is replaced."""
        self.drop(key)

        def fire() -> None:
            self._timers.pop(key, None)
            then()

        self._timers[key] = asyncio.get_running_loop().call_later(seconds, fire)

    def drop(self, key: object) -> None:
        """Forget a timer."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def has_timer(self, key: object) -> bool:
        """Whether a timer of this key runs."""
        return key in self._timers

    # ---------------------------------------------------------------------------------------------
    # the first timeout: again
    def expect_answer(self, said: tuple[str, object] | None) -> None:
        """What is unanswered now; called after every event. The wait for what is answered teaches
        the timeout.
        """
        if said == self._unanswered:
            return
        now = time.monotonic()
        if self._unanswered is not None:
            self.timeouts.retry(self._unanswered[0]).observe(now - self._since)
            if self._unanswered[0] in self.AT_ONCE:
                self.timeouts.peer.observe(now - self._since)
        self._unanswered, self._since, self._attempt = said, now, 0
        self._arm_retry()

    def say_again_now(self) -> None:
        """A connection is new: what was said on the old one may be lost."""
        if self._unanswered is not None:
            self._say_again()

    def _arm_retry(self) -> None:
        if self._unanswered is None:
            self.drop(RetryDue)
        else:
            self.at(
                RetryDue,
                self.timeouts.retry(self._unanswered[0]).seconds(self._attempt),
                self._say_again,
            )

    def _say_again(self) -> None:
        self._attempt += 1
        self.metrics.retries.inc()
        self._arm_retry()
        self.spawn(self.tell(RetryDue()))

    # ---------------------------------------------------------------------------------------------
    # the third timeout: gone
    def beat(self) -> None:
        """Now and then: ask every peer for an answer, and hang up on those that used to answer and
        did not this time.
        """
        self.at(PING, self.timeouts.peer.seconds(), self.beat)
        self._refresh()
        self._beats += 1
        for peer in sorted(self.peers()):
            self.spawn(self._ping(peer))

    async def _ping(self, peer: Actor) -> None:
        end, now, waiting = self._end_of(peer), time.monotonic(), self._pings.get(peer)
        if end is None:
            return
        if waiting is None:
            if await end.notice(peer, PING, {"number": self._beats}):
                self._pings[peer] = (self._beats, now)
            return
        silent_s = now - max(
            waiting[1], end.moved_at(peer)
        )  # a ping, or its answer, may wait behind a large model
        if peer in self._ponged and silent_s >= self._patience_s(peer, end):
            end.refuse(peer, "gone", f"{peer} has not answered for {silent_s:.0f} s")

    def _patience_s(self, peer: Actor, end: Dialer | Listener) -> float:
        """How long a peer may be silent; longest while it may deal with a model of ours, since it
        hears nothing else meanwhile.
        """
        is_busy = end.model_sent_at(peer) > self._ponged[peer]
        return self.timeouts.peer.most if is_busy else self.timeouts.peer.seconds()

    async def heard(self, sender: Actor, kind: str, body: dict[str, Any]) -> None:
        """A notice came."""
        if kind not in (PING, PONG):
            await self.noticed(sender, kind, body)
            return
        check_notice(sender, body, "number")
        end, waiting = self._end_of(sender), self._pings.get(sender)
        if kind == PING and end is not None:
            await end.notice(sender, PONG, {"number": body["number"], "clock": self.now()})
        elif kind == PONG and waiting is not None and waiting[0] == body["number"]:
            took = time.monotonic() - waiting[1]
            self.timeouts.peer.observe(took)
            if (
                is_time(body.get("clock")) and took < OFF_S
            ):  # the older ones do not say; the slow ones cannot tell
                self.skews.measured(sender, body["clock"] - (self.now() - took / 2))
            self._ponged[sender] = waiting[1]
            del self._pings[sender]

    def _forget_pings(self, peer: Actor) -> None:
        self._pings.pop(peer, None)
        self._ponged.pop(peer, None)

    # ---------------------------------------------------------------------------------------------
    # watching
    def _note_wait(self) -> None:
        cause, now = self.waits_for(), time.monotonic()
        if self._cause is not None:
            self.metrics.waiting.labels(cause=self._cause[0]).inc(now - self._cause[1])
        self._cause = (cause, now)

    def full_status(self) -> dict[str, Any]:
        """What /status and `fedbcd status` show."""
        self._refresh()
        common = {
            "actor": self.role.actor,
            "ready": self.is_ready(),
            "waits_for": self.waits_for(),
            "clock": round(self.now(), 3),
        }
        log = {"settled": self.settled(), "events": self.role.store.length, "pid": os.getpid()}
        log["counting"] = (
            log["settled"] > self.now() + OFF_S
        )  # since what it has recorded is far ahead of its clock
        told = {
            **self.skews.status(),
            "trouble": trouble_of(self.dialer, self.listener),
            "peers": len(self.peers()),
        }
        return {**common, **log, **told, **self.status(), "totals": totals(self.metrics)}

    def _metrics_text(self) -> bytes:
        self._refresh()
        return self.metrics.text()

    def _refresh(self) -> None:
        """What was measured elsewhere, into the registry."""
        self._note_wait()
        self.skews.note_own(self.settled() - self.clock.on_the_wall())
        for direction, seen in (("in", self.counts.bytes_in), ("out", self.counts.bytes_out)):
            self.metrics.bytes.labels(direction=direction).inc(
                seen - self.metrics.value("fedbcd_bytes_total", direction=direction)
            )
        for reason, seen in self.counts.refused.items():
            self.metrics.refused.labels(reason=reason).inc(
                seen - self.metrics.value("fedbcd_refused_inputs_total", reason=reason)
            )


def run_process(make: Callable[[], Process]) -> ExitCode:
    """Run one process to its end; what goes wrong before it runs is a sentence and an exit code as
    well.
    """

    async def whole() -> ExitCode:
        return await make().run()

    try:
        return asyncio.run(whole())
    except FedBCDError as error:
        with contextlib.suppress(OSError):  # its disk may be the full one
            sys.stderr.write(
                json.dumps(
                    {
                        "level": "error",
                        "what": "failed",
                        "sentence": str(error),
                        "code": error.exit_code,
                    }
                )
                + "\n"
            )
        return ExitCode(error.exit_code)
