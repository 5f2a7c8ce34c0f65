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
from fedbcd.protocol.messages import COORDINATOR, device_actor, server_actor
from fedbcd.spec import RunSpec

UNTIL = 4.0  # seconds of trouble
STRUCK = 0.35  # of the seeds have wrong stores
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


APART = (Fault.LOST_STORE, Fault.OLD_STORE, Fault.SPOILED, Fault.CLOCK_LEAP)  # drawn by themselves


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
_GRAPH = fb.GraphCloud([[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
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
    case: int, members: int, active: int, late: frozenset[int] = frozenset()
) -> Blueprint:
    """A plan with a model of three numbers; the `late` devices are no members before they join."""
    _, algorithm, cloud = CASES[case]
    devices = SERVERS * members
    groups = [[*range(n * members, (n + 1) * members)] for n in range(SERVERS)]
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, 0.25)
    nn.init.constant_(module.bias, -0.5)
    if isinstance(algorithm, fb.FedBCD | fb.FedBCDI):
        algorithm = replace(algorithm, penalty=[gamma_of(d) for d in range(devices)])
    spec = RunSpec(algorithm, cloud, active=active, joins=dict.fromkeys(late, 1))
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

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        """From a seed alone."""
        chance = random.Random(f"schedule {seed}")
        case, members = seed % len(CASES), chance.choice([1, 2, 2, 3])
        active = chance.randint(1, members)
        left_out = (
            [Fault.LOST_DISK, Fault.OLD_BACKUP] if isinstance(CASES[case][1], fb.FedBCDI) else []
        )
        left_out += (
            [Fault.CHANGE] if members == 1 else []
        )  # the last member of a server cannot leave
        kinds = [fault for fault in Fault if fault not in (*left_out, *APART)]
        chosen = chance.sample(
            kinds, chance.randint(1, len(kinds))
        )  # few kinds often, so that each also comes alone
        late = frozenset(
            d
            for d in range(SERVERS * members)
            if d % members and Fault.CHANGE in chosen and chance.random() < 0.3
        )
        plan = blueprint_of(case, members, active, late)
        faults = [_draw(chance, chance.choice(chosen), plan) for _ in range(chance.randint(2, 14))]
        faults += _wrong_stores(random.Random(f"stores {seed}"))
        faults += _spoiled(random.Random(f"spoiled {seed}"), plan)
        faults += _leaps(random.Random(f"leaps {seed}"), plan)
        together = chance.choice([0.0, 0.05, 0.3])
        return cls(
            seed,
            case,
            members,
            active,
            late,
            together,
            tuple(sorted(faults, key=lambda planned: planned.at)),
        )

    @property
    def blueprint(self) -> Blueprint:
        """The plan of the deployment."""
        return blueprint_of(self.case, self.members, self.active, self.late)


def _wrong_stores(chance: random.Random) -> list[Planned]:
    """Drawn apart from the others: few seeds have them, since little else happens where a server is
    missing.
    """
    faults = (
        [chance.choice([Fault.LOST_STORE, Fault.OLD_STORE]) for _ in range(chance.randint(1, 2))]
        if chance.random() < STRUCK
        else []
    )
    actors = [COORDINATOR, *(server_actor(n) for n in range(SERVERS))]
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


def _spoiled(chance: random.Random, plan: Blueprint) -> list[Planned]:
    """Drawn apart as well: a third of the seeds have them."""
    count = chance.randint(1, 3) if chance.random() < 1 / 3 else 0
    return [_draw(chance, Fault.SPOILED, plan) for _ in range(count)]


def _leaps(chance: random.Random, plan: Blueprint) -> list[Planned]:
    """Drawn apart as well: half of the seeds have them."""
    return [_draw(chance, Fault.CLOCK_LEAP, plan) for _ in range(chance.choice([0, 0, 0, 1, 2, 4]))]


def _draw(chance: random.Random, fault: Fault, plan: Blueprint) -> Planned:
    actors = [
        COORDINATOR,
        *(server_actor(n) for n in range(SERVERS)),
        *(device_actor(d) for d in range(plan.devices)),
    ]
    where, amount, point = chance.choice(actors), chance.random(), None
    match fault:
        case Fault.PARTITION | Fault.RESET:
            pairs = [(device_actor(d), server_actor(plan.home_of(d))) for d in range(plan.devices)]
            pair = chance.choice(
                [*pairs, *((server_actor(n), COORDINATOR) for n in range(SERVERS))]
            )
            where = ">".join(pair if chance.random() < 0.5 else pair[::-1])
        case Fault.CRASH_AT_STEP:
            point = chance.choice([*Failpoint])
        case Fault.LOST_DISK | Fault.OLD_BACKUP | Fault.GIVE_UP | Fault.CHANGE | Fault.SPOILED:
            where = device_actor(chance.randrange(plan.devices))
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
