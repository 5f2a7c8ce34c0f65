"""The oracle: the paper's algorithms in float64, one device at a time, line by line, as slow and
literal as possible.

It judges the package under test and therefore shares nothing with it: numpy and the standard
library only. "A1.7" and "A2.7" are line 7 of the paper's Algorithm 1 (FedBCD) and Algorithm 2
(FedBCD-I); "SPEC 7" is item 7 of SPEC.md. Random draws and the order of events are those of
docs/determinism.md.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
BATCH, STEPS, ARRIVAL, PROCESS, AVAILABLE = 1, 2, 3, 4, 5
OFFLINE, REST, PULLS = 14, 15, 16
LINKS, CLASSES, SPEEDS, DROPOUT = 25, 26, 27, 28

Mean = np.ndarray | None  # of no models there is none


def mix(h: int) -> int:
    """The bit mixer of docs/determinism.md, section 1."""
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return h ^ (h >> 31)


def address(seed: int, stream: int, *parts: int) -> int:
    """The 64 random bits that belong to one place of use."""
    h = mix((seed + (stream + 1) * GOLDEN) & MASK)
    for part in parts:
        h = mix((h + (part + 1) * GOLDEN) & MASK)
    return h


def below(h: int, n: int) -> int:
    """A whole number in 0 .. n-1."""
    return ((h >> 32) * n) >> 32


def unit(h: int) -> float:
    """A float64 between 0 and 1."""
    return ((h >> 12) + 0.5) * 2.0**-52


@dataclass
class Problem:
    """Who owns what: the devices of each server, their data (as gradients), the start x(0) and the
    set X.
    """

    servers: list[list[int]]
    sizes: dict[int, int]
    gradient: Callable[[int, np.ndarray, list[int] | None], np.ndarray]
    start: np.ndarray
    project: Callable[[np.ndarray], np.ndarray]
    earlier: tuple[list[np.ndarray], list[np.ndarray]] | None = None  # x_i and z_n to begin with


@dataclass
class Class:
    """Devices whose arrivals, steps and transfers take so many times as long (determinism.md)."""

    factors: dict[str, float]
    share: float = 0.0
    devices: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()


@dataclass
class Settings:
    """How it is solved. `server_step` is the relative eta_z of SPEC 4."""

    algorithm: str
    cloud: str
    first: int
    active: int | tuple[int, ...]  # of all servers, or of each
    available: int
    offline_limit: int
    penalty: dict[int, float]
    device_step: float
    momentum: float
    server_step: float
    steps: tuple[int, int]
    batch: int | None
    cloud_iterations: int
    rounds: int
    seed: int
    arrival_quantile: Callable[[float], float]
    step_quantile: Callable[[float], float]
    joins: dict[int, int] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    momentum_after_contact: str = "kept"
    epochs: bool = False  # `steps` are passes over the device's data
    pull_steps: tuple[int, int] | None = None
    offline_time: str = "free"
    weight: str = "size"  # FedAvg and FedProx: of a device in the average
    clip: float = np.inf  # the longest difference that an upload makes
    scale: float = 0.0  # of the integers in which differences are sent; 0: as they are
    links: list[list[tuple[int, int]]] = field(default_factory=list)  # one graph after another
    link_failure: float = 0.0
    link_seed: int = 0
    classes: list[Class] = field(default_factory=list)
    speed_quantile: Callable[[float], float] | None = None
    night: float = 1.0
    period: float = 1.0
    transfer: dict[int, float] = field(default_factory=dict)  # of a model down and up
    dropout: float = 0.0
    # beyond the paper: a phase ends `deadline` after its opening with `least` uploads or more, and
    # `spare` more devices may work; those at work when a phase ends count in a later one
    deadline: float = math.inf
    least: int = 1
    spare: int = 0
    # beyond the paper: weight_decay/2 ||x||^2 in g_i, eta_x times a factor of the session's number,
    # and optimizers with what they keep, begun anew in each session
    weight_decay: float = 0.0
    factor: Callable[[int], float] = lambda _: 1.0
    optimizer: str = "aspg"
    betas: tuple[float, float] = (0.0, 0.0)  # SGD: its momentum; Adam: of both means
    epsilon: float = 0.0

    @property
    def has_deadline(self) -> bool:
        """Whether devices of one phase may be at work in the next."""
        return self.deadline < math.inf or self.spare > 0


@dataclass
class Result:
    """The state after the last mix; `x` covers every device that was ever a member (one that left
    keeps its model).
    """

    x: dict[int, np.ndarray]
    x_prev: dict[int, np.ndarray]
    z: list[np.ndarray]
    clock: float
    mixes: list[tuple[float, tuple[int, ...]]]
    activations: list[tuple[float, int, int, int]]
    trace: list[tuple[np.ndarray, ...]]


@dataclass
class Device:
    """x_i and the iterate before it; counters of sessions, activations and offline rounds since the
    last contact.
    """

    x: np.ndarray
    x_prev: np.ndarray
    sessions: int = 0
    activations: int = 0
    offline: int = 0
    busy: bool = False
    free_at: float = 0.0  # end of the offline round under way, where it takes time
    wakes_at: float = -1.0  # when its timer begins the next one


@dataclass
class Server:
    """z_n, the last copy of x_i of every current member, and the state of the response-and-update
    phase.
    """

    z: np.ndarray
    copies: dict[int, np.ndarray]
    available: list[int] = field(default_factory=list)
    phases: int = 0
    selected: list[int] = field(default_factory=list)  # invited, and those of them that came
    came: list[int] = field(default_factory=list)  # whose uploads count in this phase
    at_work: list[int] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)  # who finds no place
    held: list[tuple[int, np.ndarray]] = field(default_factory=list)  # that came between phases
    is_overdue: bool = False
    waiting: list[tuple[float, int]] = field(default_factory=list)  # when the others would ask
    lost: list[int] = field(default_factory=list)
    is_open: bool = False
    round: int = 0


def drawn_length(settings: Settings, device: int, session: int) -> int:
    """How many steps or epochs one session has (SPEC 1)."""
    low, high = settings.steps
    return low + below(address(settings.seed, STEPS, device, session), high - low + 1)


def steps_of(settings: Settings, device: int, session: int, size: int) -> int:
    """K_i of one session: an epoch is ceil(n / R) mini-batches; all data at once are one."""
    one = math.ceil(size / settings.batch) if settings.epochs and settings.batch else 1
    return drawn_length(settings, device, session) * one


def pulls_of(settings: Settings, device: int, activation: int) -> int:
    """K_i of the penalty loop, where it has a length of its own."""
    assert settings.pull_steps is not None
    low, high = settings.pull_steps
    return low + below(address(settings.seed, PULLS, device, activation), high - low + 1)


def draw_batch(
    settings: Settings, device: int, session: int, step: int, size: int
) -> list[int] | None:
    """A1.7, A2.7: randomly draw R samples stored on the device (None: all of them, exact
    gradients).
    """
    if settings.batch is None:
        return None
    return [
        below(address(settings.seed, BATCH, device, session, step, r), size)
        for r in range(settings.batch)
    ]


def train(
    problem: Problem,
    settings: Settings,
    device: int,
    session: int,
    iterates: tuple[np.ndarray, np.ndarray],
    anchor: np.ndarray,
    penalty: float,
    momentum: float,
) -> tuple[np.ndarray, np.ndarray]:
    """One session: A1.5-11 with penalty gamma_i towards anchor z_n; A2.5-11 with penalty 0. Returns
    (x, x_prev).
    """
    x, x_prev = iterates  # A1.5
    step = settings.device_step * settings.factor(session)
    (one, two), first, second = settings.betas, np.zeros_like(x), np.zeros_like(x)
    for k in range(steps_of(settings, device, session, problem.sizes[device])):  # A1.6
        samples = draw_batch(settings, device, session, k, problem.sizes[device])  # A1.7
        ex = x + momentum * (x - x_prev)  # A1.8
        g = problem.gradient(device, ex, samples) + penalty * (ex - anchor)  # A1.9
        g = g + settings.weight_decay * ex
        if settings.optimizer == "sgd":
            g = first = one * first + g
        if settings.optimizer == "adam":  # Kingma and Ba (2015), Algorithm 1
            first, second = one * first + (1 - one) * g, two * second + (1 - two) * g**2
            unbiased = first / (1 - one ** (k + 1)), second / (1 - two ** (k + 1))
            g = unbiased[0] / (np.sqrt(unbiased[1]) + settings.epsilon)
        x, x_prev = problem.project(ex - step * g), x  # A1.9
    return x, x_prev  # A1.11


def pull_to_server(
    problem: Problem,
    steps: int,
    x: np.ndarray,
    x_prev: np.ndarray,
    z: np.ndarray,
    penalty: float,
    momentum: str,
) -> tuple[np.ndarray, np.ndarray]:
    """A2.14-18, the penalty loop, and what becomes of the momentum x - x_prev (SPEC 7). Returns (x,
    x_prev).
    """
    before, iterates = x, [x]
    for _ in range(steps):  # A2.15
        x = problem.project(x - penalty * (x - z))  # A2.16
        iterates.append(x)
    if momentum == "kept":  # what offline training had gathered
        return x, x - (before - x_prev)  # A2.18
    if momentum == "pull":  # the last step of the pull
        return x, iterates[-2]
    return x, x  # none


def weighted_mean(weights: Sequence[float], models: Sequence[np.ndarray]) -> Mean:
    """sum w_i x_i / sum w_i, or None where there is nothing to average."""
    total = float(sum(weights))
    if total == 0.0:
        return None
    return np.asarray(np.sum([w * x for w, x in zip(weights, models, strict=True)], axis=0) / total)


def server_step(w: np.ndarray, m: Mean, eta: float) -> np.ndarray:
    """A1.20, A2.24 in the relative form of SPEC 4: w - eta_z (w - m). Without devices the sum is
    empty, so w stays.
    """
    return w if m is None else w - eta * (w - m)


def check(problem: Problem, settings: Settings) -> None:
    """Refuse what the paper does not define."""
    if settings.algorithm not in ("fedbcd", "fedbcd-i", "fedavg", "fedprox"):
        raise ValueError(f"unknown algorithm {settings.algorithm!r}")
    if settings.momentum_after_contact not in ("kept", "pull", "restart"):
        raise ValueError(f"unknown momentum_after_contact {settings.momentum_after_contact!r}")
    if settings.cloud not in ("sync", "async", "rigorous", "dynamic-graph"):
        raise ValueError(f"unknown cloud {settings.cloud!r}")
    if settings.cloud != "sync" and not 1 <= settings.first <= len(problem.servers):
        raise ValueError("first (B) must lie between 1 and the number of servers")
    if settings.has_deadline and (
        settings.algorithm == "fedbcd-i" or settings.joins or settings.leaves
    ):
        raise ValueError("phases with a deadline: all devices are there, and none trains offline")
    if any(settings.joins.get(i, -1) >= t for i, t in settings.leaves.items()):
        raise ValueError("a device can leave only after it has joined")


class Simulation:
    """Devices, servers and coordinator, driven by a heap of (time, order of cause, what
    happens).
    """

    def __init__(self, problem: Problem, settings: Settings) -> None:
        check(problem, settings)
        self.problem = problem
        self.settings = settings
        self.servers = [
            Server(problem.start.copy(), {}) for _ in problem.servers
        ]  # A1.1: z_n(0) = x(0)
        self.devices: dict[int, Device] = {}
        for n, members in enumerate(problem.servers):
            for i in members:
                if i not in settings.joins:
                    self.admit(n, i)  # A1.1: x_i(-1,0) = x_i(-1,-1) = x(0)
        if problem.earlier is not None:
            self.go_on_from(*problem.earlier)
        self.round = 0
        self.clock = 0.0
        self.queue: list[int] = []
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.caused = 0
        self.mixes: list[tuple[float, tuple[int, ...]]] = []
        self.activations: list[tuple[float, int, int, int]] = []
        self.trace: list[tuple[np.ndarray, ...]] = []

    def go_on_from(self, x: list[np.ndarray], z: list[np.ndarray]) -> None:
        """An earlier run's models in place of x(0), without momentum; one z for all is their
        mean.
        """
        for n, server in enumerate(self.servers):
            begin = np.mean(z, axis=0) if self.settings.cloud == "sync" else z[n]
            server.z = self.problem.project(begin)
            for i in server.copies:
                own = self.problem.project(x[i])
                self.devices[i] = Device(own.copy(), own.copy())
                server.copies[i] = own.copy()

    def run(self) -> Result:
        """Events in order of time, equal times in order of cause, until the T-th mix and the steps
        it releases.
        """
        if self.settings.rounds > 0:
            self.start_round(0.0, list(range(len(self.servers))))
        while self.round < self.settings.rounds:  # A1.2
            time, _, happen = heapq.heappop(self.events)
            happen(time)
        return Result(  # A1.25
            x={i: d.x.copy() for i, d in self.devices.items()},
            x_prev={i: d.x_prev.copy() for i, d in self.devices.items()},
            z=[s.z.copy() for s in self.servers],
            clock=self.clock,
            mixes=self.mixes,
            activations=self.activations,
            trace=self.trace,
        )

    def later(self, time: float, happen: Callable[[float], None]) -> None:
        """Put one event on the heap."""
        heapq.heappush(self.events, (time, self.caused, happen))
        self.caused += 1

    # ---- the start of a coordinator round: docs/determinism.md, section 2, points 1 to 3 ----

    def start_round(self, time: float, released: list[int]) -> None:
        """Joins and leaves, offline rounds of FedBCD-I, then the released servers open a phase."""
        for n, members in enumerate(self.problem.servers):
            for i in members:
                if self.settings.joins.get(i) == self.round:
                    self.admit(n, i)
                    self.rest(time, i)
                if self.settings.leaves.get(i) == self.round:
                    self.dismiss(n, i)
        if self.settings.algorithm == "fedbcd-i":
            for server in self.servers:
                self.offline_round(server)
        if self.round == 0 and self.is_timed:
            for server in self.servers:
                for i in server.copies:
                    self.rest(time, i)
        for n in released:
            self.open_phase(time, n)

    def admit(self, n: int, i: int) -> None:
        """A joining device starts with x = x_prev = z_n, and that copy counts in m from then on."""
        z = self.servers[n].z
        self.devices[i] = Device(z.copy(), z.copy())
        self.servers[n].copies[i] = self.in_integers(i, z)

    def dismiss(self, n: int, i: int) -> None:
        """A leaving device is dropped from its server's copies and from m; its model remains its
        own.
        """
        server = self.servers[n]
        if server.is_open and i in server.selected:
            raise NotImplementedError(f"device {i} leaves while it is selected in an open phase")
        del server.copies[i]
        server.waiting = [(when, other) for when, other in server.waiting if other != i]

    def offline_round(self, server: Server) -> None:
        """A2.3 draws the available devices; A2.4-12: those neither busy nor suspended train without
        penalty.
        """
        s = self.settings
        order = sorted(
            server.copies, key=lambda i: (unit(address(s.seed, AVAILABLE, i, self.round)), i)
        )
        server.available = order[: s.available]
        for i in [] if self.is_timed else server.available:  # A2.4
            d = self.devices[i]
            if (
                d.busy or d.offline >= s.offline_limit
            ):  # SPEC 7: at most 4 rounds in a row, then it waits
                continue
            d.x, d.x_prev = train(
                self.problem, s, i, d.sessions, (d.x, d.x_prev), d.x, 0.0, s.momentum
            )  # A2.5-11
            d.sessions += 1
            d.offline += 1

    # ---- offline rounds that take time ----

    @property
    def is_timed(self) -> bool:
        """Whether devices train offline by timers of their own."""
        return self.settings.algorithm == "fedbcd-i" and self.settings.offline_time == "timed"

    def rest(self, time: float, i: int) -> None:
        """After an offline round or an upload: the next begins after a time drawn like an arrival,
        unless the device is suspended.
        """
        d, s = self.devices[i], self.settings
        if self.is_timed and d.offline < s.offline_limit:
            u = unit(address(s.seed, REST, i, d.sessions, d.activations))
            rest = s.arrival_quantile(u) * self.factor(i, "arrival") * self.day(time)
            d.wakes_at = time + rest
            self.later(d.wakes_at, partial(self.begin_offline, i=i))

    def begin_offline(self, time: float, i: int) -> None:
        """The timer is over, and no activation came before it: busy for as long as it trains."""
        d, s = self.devices[i], self.settings
        if d.busy or time != d.wakes_at or self.has_left(i):
            return
        length = drawn_length(s, i, d.sessions)
        d.free_at = time + self.training(i, OFFLINE, d.sessions, length, time)
        d.busy = True
        self.later(d.free_at, partial(self.end_offline, i=i))

    def end_offline(self, time: float, i: int) -> None:
        """A2.5-11."""
        d, s = self.devices[i], self.settings
        if self.has_left(i):
            return
        d.x, d.x_prev = train(self.problem, s, i, d.sessions, (d.x, d.x_prev), d.x, 0.0, s.momentum)
        d.busy = False
        d.sessions += 1
        d.offline += 1
        self.rest(time, i)

    def has_left(self, i: int) -> bool:
        """Whether it is no member any more."""
        return self.settings.leaves.get(i, self.round + 1) <= self.round

    # ---- the response-and-update phase of a server ----

    def open_phase(self, time: float, n: int) -> None:
        """A1.3, A2.3: the clock model activates the q earliest arrivals among the candidates."""
        s, server = self.settings, self.servers[n]
        candidates = server.available if s.algorithm == "fedbcd-i" else list(server.copies)
        phase = server.phases
        server.phases += 1
        under_way = [i for i in server.selected if i not in server.came]
        held, server.held = server.held, []
        server.came = [i for i, _ in held]
        for i, x in held:
            server.copies[i] = x
        candidates = [i for i in candidates if i not in {*under_way, *server.came}]
        delays = sorted((self.arrival(n, i, phase, time), i) for i in candidates)
        server.waiting = [(time + delay, i) for delay, i in delays]
        server.selected, server.lost = [*under_way, *server.came], []
        server.is_open, server.is_overdue = True, False
        if s.deadline < math.inf:
            self.later(time + s.deadline, partial(self.pass_deadline, n=n, phase=phase))
        self.let_in(time, n)
        if self.is_complete(n):
            self.later(time, partial(self.end_phase, n=n))
            return
        for _ in range(self.needed(n) + s.spare - len(server.came) - len(under_way)):
            self.invite(n, time)
        if not server.selected:
            self.later(time, partial(self.end_phase, n=n))

    def pass_deadline(self, time: float, n: int, phase: int) -> None:
        """From now on the least number of uploads is enough."""
        server = self.servers[n]
        if server.is_open and server.phases == phase + 1:
            server.is_overdue = True
            if self.is_complete(n):
                self.end_phase(time, n)

    def needed(self, n: int) -> int:
        """How many uploads end the phase: q, or all of those who have not been lost in it."""
        server, q = self.servers[n], self.q(n)
        most = min(q, self.settings.least) if server.is_overdue else q
        return min(most, len(server.copies) - len(server.lost))

    def has_place(self, n: int) -> bool:
        server = self.servers[n]
        under_way = len(server.came) + len(server.at_work)
        return server.is_open and self.needed(n) + self.settings.spare > under_way

    def let_in(self, time: float, n: int) -> None:
        """Those who ask, as long as there are places; nobody comes twice in a phase."""
        server = self.servers[n]
        for i in [*server.asking]:
            if self.has_place(n) and i not in server.came and i not in server.lost:
                server.asking.remove(i)
                self.begin(time, n, i)

    def q(self, n: int) -> int:
        """How many uploads a server waits for."""
        active = self.settings.active
        return active if isinstance(active, int) else active[n]

    def invite(self, n: int, time: float) -> None:
        """The next arrival may take part."""
        server = self.servers[n]
        if server.waiting:
            arrival, i = server.waiting.pop(0)
            server.selected.append(i)
            self.later(max(arrival, time), partial(self.ask, n=n, i=i))

    # ---- who is slow ----

    def home(self, i: int) -> int:
        return next(n for n, members in enumerate(self.problem.servers) if i in members)

    def factor(self, i: int, what: str) -> float:
        """Of the first class that names the device or its server; shares are of the others, in
        order of a draw.
        """
        classes, everybody = (
            self.settings.classes,
            sorted(j for members in self.problem.servers for j in members),
        )
        named = {
            j: c
            for j in everybody
            for c in reversed(classes)
            if j in c.devices or self.home(j) in c.servers
        }
        if i in named:
            return named[i].factors.get(what, 1.0)
        free = sorted(
            (unit(address(self.settings.seed, CLASSES, j)), j) for j in everybody if j not in named
        )
        rank = [j for _, j in free].index(i)
        total = 0.0
        for c in classes:
            total += c.share
            if rank < round(total * len(free)):
                return c.factors.get(what, 1.0)
        return 1.0

    def day(self, time: float) -> float:
        s = self.settings
        return 1 + (s.night - 1) * (1 - math.cos(2 * math.pi * time / s.period)) / 2

    def arrival(self, n: int, i: int, phase: int, time: float) -> float:
        """How long after the opening of a phase a device asks."""
        drawn = self.settings.arrival_quantile(unit(address(self.settings.seed, ARRIVAL, i, phase)))
        return drawn * self.factor(i, "arrival") * self.day(time)

    def work(self, i: int, number: int, k: int, time: float) -> float:
        """K_i steps of one drawn length, and a model down and up."""
        took = self.training(i, PROCESS, number, k, time)
        return took + self.factor(i, "transfer") * self.settings.transfer.get(i, 0.0)

    def training(self, i: int, stream: int, number: int, k: int, time: float) -> float:
        """Steps of one drawn length."""
        s = self.settings
        took = k * s.step_quantile(unit(address(s.seed, stream, i, number)))
        speed = s.speed_quantile(unit(address(s.seed, SPEEDS, i))) if s.speed_quantile else 1.0
        return took * self.factor(i, "step") * speed * self.day(time)

    def ask(self, time: float, n: int, i: int) -> None:
        """Device i asks. One that trains offline can ask when that is over, if nobody is
        earlier.
        """
        d, server = self.devices[i], self.servers[n]
        if d.busy:
            server.selected.remove(i)
            server.waiting = sorted([*server.waiting, (d.free_at, i)])
            self.invite(n, time)
            return
        server.asking.append(i)
        self.let_in(time, n)

    def begin(self, time: float, n: int, i: int) -> None:
        """It gets z_n and is busy until it uploads."""
        d, s = self.devices[i], self.settings
        self.servers[n].at_work.append(i)
        d.wakes_at = -1.0
        number = d.activations
        d.activations += 1
        d.busy = True
        length, (k, x, x_prev) = self.length_of(i, number), self.activate(n, i)
        took = self.work(i, number, length, time)
        news = (i, number, k, x, x_prev)
        u = unit(address(s.seed, DROPOUT, i, number))
        if u < s.dropout:
            self.later(time + u / s.dropout * took, partial(self.lose, n=n, i=i))
        else:
            self.later(time + took, partial(self.upload, n=n, news=news))

    def lose(self, time: float, n: int, i: int) -> None:
        """The activation comes to nothing: the next arrival takes its place; with FedBCD-I one
        that was not available, if nobody else is left.
        """
        server, d = self.servers[n], self.devices[i]
        d.busy, d.offline = False, 0
        self.rest(time, i)
        server.selected.remove(i)
        server.at_work.remove(i)
        if not server.is_open:
            return
        server.lost.append(i)
        self.let_in(time, n)
        if self.settings.has_deadline and not (self.is_complete(n) or self.has_place(n)):
            return
        if self.is_complete(n):
            self.end_phase(time, n)
            return
        if not server.waiting:
            rest = set(server.copies) - {*server.selected, *server.lost}
            server.waiting = sorted(
                (time + self.arrival(n, j, server.phases - 1, time), j) for j in rest
            )
        self.invite(n, time)

    def is_complete(self, n: int) -> bool:
        """Whether nobody is missing, of q or of all who have not been lost in this phase."""
        return len(self.servers[n].came) >= self.needed(n)

    def length_of(self, i: int, activation: int) -> int:
        """How many drawn times an activation lasts: its steps, epochs or penalty steps."""
        d, s = self.devices[i], self.settings
        if s.pull_steps is not None:
            return pulls_of(s, i, activation)
        latest = max(d.sessions - 1, 0) if s.algorithm == "fedbcd-i" else d.sessions
        return drawn_length(s, i, latest)

    def activate(self, n: int, i: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The device's side of one activation: (K_i, x_i, x_prev)."""
        d, s, z = self.devices[i], self.settings, self.servers[n].z
        if s.algorithm == "fedbcd-i":  # A2.13-19, with K_i of the device's latest session
            k = self.length_of(i, d.activations - 1)
            return (
                k,
                *pull_to_server(
                    self.problem, k, d.x, d.x_prev, z, s.penalty[i], s.momentum_after_contact
                ),
            )
        session = d.sessions
        d.sessions += 1
        k = steps_of(s, i, session, self.problem.sizes[i])
        if s.algorithm == "fedbcd":  # A1.4-12: momentum crosses rounds (SPEC 2)
            return (
                k,
                *train(self.problem, s, i, session, (d.x, d.x_prev), z, s.penalty[i], s.momentum),
            )
        if s.algorithm == "fedprox":  # SPEC 8: from x = x_prev = z
            return (k, *train(self.problem, s, i, session, (z, z), z, s.penalty[i], s.momentum))
        return (
            k,
            *train(self.problem, s, i, session, (z, z), z, 0.0, 0.0),
        )  # FedAvg: plain SGD from z

    def upload(
        self, time: float, n: int, news: tuple[int, int, int, np.ndarray, np.ndarray]
    ) -> None:
        """x_i(t+1) arrives: the server replaces its copy. The q-th upload ends the phase."""
        i, number, k, x, x_prev = news
        d, server = self.devices[i], self.servers[n]
        if not self.is_shared:
            d.x, d.x_prev = x, x_prev
        d.busy = False
        d.offline = 0
        self.activations.append((time, i, number, k))
        self.rest(time, i)
        server.at_work.remove(i)
        if not server.is_open:  # it was asked for in a phase that has ended: it counts in the next
            server.selected.remove(i)
            server.held.append((i, self.understood(n, i, x)))
            return
        # A1.14: the copies of the others stay as they are
        server.copies[i] = self.understood(n, i, x)
        server.came.append(i)
        if self.is_complete(n):
            self.end_phase(time, n)
        else:
            self.let_in(time, n)

    # ---- layers on uploads: docs/architecture.md, "Wires"; without them a copy is x_i ----

    def in_integers(self, i: int, x: np.ndarray) -> np.ndarray:
        """The nearest x for which weight (x - x(0)) is a whole multiple of the scale."""
        s, start = self.settings, self.problem.start
        if s.scale == 0.0:
            return x.copy()
        weight = self.problem.sizes[i] if s.algorithm in ("fedavg", "fedprox") else s.penalty[i]
        return start + np.rint(weight * (x - start) / s.scale) * s.scale / weight

    def understood(self, n: int, i: int, x: np.ndarray) -> np.ndarray:
        """A device sends how x_i differs from its server's copy of it; from z_n where only the
        active ones count.
        """
        server, s = self.servers[n], self.settings
        had = server.copies[i] if s.algorithm == "fedbcd" else self.in_integers(i, server.z)
        length = np.sqrt(np.sum((x - had) ** 2))
        return self.in_integers(i, had + (x - had) * (s.clip / length) if length > s.clip else x)

    def end_phase(self, time: float, n: int) -> None:
        """Report to the coordinator; an isolated server (rigorous Async-cloud) steps alone and goes
        on at once.
        """
        server = self.servers[n]
        server.is_open = False
        if self.settings.cloud == "rigorous" and server.round < self.round:
            if self.is_shared:
                self.average_models([n])
            else:
                self.mix_and_step([n])  # Appendix A (iv): w_n = z_n
            server.round += 1
            self.open_phase(time, n)
            return
        self.queue.append(n)
        needed = len(self.servers) if self.settings.cloud == "sync" else self.settings.first
        if len(self.queue) >= needed:
            group, self.queue = self.queue[:needed], self.queue[needed:]
            self.coordinate(time, sorted(group) if self.settings.cloud == "sync" else group)

    # ---- the aggregation phases of coordinator and servers ----

    def coordinate(self, time: float, group: list[int]) -> None:
        """One coordinator round ends: mix, step, and start the next one."""
        if self.is_shared:
            self.average_models(group)
        elif self.settings.cloud == "sync":
            self.sync_step()
        else:
            self.mix_and_step(group)
        for n in group:
            self.servers[n].round += 1
        self.clock = time
        self.mixes.append((time, tuple(group)))
        self.trace.append(tuple(s.z.copy() for s in self.servers))
        self.round += 1
        if self.round < self.settings.rounds:
            self.start_round(time, group)

    def counted(self, n: int) -> list[int]:
        """SPEC 5: FedBCD counts all members in m (A1.20), the others only the active ones Q_n(t)
        (A2.24).
        """
        server = self.servers[n]
        return list(server.copies) if self.settings.algorithm == "fedbcd" else server.came

    def mean_of(self, group: Sequence[int]) -> Mean:
        """m = sum gamma_i x_i / sum gamma_i over the devices that count, of the given servers
        together.
        """
        pairs = [
            (self.settings.penalty[i], self.servers[n].copies[i])
            for n in group
            for i in self.counted(n)
        ]
        return weighted_mean([gamma for gamma, _ in pairs], [x for _, x in pairs])

    def sync_step(self) -> None:
        """Equation (5), K_z times: z <- z - eta_z (z - m), m over all servers' devices together."""
        m = self.mean_of(range(len(self.servers)))
        z = self.servers[0].z  # A1.16
        for _ in range(self.settings.cloud_iterations):  # A1.17
            z = server_step(z, m, self.settings.server_step)  # A1.19-20 with |V| = 1
        for server in self.servers:
            server.z = z.copy()  # A1.23

    def mix_and_step(self, group: list[int]) -> None:
        """Equation (6), K_z times, with a_nm = 1/B inside the group, or along its links; the other
        servers are unchanged.
        """
        means = {n: self.mean_of([n]) for n in group}
        z = {n: self.servers[n].z for n in group}  # A1.16
        for _ in range(self.settings.cloud_iterations):  # A1.17
            w = dict.fromkeys(group, np.sum([z[n] for n in group], axis=0) / len(group))  # A1.19
            if self.settings.cloud == "dynamic-graph":
                w = self.along_links(group, z)
            z = {n: server_step(w[n], means[n], self.settings.server_step) for n in group}  # A1.20
        for n in group:
            self.servers[n].z = z[n].copy()  # A1.23

    def along_links(self, group: list[int], z: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """w_n = sum_m a_nm z_m, a_nm = 1 / (1 + max(d_n, d_m)) over the links of this round that
        have not failed and whose two ends are in the group; a_nn = 1 - sum of the others.
        """
        s = self.settings
        neighbours: dict[int, set[int]] = {n: set() for n in group}
        for a, b in s.links[self.round % len(s.links)]:
            n, m = sorted((a, b))
            failed = unit(address(s.link_seed, LINKS, self.round, n, m)) < s.link_failure
            if n in group and m in group and not failed:
                neighbours[n].add(m)
                neighbours[m].add(n)
        w = {}
        for n in group:
            w[n], rest = np.zeros_like(z[n]), 1.0
            for m in neighbours[n]:
                a_nm = 1.0 / (1 + max(len(neighbours[n]), len(neighbours[m])))
                w[n] = w[n] + a_nm * z[m]
                rest -= a_nm
            w[n] = w[n] + rest * z[n]
        return w

    @property
    def is_shared(self) -> bool:
        """Whether devices have no model but their server's."""
        return self.settings.algorithm in ("fedavg", "fedprox")

    def average_models(self, group: list[int]) -> None:
        """SPEC 8: z is the average of the active devices' models, weighted by data size or equal;
        every device then holds z. On an asynchronous cloud each server averages its own, and those
        of the group then mix.
        """
        if self.settings.cloud == "sync":
            z = [self.average(range(len(self.servers)))]
        else:
            z = [self.average([n]) for n in group]
            z = [self.servers[n].z if m is None else m for n, m in zip(group, z, strict=True)]
        if z[0] is None:
            return
        for n in group:
            self.servers[n].z = np.mean(z, axis=0)
            for i in self.servers[n].copies:
                self.devices[i].x = self.servers[n].z.copy()
                self.devices[i].x_prev = self.servers[n].z.copy()

    def average(self, servers: Sequence[int]) -> Mean:
        """Of the models that the active devices of these servers have sent."""
        equal = self.settings.weight == "one"
        chosen = [(i, self.servers[n].copies[i]) for n in servers for i in self.servers[n].came]
        weights = [1.0 if equal else self.problem.sizes[i] for i, _ in chosen]
        return weighted_mean(weights, [x for _, x in chosen])


def run(problem: Problem, settings: Settings) -> Result:
    """One run of `rounds` coordinator rounds."""
    return Simulation(problem, settings).run()
