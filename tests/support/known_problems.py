"""Problems whose constants are known, run on the rigorous Async-cloud: what Theorem 1 promises
beside what happens.

Two problems on a box: least squares (a quadratic per device) and l2-regularised logistic
regression. For both, L_i, D_g, sigma and the rest are exact or rigorously bounded, so that
`theory.bounds` applies without estimates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedbcd.algorithm.methods import FedBCD
from fedbcd.algorithm.projection import Box
from fedbcd.compute.numbers import Numbers
from fedbcd.data.federation import Federation
from fedbcd.engines.participation import Participation, participation
from fedbcd.engines.setup import make_machines, make_numbers, make_reader, make_schedule
from fedbcd.protocol.clouds import RigorousCloud
from fedbcd.protocol.messages import Actor, Command, Event, StepModel, number_of
from fedbcd.record.timeline import Timeline
from fedbcd.schedule.delays import Clock, Floats
from fedbcd.schedule.driver import Driver
from fedbcd.schedule.events import Simulation
from fedbcd.schedule.work import Reader
from fedbcd.spec import RunSpec
from fedbcd.theory import certificates as theory
from fedbcd.theory.bounds import Problem, device_step_limit, server_step_limit
from fedbcd.theory.mixing import (
    MixingRate,
    ScheduleMemory,
    activation_period,
    connection_period,
    lemma_rate,
    mixing_matrices,
    schedule_memory,
)

SERVERS, MEMBERS, FIRST, ACTIVE = 4, 3, 3, 2
SIZE, SAMPLES = 4, 24  # parameters, samples per device
BORDER = 1.0  # X = [-1, 1]^4


@dataclass(frozen=True)
class Known:
    """A federation with its constants: the largest over the devices, each exact or an upper
    bound.
    """

    name: str
    federation: Federation
    smoothness: float  # L
    gradient: float  # D_g, on X
    sigma: float  # on the extended set
    excess: float  # Delta* at x(0) = 0
    penalty: float = 0.25
    momentum: float = 0.5

    @property
    def device_step(self) -> float:
        """eta_x, as large as Assumption 4(i) allows."""
        return device_step_limit(self.smoothness, self.penalty)

    def server_step(self, horizon: int, reach: float = 1.0) -> float:
        """eta_z = d/sqrt(T), d = reach/(gamma |Q|): with reach 1, T = 1 would be at the bound of
        Assumption 4(ii).
        """
        return reach * server_step_limit(self.penalty, MEMBERS) / math.sqrt(horizon)

    def problem(
        self,
        server_step: float,
        batch: int | None,
        mixing: MixingRate | ScheduleMemory,
        period: int,
    ) -> Problem:
        """The constants that the bounds need. g_i is convex, so rho = 0; all servers start
        alike.
        """
        return Problem(
            servers=SERVERS,
            members=MEMBERS,
            penalty=self.penalty,
            smoothness=self.smoothness,
            diameter=2 * BORDER * SIZE**0.5,
            gradient=self.gradient,
            excess=self.excess,
            noise=0.0 if batch is None else self.sigma / batch**0.5,
            device_step=self.device_step,
            momentum=self.momentum,
            server_step=server_step,
            mixing=mixing,
            period=period,
        )


# ------------------------------------------------------------------------------------------------
# problems
def quadratic(seed: int = 0) -> Known:
    """Least squares, g_i(x) = mean (a.x - b)^2 / 2: the Hessian is constant, and convex functions
    on a box are largest at its corners.
    """
    inputs, targets = _data(seed)
    federation = Federation(
        _zero_linear, _half_square, list(zip(inputs, targets, strict=True)), SERVERS
    )
    near, far = (
        _corners(BORDER),
        _corners(BORDER * (1 + 2 * 0.5)),
    )  # X, and X extended by momentum 0.5
    second = [a.T @ a / len(a) for a in inputs]
    cross = [a.T @ b[:, 0] / len(a) for a, b in zip(inputs, targets, strict=True)]
    least = [
        float(torch.linalg.lstsq(a, b).solution[:, 0] @ -c / 2 + b.square().mean() / 2)
        for a, b, c in zip(inputs, targets, cross, strict=True)
    ]
    start = [float(b.square().mean() / 2) for b in targets]
    return Known(
        "least squares",
        federation,
        smoothness=max(float(torch.linalg.eigvalsh(h)[-1]) for h in second),
        gradient=max(
            float((near @ h - c).norm(dim=1).max()) for h, c in zip(second, cross, strict=True)
        ),
        sigma=max(_largest_deviation(a, b[:, 0], far) for a, b in zip(inputs, targets, strict=True))
        ** 0.5,
        excess=2 * sum(s - low for s, low in zip(start, least, strict=True)),
    )


def logistic(seed: int = 0, ridge: float = 0.1) -> Known:
    """g_i(x) = mean log(1 + exp(-b a.x)) + ridge/2 ||x||^2, b = +-1: the Hessian is largest at 0, a
    sample's gradient at most ||a||.
    """
    inputs, noisy = _data(seed)
    targets = [torch.where(b > 0, 1.0, -1.0).double() for b in noisy]
    federation = Federation(
        lambda: _Ridge(ridge), _logistic_loss, list(zip(inputs, targets, strict=True)), SERVERS
    )
    second = [a.T @ a / len(a) for a in inputs]
    return Known(
        "logistic regression",
        federation,
        smoothness=max(float(torch.linalg.eigvalsh(h)[-1]) / 4 for h in second) + ridge,
        gradient=max(float(a.norm(dim=1).mean()) for a in inputs) + ridge * BORDER * SIZE**0.5,
        sigma=max(float(a.square().sum(1).mean()) for a in inputs) ** 0.5,
        excess=2
        * len(inputs)
        * float(torch.log(torch.tensor(2.0))),  # g_i(0) = log 2, and g_i is not below 0
    )


KNOWN: dict[str, Callable[[], Known]] = {"quadratic": quadratic, "logistic": logistic}


def _data(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Devices that disagree: each has a truth of its own, some of it outside X."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [normal(SAMPLES, SIZE) for _ in range(SERVERS * MEMBERS)]
    return inputs, [a @ (0.8 * normal(SIZE, 1)) + 0.1 * normal(SAMPLES, 1) for a in inputs]


def _corners(border: float) -> Tensor:
    return border * torch.tensor(list(product((-1.0, 1.0), repeat=SIZE)), dtype=torch.float64)


def _largest_deviation(a: Tensor, b: Tensor, points: Tensor) -> float:
    """max over points of E ||grad h - grad g||^2; a convex quadratic, so the corners decide."""
    each = (points @ a.T - b)[:, :, None] * a  # points, samples, parameters
    return float((each - each.mean(1, keepdim=True)).square().sum(2).mean(1).max())


def _zero_linear() -> nn.Module:
    layer = nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    return layer


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean() / 2


class _Ridge(nn.Module):
    """a.x, and beside it ridge/2 ||x||^2, which the loss adds."""

    def __init__(self, ridge: float) -> None:
        super().__init__()
        self.linear = _zero_linear()
        self.ridge = ridge

    def forward(self, a: Tensor) -> Tensor:
        """Two columns."""
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        score: Tensor = self.linear(a)
        return torch.cat([score, (self.ridge / 2 * weight.square().sum()).expand_as(score)], dim=-1)


def _logistic_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (nn.functional.softplus(-targets[:, 0] * outputs[:, 0]) + outputs[:, 1]).mean()


# ------------------------------------------------------------------------------------------------
# runs
class RegularTimes:
    """Times between 0.5 and 1.5 that fill that interval evenly, one after another: 0.5 + fraction
    of k times an irrational number.

    Assumption 1 asks for fixed p and q. Random times have none: the longest wait grows with the
    run, if slowly. These times do.
    """

    name: ClassVar[str] = "regular"

    def __init__(self, irrational: float) -> None:
        self._irrational = irrational
        self._drawn = 0

    def quantile(self, u: Floats) -> Floats:
        """The next times, as many as `u` has entries; their values do not matter."""
        k = np.arange(self._drawn, self._drawn + len(u))
        self._drawn += len(u)
        return np.asarray(0.5 + (k * self._irrational) % 1.0)


@dataclass(frozen=True)
class Trace:
    """The certificates of Theorem 1 in every round t: x_i(t+1) against zbar(t), as the theorem has
    them.
    """

    server_step: float
    gap_TN: Tensor
    pull_T: Tensor
    spread_TV: Tensor
    moves_TN: Tensor  # ||x_i(t+1) - x_i(t)||^2 / eta_x^2
    seen: Participation
    mixes: tuple[tuple[int, ...], ...]
    x_TNP: Tensor  # x_i(t), t = 0..T
    z_TVP: Tensor  # z_n(t), t = 0..T

    @property
    def rounds(self) -> int:
        """T."""
        return len(self.pull_T)

    @property
    def period(self) -> int:
        """p, seen."""
        return max(
            activation_period(rounds, self.rounds) or self.rounds
            for rounds in self.seen.active.values()
        )

    @property
    def connection(self) -> int:
        """q, seen."""
        return (
            connection_period(SERVERS, [[(first[0], n) for n in first[1:]] for first in self.mixes])
            or self.rounds
        )

    def mixing(self) -> tuple[MixingRate, ScheduleMemory]:
        """The lemma's theta and beta, and the memory of just this schedule."""
        return lemma_rate(1 / FIRST, SERVERS, self.connection), schedule_memory(
            mixing_matrices(SERVERS, self.mixes)
        )

    def running_means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means over 0..t of the largest gap, of the pull, and of the largest spread; largest over
        devices and servers of the mean.
        """
        count = torch.arange(1, self.rounds + 1, dtype=torch.float64)
        means = (
            values.cumsum(0) / count[:, None]
            for values in (self.gap_TN, self.pull_T[:, None], self.spread_TV)
        )
        gap, pull, spread = (mean.amax(1) for mean in means)
        return gap, pull, spread


@dataclass
class _Phases:
    """Keeps every z_n(t) and x_i(t): servers enter round t at different times."""

    reader: Reader
    numbers: Numbers
    members: Sequence[Sequence[int]]
    z: list[list[Tensor]] = field(default_factory=list)  # per server, one per phase
    x: list[list[Tensor]] = field(default_factory=list)  # per server, its members' rows

    def apply(self, actor: Actor, event: Event, commands: Sequence[Command]) -> None:
        """Take note after the numbers have; what comes before a step is played with it."""
        self.reader.apply(actor, event, commands)
        for command in commands:
            if isinstance(command, StepModel):
                self.numbers.play(self.reader.take(0, 0.0, 0))
                n = number_of(actor)
                self.z[n].append(self.numbers.models[command.result].clone())
                self.x[n].append(
                    self.numbers.personal_NF.index_select(0, torch.tensor(self.members[n]))
                )


def trace(
    known: Known, rounds: int, batch: int | None = None, reach: float = 1.0, seed: int = 0
) -> Trace:
    """Run FedBCD with K = 1 on the rigorous Async-cloud until every server has finished T =
    `rounds`, with eta_z = d/sqrt(T).

    The schedule is the same for every seed; mini-batches are not.
    """
    federation, step = known.federation, known.server_step(rounds, reach)
    algorithm = FedBCD(
        device_step=known.device_step,
        batch="all" if batch is None else batch,
        steps=(1, 1),
        penalty=known.penalty,
        momentum=known.momentum,
        server_step=step,
        server_step_form="absolute",
        projection=Box(-BORDER, BORDER),
    )
    timing: Any = {"active": ACTIVE, "seed": seed}
    spec = RunSpec(algorithm, RigorousCloud(FIRST), dtype=torch.float64, **timing)
    spec.check(federation)  # tries laws, so these, which count their draws, come after it
    spec = replace(spec, clock=Clock(RegularTimes(math.e), RegularTimes(math.pi)))
    numbers = make_numbers(spec, federation, torch.device("cpu"))
    phases = _Phases(make_reader(spec, federation), numbers, federation.servers)
    timeline = Timeline()
    z0 = numbers.global_VF()
    phases.z = [[z0[n]] for n in range(SERVERS)]
    phases.x = [
        [numbers.personal_NF.index_select(0, torch.tensor(members))]
        for members in federation.servers
    ]
    simulation = Simulation(
        Driver(make_machines(spec, federation), phases, timeline),
        make_schedule(spec, federation),
    )
    while min(len(z) for z in phases.z) <= rounds:
        simulation.play_round()
    seen = participation(timeline, federation.servers, numbered=True)
    return _measured(known, phases, seen, rounds, step)


def _measured(
    known: Known, phases: _Phases, seen: Participation, rounds: int, step: float
) -> Trace:
    z_TVP = torch.stack([torch.stack(z[: rounds + 1]) for z in phases.z], 1)
    x_TNP = torch.cat(
        [torch.stack(x[: rounds + 1]) for x in phases.x], 1
    )  # members are numbered server by server
    mean_TP = z_TVP.mean(1)
    gamma = phases.numbers.bound.penalty_N
    full = theory.penalised_gradient(
        _exact_gradients(known, phases.numbers, x_TNP[1:]),
        x_TNP[1:],
        mean_TP[:-1, None],
        gamma[None, :, None],
    )
    active = {device: [t for t in when if t < rounds] for device, when in seen.active.items()}
    pulls = (gamma[None, :, None] * (mean_TP[:-1, None] - x_TNP[1:])).sum(1).square().sum(1)
    return Trace(
        step,
        gap_TN=theory.gap_on_box(full, x_TNP[1:], -BORDER, BORDER),
        pull_T=pulls,
        spread_TV=(z_TVP[:-1] - mean_TP[:-1, None]).norm(dim=2),
        moves_TN=(x_TNP[1:] - x_TNP[:-1]).square().sum(2) / known.device_step**2,
        seen=Participation(rounds, seen.mixes[:rounds], active, dict.fromkeys(active, rounds)),
        mixes=seen.mixes[:rounds],
        x_TNP=x_TNP,
        z_TVP=z_TVP,
    )


def _exact_gradients(known: Known, numbers: Numbers, x_TNP: Tensor) -> Tensor:
    """grad g_i at every x_i(t), all rounds of a device in one call."""
    trainer, rounds = numbers.trainer, len(x_TNP)
    columns = []
    for device in range(known.federation.devices):
        positions = trainer.positions_of(device).expand(rounds, -1)
        columns.append(
            trainer.gradients(
                x_TNP[:, device], x_TNP.new_empty(rounds, 0), positions, None
            ).gradient_NP
        )
    return torch.stack(columns, 1)
