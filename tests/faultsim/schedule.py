"""What goes wrong, when and where: drawn from one seed before anything happens, so that parts of it
can be left out.
"""

import random
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from torch import nn

import fedbcd as fb
from fedbcd.engines.deploy.processes.failpoints import Failpoint
from fedbcd.engines.deploy.roles.blueprint import Blueprint
from fedbcd.protocol.messages import COORDINATOR, Actor, device_actor, server_actor
from fedbcd.spec import RunSpec

UNTIL = 3.0  # seconds of trouble
MINUTES_UNTIL, MINUTES_PACE = 120.0, 5.0  # in some seeds, where everybody also takes longer
RARE = 50  # one seed in so many has many servers and devices, and one has trouble of minutes
MANY, LARGE_UNTIL = (10, 6), 2.0  # servers, and devices of each; seconds of trouble there
MINUTES, DAYS, YEARS = 1e3, 1e6, 1e9  # seconds that a clock may leap by, at most


class Fault(Enum):
    """What can go wrong."""

    LOSS = "letters are lost"
    DELAY = "letters are slow"
    REORDER = "letters overtake each other"
    DUPLICATE = "letters come twice"
    PARTITION = "one way of a link is dead"
    RESET = "a connection breaks in the middle of a letter"
    CRASH = "a role dies between two events and comes back"
    CRASH_AT_STEP = (
        "a role dies at a named step inside an event; what was not synced is lost or torn"
    )
    FULL_DISK = "a disk is full for a while"
    CLOCK_JUMP = "a clock jumps"
    CLOCK_LEAP = (
        "a clock is wrong by minutes, days or years for a while, and the role begins with it, or"
        " goes on"
    )
    PAUSE = "a process stands still and goes on"
    GIVE_UP = "a server takes a working device for lost"
    LOST_DISK = "a device comes back with an empty disk"
    OLD_BACKUP = "a device comes back with an old copy of its disk"
    SPOILED = (
        "a device's training gives values that are not finite, or a model that is far out of range"
    )
    CHANGE = "a device joins, leaves, or comes back as a member"
    LOST_STORE = (
        "a server or the coordinator comes up with an empty disk; later its own is put back"
    )
    OLD_STORE = (
        "a server or the coordinator comes up with an old copy of its disk; later its own is put"
        " back"
    )
    DAMAGED_DISK = "a role's disk changes a bit of a file; later that file is put back"
    DEAD_LINK = "a link is dead both ways and stays so, until one end notices and connects anew"
    SLOW_LINE = "a line takes as long for a model as training does, from the start to the end"
    HOSTILE = "a member says what it must not: for others, of the future, or what is no model"
    TWIN = "two processes have one device's identity and copies of its disk, and take turns"
    REBUILT = (
        "the coordinator loses its disk for good; its log is put together from those of its servers"
    )
    RECOVERED = (
        "a server loses its disk, or has an old copy, for good; it is recovered from its"
        " coordinator's log"
    )
    CUT_OFF = "a role hears nobody and is heard by nobody, for up to a minute"


# drawn by themselves: kind -> the share of the seeds that have it, and how often at most
APART = {
    Fault.LOST_STORE: (0.0, 0),  # with the next
    Fault.OLD_STORE: (0.35, 2),
    Fault.SPOILED: (1 / 3, 3),
    Fault.CLOCK_LEAP: (0.5, 4),
    Fault.DAMAGED_DISK: (0.15, 2),
    Fault.DEAD_LINK: (0.15, 3),
    Fault.SLOW_LINE: (0.1, 2),
    Fault.HOSTILE: (0.2, 4),
    Fault.TWIN: (0.12, 1),
    Fault.RECOVERED: (0.2, 2),
    Fault.REBUILT: (0.15, 1),
    Fault.CUT_OFF: (0.0, 0),  # where trouble is of minutes
}
SWAPPED = (
    Fault.LOST_DISK,
    Fault.OLD_BACKUP,
    Fault.LOST_STORE,
    Fault.OLD_STORE,
    Fault.TWIN,
    Fault.RECOVERED,
    Fault.REBUILT,
)  # a disk is another one afterwards


@dataclass(frozen=True)
class Planned:
    """One fault."""

    at: float
    fault: Fault
    where: str
    length: float
    amount: float
    point: Failpoint | None = None

    def __str__(self) -> str:
        point = "" if self.point is None else f" {self.point.value}"
        return (
            f"{self.at:6.3f} {self.fault.name:13} {self.where:24} for {self.length:.2f} s,"
            f" {self.amount:+.2f}{point}"
        )


_BCD = fb.FedBCD(device_step=0.05, batch=4, steps=(1, 3))
_BCDI = fb.FedBCDI(device_step=0.05, batch=4, steps=(1, 3), offline_limit=2)
_TWICE = fb.FedBCD(device_step=0.05, batch=4, steps=(1, 3), cloud_iterations=2)


