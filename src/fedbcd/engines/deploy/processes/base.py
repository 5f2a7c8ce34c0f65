"""A role as a process: its events, one at a time; links to its peers; timers; and those who watch.

Whatever happens (a letter, a timer, a finished computation) becomes one call of the role in its
`EventQueue`. Only when that is durable are letters handed to the links.
"""

import asyncio
import contextlib
import json
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.links.endpoint import trouble_of
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.refusals import reason_of
from fedbcd.engines.deploy.processes.clock import SteadyClock, wall
from fedbcd.engines.deploy.processes.descriptors import raise_limit
from fedbcd.engines.deploy.processes.event_queue import Call, EventQueue
from fedbcd.engines.deploy.processes.exit_codes import ExitCode
from fedbcd.engines.deploy.processes.failpoints import Failpoint, hit
from fedbcd.engines.deploy.processes.free_space import FreeSpace
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.engines.deploy.processes.monitor import Monitor
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.peers import Peers, Pings
from fedbcd.engines.deploy.processes.tasks import Tasks
from fedbcd.engines.deploy.processes.timeouts import Timeouts
from fedbcd.engines.deploy.processes.timers import Retry, Timers
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.errors import FedBCDError, ProtocolError, Refused
from fedbcd.protocol.messages import Actor, Event, RetryDue
from fedbcd.protocol.notices import Notice, Ping, Pong
from fedbcd.protocol.senders import is_time
from fedbcd.record.eventlog import Transition


class Process(ABC):
    """What the three kinds of processes share. Subclasses say whom to listen to or dial, and which
    timers run.
    """

    def __init__(self, role: Role, options: Deploy, declared: Declared, log: RoleLog) -> None:
        self.clock = SteadyClock(options.epoch, partial(wall, role.actor))
        self.role = role
        self.options = options
        self.log = log
        self.timeouts = Timeouts(options.retry_s, options.lost_s, options.peer_s)
        self.tasks = Tasks(log)
        self.timers = Timers()
        self.free_space = FreeSpace(options.folder_of(role.actor), options.reserve_mb)
        self.events = EventQueue(role, self.clock.now, self.tasks, self.handled)
        self.monitor = Monitor(self)
        self.metrics = self.monitor.metrics
        self.peers = Peers(
            role.actor,
            options,
            self.timeouts.peer,
            model=declared,
            on_letter=self.receive,
            on_connect=self.connected,
            on_disconnect=self.disconnected,
            on_notice=self.noticed,
            about=lambda: role.hello() | {"clock": self.clock.now()},
            log=log,
            counts=self.monitor.counts,
        )
        self.retry = Retry(self.timers, self.timeouts, self._say_again, self.peers.model_moved_at)
        self.pings = Pings(self.peers, self.timeouts.peer, self.monitor.skews, self.clock.now)
        role.watch = self.seen
        role.warn = lambda peer, remark: log.warning("remark", peer=peer, sentence=remark)

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

    def trouble(self) -> list[str]:
        """What an operator should know, a sentence each."""
        expiring = getattr(self.peers.security, "trouble", [])
        return [*expiring, *trouble_of(self.peers.dialer, self.peers.listener)]

    def seen(self, step: Transition, model: Tensor | None) -> None:  # noqa: B027
        """Called in the role's thread with every transition that has become durable, and the model
        that came with its event.
        """

    # ---------------------------------------------------------------------------------------------
    # running
    async def run(self) -> ExitCode:
        """Until SIGTERM, SIGINT or an error that ends it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.tasks.end, ExitCode.DONE)
        try:
            self.free_space.check()
            port = await self.monitor.start()
            await self.open_links()
            self.log.info("started", health_port=port, **self.status())
            self.begin()
            self.timers.set(Ping, self.timeouts.peer.seconds(), self.beat)
            self.monitor.refresh()
            code = await self.tasks.ended
        except FedBCDError as error:
            code = self.tasks.complain(error)
        finally:
            self.timers.drop_all()
            await self.events.close(self.peers.hang_up)
            await self.tasks.cancel()
            await self.events.stop()
            await self.monitor.close()
            self.role.close()
        self.log.info("ended", code=int(code), meaning=code.name)
        return code

    def beat(self) -> None:
        """Now and then: ping all peers, and bring the metrics up to date."""
        self.timers.set(Ping, self.timeouts.peer.seconds(), self.beat)
        self.monitor.refresh()
        self.tasks.spawn(self.pings.ask_all())

    # ---------------------------------------------------------------------------------------------
    # links
    async def connected(self, peer: Actor, about: dict[str, Any]) -> None:
        """A connection is new: what was said on the old one may be lost."""
        self.pings.forget(peer)
        if is_time(about.get("clock")):
            self.monitor.skews.at_least(peer, about["clock"] - self.clock.now())
        self.metrics.connections.set(len(self.peers.connected))
        if peer == self.peers.dialled:
            self.retry.say_again(is_new=True)
        else:
            self.peers.hurry()

    async def disconnected(self, peer: Actor) -> None:
        """A connection has ended; the dialler tries again by itself, as patiently as experience
        says.
        """
        self.pings.forget(peer)
        self.monitor.skews.forget(peer)
        self.metrics.connections.set(len(self.peers.connected))
        self.peers.learn_patience()

    async def greet(self, peer: Actor, greeting: Call) -> bool:
        """Let the role look at who has dialled in; one that it does not accept is told why, and
        hung up on.
        """
        try:
            await self.events.do(greeting)
        except ProtocolError as error:
            self.peers.refuse(peer, reason_of(error), str(error))
            return False
        return True

    async def noticed(self, sender: Actor, notice: Notice) -> None:
        if isinstance(notice, Ping | Pong):
            await self.pings.heard(sender, notice)

    # ---------------------------------------------------------------------------------------------
    # events
    async def receive(self, letter: Letter) -> None:
        """A letter came; raises a `ProtocolError`, so that the link can tell the peer why, also
        when that it came had consequences.
        """
        self.metrics.letters.labels(direction="in", event=type(letter.event).__name__).inc()
        self.monitor.skews.at_least(letter.sender, letter.clock - self.clock.now())
        refused: list[Refused] = []
        await self.events.do(lambda now: self.role.receive(letter, now, refused.append))
        for why in refused:
            raise why

    async def tell(self, event: Event) -> None:
        await self.events.do(lambda now: self.role.tell(event, now))

    def _say_again(self) -> None:
        self.metrics.retries.inc()
        self.tasks.spawn(self.tell(RetryDue()))

    async def handled(self, outcome: list[Letter] | ProtocolError, took_s: float) -> None:
        """An event is durable, so its letters go out; or it was refused."""
        self.metrics.handling.observe(took_s)
        self.free_space.check()
        if isinstance(outcome, ProtocolError):
            self.log.debug("refused", sentence=str(outcome))
        else:
            await self.post(outcome)
            self.after(outcome)
        self.monitor.note_wait()

    async def post(self, letters: list[Letter]) -> None:
        for letter in letters:
            self.metrics.letters.labels(direction="out", event=type(letter.event).__name__).inc()
            await self.peers.send(letter)
            hit(Failpoint.AFTER_SEND, type(letter.event).__name__)


def run_process(make: Callable[[], Process]) -> ExitCode:
    """Run one process to its end; what goes wrong before it runs is a sentence and an exit code as
    well.
    """

    raise_limit()

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
