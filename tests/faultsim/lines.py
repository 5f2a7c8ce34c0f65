"""Hosts whose lines are made bad packet by packet: each in a network namespace of its own, with one
interface (TUN) that leads to this program, which passes packets on, late, seldom or not at all.

It needs neither netem nor iptables. `python -m faultsim.lines NAMESPACE=ADDRESS ...` reads orders
on its input, one JSON object a line: `{"host": 3, ...}` and what is to be of that host's line from
now on. Left out means as it should be, so `{"host": 3}` repairs all; `{"host": 3, "look": true}`
changes nothing. The answer is how many bytes have passed from and to this host.

rate      bytes a second each way; behind it a buffer of BUFFER bytes, beyond which packets are lost
delay     seconds each way
loss      part of the packets that is lost
up, down  true: nothing from, to this host passes
forget    true: what was connected over this line until now passes no more (a firewall or NAT has
          forgotten it); this stays, also when the line is otherwise good
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from faultsim.told import environment

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
TCP = 6
BUFFER = 256 * 1024
MOST_PACKET = 65_536
NETWORK, DEVICE = "10.78.0", "line0"


def move_into(namespace: str) -> None:
    """This process is on that host from now on."""
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot move into {namespace}")
    finally:
        os.close(handle)


def ip(*words: str) -> None:
    """The command of that name."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


# ------------------------------------------------------------------------------------------------
# the program
@dataclass
class Way:
    """One direction of a line."""

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0
    dead: bool = False
    free_at: float = 0.0

    def leaves(self, size: int, now: float) -> float | None:
        """When a packet arrives at the other end; None: it does not."""
        if self.dead or random.random() < self.loss:
            return None
        if self.rate:
            begins = max(self.free_at, now)
            if (begins - now) * self.rate > BUFFER:
                return None
            self.free_at = now = begins + size / self.rate
        return now + self.delay


@dataclass
class Line:
    """One host's."""

    tun: int
    up: Way = field(default_factory=Way)
    down: Way = field(default_factory=Way)
    flows: set[bytes] = field(default_factory=set)
    forgotten: set[bytes] = field(default_factory=set)
    bytes_up: int = 0  # that have been passed on, with all headers
    bytes_down: int = 0

    def obey(self, order: dict[str, Any]) -> None:
        """An order in full."""
        same = {name: float(order.get(name, 0.0)) for name in ("rate", "delay", "loss")}
        self.up = Way(**same, dead=order.get("up", False))
        self.down = Way(**same, dead=order.get("down", False))
        if order.get("forget"):
            self.forgotten |= self.flows
            self.flows = set()

    def passes(self, packet: bytes) -> bool:
        """Whether this line knows the connection that a packet is of."""
        flow = flow_of(packet)
        if flow is None:
            return True
        if _is_first(packet):
            self.forgotten.discard(flow)
        if flow in self.forgotten:
            return False
        self.flows.add(flow)
        return True


def flow_of(packet: bytes) -> bytes | None:
    """Both ends of a TCP connection, in one order for both ways."""
    if packet[0] >> 4 != 4 or packet[9] != TCP:
        return None
    start = (packet[0] & 15) * 4
    ends = (
        packet[12:16] + packet[start : start + 2],
        packet[16:20] + packet[start + 2 : start + 4],
    )
    return b"".join(sorted(ends))


def _is_first(packet: bytes) -> bool:
    start = (packet[0] & 15) * 4
    return packet[start + 13] & 0x12 == 0x02  # SYN without ACK