def ring(servers: int, step: int, kept: float) -> list[list[float]]:
    """A mixing matrix that is not its own transpose."""
    return [
        [kept * (n == m) + (1 - kept) * (m == (n + step) % servers) for m in range(servers)]
        for n in range(servers)
    ]


_GRAPH = fb.GraphCloud([ring(3, 1, 0.5), ring(3, 2, 0.25)])
CASES: list[tuple[str, fb.Algorithm, fb.Cloud]] = [
    ("fedbcd-sync", _BCD, fb.SyncCloud()),
    ("fedbcd-async", _BCD, fb.AsyncCloud(first=2)),
    ("fedbcd-async-1", _BCD, fb.AsyncCloud(first=1)),
    ("fedbcd-rigorous", _BCD, fb.RigorousCloud(first=2)),
    ("fedbcd-graph", _BCD, _GRAPH),
    ("fedbcd-i-sync", _BCDI, fb.SyncCloud()),
    ("fedbcd-i-async", _BCDI, fb.AsyncCloud(first=2)),
    ("fedbcd-i-rigorous", _BCDI, fb.RigorousCloud(first=1)),
    ("fedavg-sync", fb.FedAvg(device_step=0.05, batch=4, steps=(1, 3)), fb.SyncCloud()),
    ("fedprox-async", fb.FedProx(device_step=0.05, batch=4, steps=(1, 3)), fb.AsyncCloud(first=2)),
    ("twice-sync", _TWICE, fb.SyncCloud()),
    ("twice-async", _TWICE, fb.AsyncCloud(first=2)),
    ("twice-async-1", _TWICE, fb.AsyncCloud(first=1)),
    ("twice-rigorous", _TWICE, fb.RigorousCloud(first=2)),
]
SERVERS = 3


def gamma_of(device: int) -> float:
    """They differ."""
    return 0.5 + 0.25 * (device * 3 % 5)


@cache
def blueprint_of(
    case: int,
    members: int,
    active: int,
    late: frozenset[int] = frozenset(),
    servers: int = SERVERS,
    deadline: fb.Deadline | None = None,
) -> Blueprint:
    """A plan with a model of three numbers; the `late` devices are no members before they join."""
    _, algorithm, cloud = CASES[case]
    devices = servers * members
    groups = [[*range(n * members, (n + 1) * members)] for n in range(servers)]
    if isinstance(cloud, fb.GraphCloud):
        cloud = fb.GraphCloud([ring(servers, 1, 0.5), ring(servers, 2, 0.25)])
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, 0.25)
    nn.init.constant_(module.bias, -0.5)
    if isinstance(algorithm, fb.FedBCD | fb.FedBCDI):
        algorithm = replace(algorithm, penalty=[gamma_of(d) for d in range(devices)])
    joins = dict.fromkeys(late, 1)
    spec = RunSpec(algorithm, cloud, active=active, joins=joins, deadline=deadline)
    return Blueprint.make(spec, active, groups, [4 + d for d in range(devices)], module)


@dataclass(frozen=True)
class Schedule:
    """A deployment and its troubles."""

    seed: int
    case: int
    members: int
    active: int
    late: frozenset[int]
    together: (
        float  # seconds for which roles collect letters that become durable together; 0: each alone
    )
    faults: tuple[Planned, ...]
    servers: int = SERVERS
    until: float = UNTIL
    pace: float = 1.0  # by which everything that is no trouble takes longer
    deadline: fb.Deadline | None = None  # of phases

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        """From a seed alone."""
        chance = random.Random(f"schedule {seed}")
        case, members, servers = seed % len(CASES), chance.choice([1, 1, 2, 2, 3]), SERVERS
        is_large, is_long = is_rare(seed, 25), is_rare(seed, 10)
        if is_large:
            servers, members = MANY
        active = chance.randint(1, members)
        chosen = _chosen(chance, members)
        late = frozenset(
            d
            for d in range(servers * members)
            if d % members and Fault.CHANGE in chosen and chance.random() < 0.3
        )
        deadline = _deadline(random.Random(f"deadline {seed}"), active)
        plan = blueprint_of(case, members, active, late, servers, deadline)
        faults = [_draw(chance, chance.choice(chosen), plan) for _ in range(chance.randint(2, 14))]
        together = chance.choice([0.0, 0.05, 0.3])
        faults += _apart(seed, plan, faults)
        until, pace = LARGE_UNTIL if is_large else UNTIL, 1.0
        if is_long:
            until, pace = MINUTES_UNTIL, MINUTES_PACE
            chance = random.Random(f"cut off {seed}")
            faults += [_draw(chance, Fault.CUT_OFF, plan) for _ in range(3)]
        faults = [_scaled(planned, until / UNTIL, is_long) for planned in faults]
        ordered = tuple(sorted(faults, key=lambda planned: planned.at))
        return cls(
            *(seed, case, members, active, late, together, ordered),
            *(servers, until, pace, deadline),
        )

    @property
    def blueprint(self) -> Blueprint:
        """The plan of the deployment."""
        who = self.case, self.members, self.active, self.late, self.servers
        return blueprint_of(*who, self.deadline)


