"""The peers of a role: the links to them, and pings, which find those that are gone."""

import math
import time
from collections.abc import Callable
from typing import Any

from fedbcd.engines.deploy.links.dialer import Dialer
from fedbcd.engines.deploy.links.endpoint import About
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.links.listener import Change, Listener, Welcomes
from fedbcd.engines.deploy.links.tls import Credentials, Plain, Security
from fedbcd.engines.deploy.links.traffic import LinkOptions
from fedbcd.engines.deploy.processes.clock import OFF_S
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.skew import Skews
from fedbcd.engines.deploy.processes.timeouts import AdaptiveTimeout
from fedbcd.protocol.messages import Actor
from fedbcd.protocol.notices import Notice, Ping, Pong

HUNG_S = 120.0  # a process that deals with a large model answers nothing meanwhile


class Peers:
    """Those who dial in, the one that is dialled, or both. For `link` see `LinkEnd`."""

    def __init__(self, me: Actor, options: Deploy, patience: AdaptiveTimeout, **link: Any) -> None:
        self.listener: Listener | None = None
        self.dialer: Dialer | None = None
        self._me = me
        self._options = options
        self._patience = patience
        self._log: RoleLog = link["log"]
        security: Security = Plain()
        if not options.plain:
            seen = options.folder_of(me) / "revocations"
            security = Credentials(options.certificates_of(me), me, self._log, seen)
        self.security = security
        self._link = {"security": security, **link}

    async def listen(self, welcomes: Welcomes, status: About, change: Change | None = None) -> None:
        host, port = self._options.listens_at(self._me)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        asked: dict[str, Any] = {"welcomes": welcomes, "status": status, "change": change}
        self.listener = Listener(self._me, address, **asked, **self._link, options=self._patient())
        self._log.info("listening", port=await self.listener.start())

    def dial(self, peer: Actor) -> Dialer:
        addresses = self._options.addresses_of(peer)
        self.dialer = Dialer(self._me, peer, addresses, **self._link, options=self._patient())
        return self.dialer

    def learn_patience(self) -> None:
        if self.dialer is not None:
            self.dialer.options = self._patient()

    def _patient(self) -> LinkOptions:
        return LinkOptions(
            gone_s=self._patience.seconds(), standstill_rate=self._options.least_rate
        )

    def hurry(self) -> None:
        """Somebody has got through to us, so the one that we dial may be there as well."""
        if self.dialer is not None:
            self.dialer.hurry()

    def model_moved_at(self, peer: Actor | None = None) -> float:
        """When a model last moved between a peer, or the one that we dial, and us."""
        end = self.dialer if peer is None else self.end_of(peer)
        actor = peer or self.dialled
        return -math.inf if end is None or actor is None else end.model_moved_at(actor)

    @property
    def dialled(self) -> Actor | None:
        return None if self.dialer is None else self.dialer.peer

    @property
    def connected(self) -> frozenset[Actor]:
        ends = (end for end in (self.listener, self.dialer) if end is not None)
        return frozenset().union(*(end.connected for end in ends))

    def end_of(self, peer: Actor) -> Dialer | Listener | None:
        return self.dialer if peer == self.dialled else self.listener

    async def send(self, letter: Letter) -> bool:
        """Hand a letter to the link that leads to its receiver; False: dropped, and the machines
        will say it again.
        """
        end = self.end_of(letter.to)
        return end is not None and await end.send(letter)

    async def notify(self, peer: Actor, notice: Notice) -> bool:
        end = self.end_of(peer)
        return end is not None and await end.notice(peer, notice)

    async def broadcast(self, notice: Notice) -> None:
        if self.listener is not None:
            for peer in sorted(self.listener.connected):
                await self.listener.notice(peer, notice)

    def refuse(self, peer: Actor, reason: str, sentence: str) -> None:
        end = self.end_of(peer)
        if end is not None:
            end.refuse(peer, reason, sentence)

    async def hang_up(self) -> None:
        if self.listener is not None:
            await self.listener.stop()


class Pings:
    """Every peer is asked for an answer now and then, which teaches the third timeout and tells
    what time it is over there. One that used to answer, and does not for long though its link is
    alive, hangs and is hung up on.
    """

    def __init__(
        self, peers: Peers, patience: AdaptiveTimeout, skews: Skews, now: Callable[[], float]
    ) -> None:
        self._peers = peers
        self._patience = patience
        self._skews = skews
        self._now = now
        self._number = 0
        # peer -> the ping that it has not answered, and when that went out
        self._waiting: dict[Actor, tuple[int, float]] = {}
        # peers that have answered on this connection; older software does not
        self._answered: set[Actor] = set()

    async def ask_all(self) -> None:
        """Ask every peer that owes no answer, and look at how long the others have been silent."""
        self._number += 1
        for peer in sorted(self._peers.connected):
            await self._ask(peer)

    async def _ask(self, peer: Actor) -> None:
        end, now, waiting = self._peers.end_of(peer), time.monotonic(), self._waiting.get(peer)
        if end is None:
            return
        if waiting is None:
            if await end.notice(peer, Ping(number=self._number)):
                self._waiting[peer] = (self._number, now)
            return
        # a ping, or its answer, may wait behind a large model; who does not listen at all is found
        # by the links
        silent_s = now - max(waiting[1], end.moved_at(peer))
        if peer in self._answered and silent_s >= max(self._patience.most, HUNG_S):
            end.refuse(peer, "gone", f"{peer} has not answered for {silent_s:.0f} s")

    async def heard(self, sender: Actor, notice: Ping | Pong) -> None:
        if isinstance(notice, Ping):
            await self._peers.notify(sender, Pong(number=notice.number, clock=self._now()))
            return
        number, asked_at = self._waiting.get(sender, (None, 0.0))
        if notice.number == number:
            took_s = time.monotonic() - asked_at
            self._patience.observe(took_s)
            # who is slow cannot tell
            if notice.clock is not None and took_s < OFF_S:
                self._skews.measured(sender, notice.clock - (self._now() - took_s / 2))
            self._answered.add(sender)
            del self._waiting[sender]

    def forget(self, peer: Actor) -> None:
        self._waiting.pop(peer, None)
        self._answered.discard(peer)
