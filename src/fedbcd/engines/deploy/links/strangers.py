"""Connections at a listening port whose peer has not shown who it is: few, short-lived, and the
first to go.

gRPC tells of a connection only when its peer has shown a certificate and said something, and ends
none. So the sockets of this port are looked up among the descriptors of this process; those of
strangers are shut down, and gRPC then closes them.
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from fedbcd.engines.deploy.processes.descriptors import LEAST
from fedbcd.protocol.messages import Actor

HELLOS, HELLOS_PER_S = 20, 1.0  # of one identity: at once, and in the long run
MOST = 1024  # strangers at one port, where there are descriptors for more
DESCRIPTORS = "/proc/self/fd"

Place = tuple[str, int]  # the other end of a connection: address and port


@dataclass(frozen=True)
class Visit:
    """A connection of somebody else's making."""

    place: Place
    since: float


class Strangers:
    """Those at one port."""

    def __init__(self, places: int, patience: Callable[[], float]) -> None:
        """`places`: connections that the port has room for. `patience`: seconds until a peer must
        have shown who it is.
        """
        self.most = min(MOST, max(places // 2, LEAST // 2))
        self._patience = patience
        self._known: Counter[Place] = Counter()
        self._seen: dict[str, Visit | None] = {}  # socket -> the visit; None: not of this port
        self.dropped = 0

    @contextlib.contextmanager
    def known(self, peer: str) -> Iterator[None]:
        """Meanwhile this peer, as gRPC writes it, is no stranger."""
        place = place_of(peer)
        self._known[place] += 1
        try:
            yield
        finally:
            self._known[place] -= 1
            if not self._known[place]:
                del self._known[place]

    def look(self, port: int) -> int:
        """Shut down connections of strangers that are too old or too many, the oldest of the host
        with the most first; how many are left.
        """
        now, found = time.monotonic(), self._find(port)
        strangers = {
            name: (fd, visit)
            for name, (fd, visit) in found.items()
            if visit.place not in self._known
        }
        per_host = Counter(visit.place[0] for _, visit in strangers.values())
        queue = sorted(strangers.items(), key=lambda item: item[1][1].since)
        going = [item for item in queue if now - item[1][1].since > self._patience()]
        per_host.subtract(visit.place[0] for _, (_, visit) in going)
        staying = queue[len(going) :]
        while len(staying) > self.most:
            crowded, _ = per_host.most_common(1)[0]
            first = next(item for item in staying if item[1][1].place[0] == crowded)
            staying.remove(first)
            going.append(first)
            per_host[crowded] -= 1
        for name, (fd, _) in going:
            self._shut(fd, name)
        return len(staying)

    def _find(self, port: int) -> dict[str, tuple[int, Visit]]:
        """The connections at this port, each with its descriptor."""
        found, seen = {}, {}
        for entry in os.listdir(DESCRIPTORS):
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(f"{DESCRIPTORS}/{entry}")
                if not name.startswith("socket:"):
                    continue
                seen[name] = self._seen[name] if name in self._seen else _visit(int(entry), port)
                visit = seen[name]
                if visit is not None:
                    found[name] = (int(entry), visit)
        self._seen = seen
        return found

    def _shut(self, fd: int, name: str) -> None:
        """The descriptor is gRPC's, which may close it at any moment: what is shut down is a copy,
        if it still is that socket.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if os.readlink(f"{DESCRIPTORS}/{copy.fileno()}") == name:
                copy.shutdown(socket.SHUT_RDWR)
                self.dropped += 1


class Knocks:
    """How often each identity may say Hello: an answer costs a signature, and ends its older
    connection. Beyond that it waits, one at a time.
    """

    def __init__(self, at_once: int = HELLOS, per_s: float = HELLOS_PER_S) -> None:
        self._at_once, self._per_s = at_once, per_s
        self._free: dict[Actor, tuple[float, float]] = {}  # so many were left, when
        self._waiting: set[Actor] = set()

    async def wait(self, peer: Actor) -> bool:
        """Until it may; False: somebody waits already in its name."""
        if peer in self._waiting:
            return False
        left, since = self._free.get(peer, (float(self._at_once), 0.0))
        now = time.monotonic()
        left = min(left + (now - since) * self._per_s, self._at_once) - 1
        self._free[peer] = (left, now)
        if left < 0:
            self._waiting.add(peer)
            try:
                await asyncio.sleep(-left / self._per_s)
            finally:
                self._waiting.discard(peer)
        return True


def _visit(fd: int, port: int) -> Visit | None:
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.getsockname()[1] != port:
            return None
        try:
            host, its_port = copy.getpeername()[:2]
        except OSError:  # the one that listens
            return None
        return Visit((_plain(host), its_port), time.monotonic())


def place_of(peer: str) -> Place:
    """The place in gRPC's words: `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)