class Router:
    """Passes packets on."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.lines: list[Line] = []
        for host in hosts:
            namespace, _, address = host.partition("=")
            self.lines.append(Line(open_tun(namespace)))
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", namespace, "link", "set", DEVICE, "up", "txqueuelen", "5000")
        self._due: list[tuple[float, int, int, int, bytes]] = []  # when, nth, from, to, packet
        self._nth = 0

    def run(self) -> None:
        """Until the input ends."""
        tuns = {line.tun: number for number, line in enumerate(self.lines)}
        rest = b""
        while True:
            now = time.monotonic()
            pause = max(self._due[0][0] - now, 0.0) if self._due else 1.0
            readable, _, _ = select.select([0, *tuns], [], [], min(pause, 1.0))
            for handle in readable:
                if handle != 0:
                    self._take_all(handle, tuns[handle])
                    continue
                said = os.read(0, 65536)
                if not said:
                    return
                *orders, rest = (rest + said).split(b"\n")
                for text in orders:
                    order = json.loads(text)
                    line = self.lines[order["host"]]
                    if not order.get("look"):
                        line.obey(order)
                    print(f"{line.bytes_up} {line.bytes_down}", flush=True)
            self._deliver(time.monotonic())

    def _take_all(self, handle: int, source: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(256):
                self._take(os.read(handle, MOST_PACKET), source)

    def _take(self, packet: bytes, source: int) -> None:
        if packet[0] >> 4 != 4:
            return
        target = packet[19] % 100 - 1  # 10.78.0.1 and 10.78.0.101 are the first host
        if not 0 <= target < len(self.lines) or target == source:
            return
        line = self.lines[source]
        if line.passes(packet):
            self._later(line.up.leaves(len(packet), time.monotonic()), source, target, packet)

    def _later(self, when: float | None, source: int, target: int, packet: bytes) -> None:
        if when is not None:
            self._nth += 1
            heapq.heappush(self._due, (when, self._nth, source, target, packet))

    def _deliver(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            when, _, source, target, packet = heapq.heappop(self._due)
            line = self.lines[target]
            if source < 0:  # it has come all the way
                line.bytes_down += len(packet)
                with suppress(OSError):
                    os.write(line.tun, packet)
            elif line.passes(packet):
                self.lines[source].bytes_up += len(packet)
                self._later(line.down.leaves(len(packet), when), -1, target, packet)


def open_tun(namespace: str) -> int:
    """The interface of a host; what it sends is read here."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    move_into(namespace)
    try:
        handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    finally:
        ctypes.CDLL(None).setns(here, CLONE_NEWNET)
        os.close(here)
    return handle


# ------------------------------------------------------------------------------------------------
# for tests
class Lines:
    """Hosts and the program between them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = [*hosts]
        self._name = f"fedbcd-{os.getpid()}"  # in children too
        self._made: list[str] = []
        self._router: subprocess.Popen[str] | None = None
        try:
            for host in hosts:
                self._make(self.namespace(host))
            self._start()
        except BaseException:
            self.close()
            raise

    def _make(self, namespace: str) -> None:
        ip("netns", "add", namespace)
        self._made.append(namespace)
        ip("-n", namespace, "link", "set", "lo", "up")

    def _start(self) -> None:
        words = [f"{self.namespace(host)}={self.address(host)}" for host in self.hosts]
        self._router = subprocess.Popen(
            [sys.executable, "-m", "faultsim.lines", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        if self._answer() != "ready":
            raise OSError("the program between the hosts has not started")

    def _answer(self) -> str:
        assert self._router is not None
        assert self._router.stdout is not None
        return self._router.stdout.readline().strip()

    def namespace(self, host: str) -> str:
        """The name of a host's own."""
        return f"{self._name}-{self.hosts.index(host)}"

    def address(self, host: str) -> str:
        """Where it is."""
        return f"{NETWORK}.{self.hosts.index(host) + 1}"

    def passed(self, host: str) -> tuple[int, int]:
        """Bytes from and to a host until now."""
        return self.set(host, look=True)

    def set(self, host: str, **order: Any) -> tuple[int, int]:
        """How a host's line is from now on; nothing: good. Bytes from and to it until now."""
        assert self._router is not None
        assert self._router.stdin is not None
        self._router.stdin.write(json.dumps({"host": self.hosts.index(host), **order}) + "\n")
        self._router.stdin.flush()
        up, down = map(int, self._answer().split())
        return up, down

    def move(self, host: str) -> None:
        """Another address, and the old one is gone (a device in another network)."""
        old, space = self.address(host), self.namespace(host)
        new = f"{NETWORK}.{self.hosts.index(host) + 101}"
        ip("-n", space, "address", "add", f"{new}/24", "dev", DEVICE)
        ip("-n", space, "address", "delete", f"{old}/24", "dev", DEVICE)
        with suppress(subprocess.CalledProcessError):  # a second one of a network goes with it
            ip("-n", space, "address", "add", f"{new}/24", "dev", DEVICE)

    def close(self) -> None:
        """Remove everything."""
        if self._router is not None:
            self._router.kill()
            self._router.communicate()
        for namespace in reversed(self._made):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", namespace)


def why_not(hosts: Sequence[str] = ("a", "b")) -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
        return "network namespaces with interfaces of one's own need Linux, root and /dev/net/tun"
    try:
        Lines(hosts).close()
    except (subprocess.CalledProcessError, OSError) as error:
        return f"network namespaces are not permitted here: {error}"
    return ""


if __name__ == "__main__":
    router = Router(sys.argv[1:])
    print("ready", flush=True)
    router.run()