def is_rare(seed: int, shift: int) -> bool:
    """One in `RARE`, of every case."""
    return (seed + shift) % RARE == (seed // RARE) % RARE


def _deadline(chance: random.Random, active: int) -> fb.Deadline | None:
    """A fifth of the seeds have one; some of them are early."""
    after, least, spare = chance.uniform(0.2, 2.0), chance.randint(1, active), chance.randint(0, 2)
    return fb.Deadline(round(after, 2), least, spare) if chance.random() < 0.2 else None


def _chosen(chance: random.Random, members: int) -> list[Fault]:
    """Few kinds often, so that each also comes alone."""
    # the last member of a server cannot leave
    left_out = [*APART, *([Fault.CHANGE] if members == 1 else [])]
    kinds = [fault for fault in Fault if fault not in left_out]
    return chance.sample(kinds, chance.randint(1, len(kinds)))


def _scaled(planned: Planned, factor: float, lasts: bool) -> Planned:
    stretched = lasts and planned.fault is not Fault.SLOW_LINE
    length = planned.length * factor if stretched else planned.length
    return replace(planned, at=planned.at * factor, length=length)


def _apart(seed: int, plan: Blueprint, others: list[Planned]) -> list[Planned]:
    """Each kind drawn by itself, so that one more of them leaves the others as they were."""
    faults = _wrong_stores(random.Random(f"stores {seed}"), plan)
    for fault, (share, most) in APART.items():
        chance = random.Random(f"{fault.name} {seed}")
        if chance.random() < share and fault not in (Fault.LOST_STORE, Fault.OLD_STORE):
            faults += [_draw(chance, fault, plan) for _ in range(chance.randint(1, most))]
    # a copy of a damaged disk is damaged when nobody knows it; two that trained offline differ
    swapped = {planned.where for planned in (*faults, *others) if planned.fault in SWAPPED}
    return [
        planned
        for planned in faults
        if not (planned.fault is Fault.DAMAGED_DISK and planned.where in swapped)
        and not (planned.fault is Fault.TWIN and plan.method.offline)
    ]


def _wrong_stores(chance: random.Random, plan: Blueprint) -> list[Planned]:
    """Few seeds have them, since little else happens where a server is missing."""
    faults = (
        [chance.choice([Fault.LOST_STORE, Fault.OLD_STORE]) for _ in range(chance.randint(1, 2))]
        if chance.random() < APART[Fault.OLD_STORE][0]
        else []
    )
    actors = [COORDINATOR, *(server_actor(n) for n in range(len(plan.servers)))]
    return [
        Planned(
            round(chance.uniform(0.0, UNTIL), 3),
            fault,
            chance.choice(actors),
            round(chance.uniform(0.2, 2.0), 2),
            chance.random(),
        )
        for fault in faults
    ]


def links_of(plan: Blueprint) -> list[tuple[Actor, Actor]]:
    """All: who connects, and to whom."""
    pairs = [(device_actor(d), server_actor(plan.home_of(d))) for d in range(plan.devices)]
    return [*pairs, *((server_actor(n), COORDINATOR) for n in range(len(plan.servers)))]


def _draw(chance: random.Random, fault: Fault, plan: Blueprint) -> Planned:
    actors = [
        COORDINATOR,
        *(server_actor(n) for n in range(len(plan.servers))),
        *(device_actor(d) for d in range(plan.devices)),
    ]
    where, amount, point = chance.choice(actors), chance.random(), None
    match fault:
        case Fault.PARTITION | Fault.RESET | Fault.DEAD_LINK | Fault.SLOW_LINE:
            pair = chance.choice(links_of(plan))
            where = ">".join(pair if chance.random() < 0.5 else pair[::-1])
        case Fault.CRASH_AT_STEP:
            point = chance.choice([*Failpoint])
        case (
            Fault.LOST_DISK
            | Fault.OLD_BACKUP
            | Fault.GIVE_UP
            | Fault.CHANGE
            | Fault.SPOILED
            | Fault.TWIN
        ):
            where = device_actor(chance.randrange(plan.devices))
        case Fault.HOSTILE:
            where = chance.choice(actors[1:])
        case Fault.REBUILT:
            where = COORDINATOR
        case Fault.RECOVERED:
            where = server_actor(chance.randrange(len(plan.servers)))
        case Fault.CLOCK_JUMP:
            amount = chance.choice([-1, 1]) * 10 ** chance.uniform(-3, 4)
        case Fault.CLOCK_LEAP:
            amount *= chance.choice([-1, 1]) * chance.choice([MINUTES, DAYS, YEARS])
    return Planned(
        round(chance.uniform(0.0, UNTIL), 3),
        fault,
        where,
        round(chance.uniform(0.05, 1.5), 2),
        round(amount, 3),
        point,
    )
