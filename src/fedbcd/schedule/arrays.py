"""The schedule of a run as arrays, many rounds ahead: the same draws and clock as
`engine.Simulation`, without its events.

Time does not depend on numbers, and messages take no time; so where every phase has its q devices,
who works when follows from the draws alone: the q earliest arrivals of a server's phase, K_i steps
each, and the phase ends with the slowest of them. `tests/engines/test_arrays.py` compares every
round with the event loop's.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedbcd.algorithm import draws
from fedbcd.algorithm.method import Method
from fedbcd.protocol.clouds import AsyncCloud, Cloud, SyncCloud
from fedbcd.schedule.availability import at_server
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.events import Schedule, places_of_smallest
from fedbcd.schedule.times import Times, why_events

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
DRAWN_AHEAD = 2**18  # arrivals in one block
MANY_MEMBERS = 10_000  # members of a server, whose arrivals are looked at one server after another


@dataclass(frozen=True, slots=True)
class Jobs:
    """Work of some devices, server by server; a job with 0 steps has been done before."""

    device: Ints
    session: Ints
    steps: Ints
    server: Ints

    @property
    def packed(self) -> Ints:
        """(4, N): device, session, steps, server."""
        return np.stack([self.device, self.session, self.steps, self.server])


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """One round of the coordinator: what the devices of the servers it mixes have done since those
    servers' last mix.
    """

    clock: float
    servers: Ints  # in the order in which they were ready
    jobs: Jobs
    offline: Jobs | None  # FedBCD-I: offline rounds, before the others


class _Phase:
    """A server's response-and-update phase: its q devices, and when each has uploaded."""

    __slots__ = ("device", "done", "ends", "session", "steps")

    def __init__(self, device: Ints, session: Ints, steps: Ints, ends: Floats) -> None:
        self.device, self.session, self.steps, self.ends = device, session, steps, ends
        self.done = np.zeros(len(device), dtype=bool)

    @property
    def end(self) -> float:
        return float(self.ends.max())


def why_not_ahead(servers: Sequence[Sequence[int]], schedule: Schedule, cloud: Cloud) -> str | None:
    """Why this schedule needs the event loop; None: it does not."""
    if schedule.joins or schedule.leaves:
        return "devices join or leave"
    if type(cloud) not in (SyncCloud, AsyncCloud):
        return f"the cloud is {cloud.name}"
    if schedule.method.takes_time_offline:
        return "offline rounds take their time (offline_time = 'timed')"
    if schedule.method.offline and not cloud.sync:
        return "FedBCD-I trains offline between the mixes of an asynchronous cloud"
    if schedule.availability is not None:
        return "who is available follows a rule (`availability`)"
    if schedule.method.at_once is not None:
        return "devices of one phase work on in the next (`at_once`)"
    if schedule.deadline is not None:
        return "phases have a deadline, and devices work on in the next (`deadline`)"
    if len({len(members) for members in servers}) > 1:
        return "servers have different numbers of devices"
    if not isinstance(schedule.active, int):
        return "servers wait for different numbers of uploads (`active`)"
    return why_events(schedule.clock)


class Outline:
    """Plans round after round. `now`, `round` and `activations` are where it stands."""

    def __init__(
        self,
        servers: Sequence[Sequence[int]],
        schedule: Schedule,
        cloud: Cloud,
        done: Effort | None = None,
    ) -> None:
        self.now = 0.0
        self.round = 0
        self.activations = 0
        self.done = done or Effort()
        self._schedule = schedule
        self._times = Times(schedule.clock, schedule.seed, servers, schedule.sent)
        self._members = np.sort(np.array(servers, dtype=np.int64), axis=1)  # (V, M)
        self._q = min(at_server(schedule.active, 0), self._members.shape[1])
        self._first = cloud.first if isinstance(cloud, AsyncCloud) else 0  # B; 0: all wait for all
        self._ahead = max(1, DRAWN_AHEAD // self._members.size)
        self._counts = np.zeros_like(self._members)  # activations so far, in what has been drawn
        self._sessions = np.zeros_like(self._members)  # FedBCD-I
        self._offline = np.zeros_like(
            self._members
        )  # FedBCD-I: offline rounds since the last contact
        self._passes = np.array(schedule.method.passes, dtype=np.int64)
        self._blocks: dict[int, _ArrivalBlock] = {}
        self._phase = [0] * len(servers) if self._first else []  # Sync-cloud: the round
        self._all = np.arange(len(servers))
        self._server_of_job = np.repeat(self._all, self._q)
        self._ready: list[tuple[float, int]] = []  # a heap: when each server's phase ends
        self._waiting: list[int] = []
        self._open: dict[int, _Phase] = {}

    @property
    def sync(self) -> bool:
        """Whether there is one global model."""
        return self._first == 0

    @property
    def most_jobs(self) -> int:
        """The most uploads that can be under way at a time."""
        return int(len(self._members) * self._q)

    def next_round(self) -> PlannedRound:
        """Go on until the coordinator has mixed once more."""
        if self._schedule.method.offline:
            return self._next_with_offline(self._schedule.method)
        if self._first == 0:
            return self._next_of_all()
        if self.round == 0:
            for server in range(len(self._members)):
                self._open_phase(server)
        while len(self._waiting) < self._first:
            self.now, server = heapq.heappop(self._ready)
            self._waiting.append(server)
        servers, self._waiting = self._waiting, []
        jobs = _together({server: self._open.pop(server) for server in servers})
        self._uploaded(jobs)
        for server in servers:
            self._open_phase(server)
        self.round += 1
        return PlannedRound(self.now, np.array(servers, dtype=np.int64), jobs, None)

    def go_to(self, round_: int) -> None:
        """Go where the models of a checkpoint are: after `round_` rounds, with all uploads until
        then counted.
        """
        while self.round < round_:
            self.next_round()
        self.settle()

    def _next_of_all(self) -> PlannedRound:
        """Sync-cloud: all servers open their phases at the same time, and the round ends with the
        last of them.
        """
        drawn, row = self._drawn(self.round)
        self.now = float(((self.now + drawn.delay[row]) + drawn.work[row]).max())
        self.round += 1
        jobs = Jobs(
            drawn.device[row].ravel(),
            drawn.session[row].ravel(),
            drawn.steps[row].ravel(),
            self._server_of_job,
        )
        self._uploaded(jobs)
        return PlannedRound(self.now, self._all, jobs, None)

    def settle(self) -> Jobs | None:
        """What devices of unfinished phases have uploaded by now; it will come with 0 steps in its
        round.
        """
        chosen = {}
        for server, phase in self._open.items():
            late = (phase.ends <= self.now) & ~phase.done
            if late.any():
                chosen[server] = _Phase(
                    phase.device, phase.session, np.where(late, phase.steps, 0), phase.ends
                )
                phase.done |= late
        jobs = _together(chosen) if chosen else None
        if jobs is not None:
            self._uploaded(jobs)
        return jobs

    def _uploaded(self, jobs: Jobs) -> None:
        self.activations += int(np.count_nonzero(jobs.steps))
        self._count(jobs, offline=False)

    def _count(self, jobs: Jobs, *, offline: bool) -> None:
        for steps in np.unique(jobs.steps[jobs.steps > 0]).tolist():
            self.done.add(jobs.device[jobs.steps == steps].tolist(), steps, offline=offline)

    # ---------------------------------------------------------------------------------------------
    # FedBCD and baselines
    def _open_phase(self, server: int) -> None:
        drawn, row = self._drawn(self._phase[server])
        self._phase[server] += 1
        ends = (self.now + drawn.delay[row, server]) + drawn.work[row, server]
        self._open[server] = phase = _Phase(
            drawn.device[row, server], drawn.session[row, server], drawn.steps[row, server], ends
        )
        heapq.heappush(self._ready, (phase.end, server))

    def _drawn(self, phase: int) -> tuple["_ArrivalBlock", int]:
        """The block of draws that a phase is in, and its place there."""
        block, row = divmod(phase, self._ahead)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
            for old in [
                k for k in self._blocks if k < min(self._phase, default=phase) // self._ahead
            ]:
                del self._blocks[old]
        return self._blocks[block], row

    def _draw(self, block: int) -> "_ArrivalBlock":
        """Who is active in some phases of all servers, and for how long."""
        phases = np.arange(block * self._ahead, (block + 1) * self._ahead)[:, None, None]
        delay = self._times.arrivals(self._members[None], phases, self.now)
        chosen = _earliest(delay, self._q)  # (T, V, q)
        device = np.take_along_axis(np.broadcast_to(self._members[None], delay.shape), chosen, -1)
        activation = np.empty_like(device)
        for row, members in zip(activation, chosen, strict=True):
            row[:] = np.take_along_axis(self._counts, members, -1)
            np.put_along_axis(self._counts, members, row + 1, -1)
        drawn = self._steps(device, activation)
        return _ArrivalBlock(
            device,
            activation,
            drawn * self._pass_of(device, offline=False),
            np.take_along_axis(delay, chosen, -1),
            self._times.work(device, activation, drawn, self.now),
        )

    def _steps(self, device: Ints, session: Ints) -> Ints:
        """How many steps, or passes over the data, a session has."""
        return self._between(self._schedule.method.steps, draws.STEPS, device, session)

    def _between(self, bounds: tuple[int, int], stream: int, device: Ints, number: Ints) -> Ints:
        low, high = bounds
        return low + draws.below(
            draws.address(self._schedule.seed, stream, device, number), high - low + 1
        )

    def _pass_of(self, device: Ints, *, offline: bool) -> Ints:
        """Steps in one of them."""
        has = self._schedule.method.has_passes(offline=offline)
        return self._passes[device] if has else np.ones_like(device)

    # ---------------------------------------------------------------------------------------------
    # FedBCD-I
    def _next_with_offline(self, method: Method) -> PlannedRound:
        """Sync-cloud: all available devices train offline, then the q earliest of each server are
        pulled towards z.
        """
        keep = max(method.available_of(self._members.shape[1]), self._q)
        u = draws.unit(
            draws.address(
                self._schedule.seed, draws.AVAILABLE, self._members, np.array([self.round])
            )
        )
        available = np.sort(_earliest(u, keep), axis=-1)  # (V, M') places among the members
        offline = self._train_offline(available, method.offline_limit or 0)
        members = np.take_along_axis(self._members, available, -1)
        delay = self._times.arrivals(members, np.array([self.round]), self.now)
        chosen = _earliest(delay, self._q)
        places = np.take_along_axis(available, chosen, -1)
        device = np.take_along_axis(members, chosen, -1)
        activation, session = (
            np.take_along_axis(table, places, -1) for table in (self._counts, self._sessions)
        )
        session = np.maximum(session - 1, 0)
        if method.pull_steps is None:
            drawn = self._steps(device, session)
        else:
            drawn = self._between(method.pull_steps, draws.PULLS, device, activation)
        steps = drawn * self._pass_of(device, offline=False)
        ends = (self.now + np.take_along_axis(delay, chosen, -1)) + self._times.work(
            device, activation, drawn, self.now
        )
        np.put_along_axis(self._counts, places, activation + 1, -1)
        np.put_along_axis(self._offline, places, 0, -1)
        servers = np.argsort(ends.max(-1), kind="stable")
        jobs = Jobs(
            device[servers].ravel(),
            session[servers].ravel(),
            steps[servers].ravel(),
            np.repeat(servers, self._q),
        )
        self.now = float(ends.max())
        self.round += 1
        self._uploaded(jobs)
        self._count(offline, offline=True)
        return PlannedRound(self.now, servers, jobs, offline)

    def _train_offline(self, available: Ints, limit: int) -> Jobs:
        """One offline round of each available device that is not suspended."""
        place = np.zeros(self._members.shape, dtype=bool)
        np.put_along_axis(place, available, True, -1)
        place &= self._offline < limit
        device, session = self._members[place], self._sessions[place]
        self._sessions[place] += 1
        self._offline[place] += 1
        steps = self._steps(device, session) * self._pass_of(device, offline=True)
        return Jobs(device, session, steps, place.nonzero()[0])


@dataclass(frozen=True, slots=True)
class _ArrivalBlock:
    """Some phases of all servers: (T, V, q) each."""

    device: Ints
    session: Ints
    steps: Ints
    delay: Floats
    work: Floats


def _earliest(delay: Floats, number: int) -> Ints:
    """The places of the smallest along the last axis, in order; of equal ones the first."""
    width = delay.shape[-1]
    if width >= MANY_MEMBERS:
        rows = [(row, places_of_smallest(row, number)) for row in delay.reshape(-1, width)]
        chosen = [near[np.argsort(row[near], kind="stable")[:number]] for row, near in rows]
        return np.stack(chosen).reshape(*delay.shape[:-1], number)
    if number < width and width > 64:
        near = np.sort(np.argpartition(delay, number - 1, axis=-1)[..., :number], axis=-1)
        order = np.argsort(np.take_along_axis(delay, near, -1), axis=-1, kind="stable")
        return np.take_along_axis(near, order, -1)
    return np.argsort(delay, axis=-1, kind="stable")[..., :number]


def _together(phases: dict[int, _Phase]) -> Jobs:
    steps = [np.where(phase.done, 0, phase.steps) for phase in phases.values()]
    server = np.repeat(
        np.array([*phases], dtype=np.int64), [len(phase.device) for phase in phases.values()]
    )
    columns = (
        np.concatenate([getattr(phase, name) for phase in phases.values()])
        for name in ("device", "session")
    )
    device, session = columns
    return Jobs(device, session, np.concatenate(steps), server)
