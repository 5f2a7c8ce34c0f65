"""Does Theorem 1 cover this job? Each assumption judged for a job file, with numbers from its own
data, model and schedule.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedbcd.algorithm.method import Absolute, Method, Relative
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.plan import Steps, Toward
from fedbcd.algorithm.projection import diameter, projected
from fedbcd.compute.smoothness import bias, constants, estimate, sigma
from fedbcd.data.federation import Federation
from fedbcd.engines.participation import (
    Participation,
    other_schedule,
    planned_participation,
    recorded_participation,
)
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import Federations, Job
from fedbcd.experiments.promise import Graphs, Promise, promise_of
from fedbcd.protocol.clouds import AsyncCloud, DynamicGraph, GraphCloud
from fedbcd.record.eventlog import LogReader
from fedbcd.schedule.delays import Constant
from fedbcd.spec import RunSpec
from fedbcd.theory import assumptions
from fedbcd.theory.assumptions import Bias, Finding, Smoothness, Verdict
from fedbcd.theory.mixing import mixing_matrices


@dataclass(frozen=True)
class CheckReport:
    """The findings of one job."""

    title: str
    findings: tuple[Finding, ...]
    # the schedule has random delays or numbers of steps, so p and q are those of one schedule of
    # many
    random: bool = False
    # Theorem 1 in numbers, or why it has none for this job
    promise: Promise | str = ""

    @property
    def sentence(self) -> str:
        count, unknown = (
            len(self.findings),
            sum(finding.verdict is Verdict.UNKNOWN for finding in self.findings),
        )
        if self.fails:
            return (
                f"{self.fails} of {count} fail: Theorem 1 does not cover this job. It may well"
                " train; nothing is promised."
            )
        lapse = [
            finding.assumption for finding in self.findings if finding.verdict is Verdict.LAPSES
        ]
        seen = (
            " Delays are random: p and q were seen on this schedule only, not shown for every one."
            if self.random
            else ""
        )
        if lapse:
            also = f", {unknown} cannot be known" if unknown else ""
            return (
                f"nothing fails{also}, but {', '.join(lapse)} lapses: Theorem 1 is about another"
                f" problem, with a compact X.{seen}"
            )
        if unknown:
            return (
                f"nothing fails, {unknown} of {count} cannot be known: Theorem 1 may cover this"
                f" job.{seen}"
            )
        return f"everything holds: Theorem 1 covers this job.{seen}"

    @property
    def fails(self) -> int:
        return sum(finding.verdict is Verdict.FAILS for finding in self.findings)

    def to_table(self) -> dict[str, Any]:
        findings = [asdict(finding) for finding in self.findings]
        return {
            "title": self.title,
            "fails": self.fails,
            "sentence": self.sentence,
            "findings": findings,
            "theorem": self.promise if isinstance(self.promise, str) else self.promise.to_table(),
        }


def check_job(
    job: Job,
    *,
    log: Path | None = None,
    devices: int = 4,
    rounds: int = 2000,
    federation: Federation | None = None,
) -> CheckReport:
    """Judge Assumptions 1 to 5 for a job: curvature on `devices` of its devices, the schedule
    planned (`rounds` at most) or from `log`. `federation` is its own, where it has been made.
    """
    if devices < 1 or rounds < 1:
        raise ConfigError(f"devices={devices} and rounds={rounds} must be 1 or more")
    federation, spec = federation or job.make_federation(), job.spec
    job.use_threads(federation)
    spec.check(federation)
    if log is not None and (other := other_schedule(log, spec, federation)):
        raise RecordError(
            f"{log} records another run than {job.name!r} ({other}); give the log of this run, or"
            " none"
        )
    method = spec.method_of(federation)
    findings = [_scope(method, any(spec.changes(federation)))]
    promise: Promise | str = ""
    if _is_coupled(method):
        seen = (
            planned_participation(spec, federation, job.spec.rounds, job.spec.until_clock, rounds)
            if log is None
            else recorded_participation(log)
        )
        beyond = _beyond(job, seen)
        total = job.spec.rounds or (None if beyond else seen.rounds)
        graphs = _graphs(spec, federation, seen)
        findings += _of_the_schedule(spec, seen, graphs, _source(log, seen), beyond)
        problem = _OfTheProblem(spec, federation, devices)
        findings += problem.findings(total)
        promise = _why_no_bounds(findings, total) or problem.promise(graphs, seen, total or 0)
    return CheckReport(
        job.name,
        tuple(sorted(findings, key=lambda finding: finding.assumption)),
        _is_random(spec, method),
        promise,
    )


def _why_no_bounds(findings: Sequence[Finding], total: int | None) -> str:
    """Why Theorem 1 has no numbers for a job, if it has none; what is only not contradicted may
    hold.
    """
    fails = [f.assumption for f in findings if f.verdict is Verdict.FAILS]
    if fails:
        names = ", ".join("the scope" if name == "-" else name for name in fails)
        return f"no bounds: {names} {'fails' if len(fails) == 1 else 'fail'}"
    of = {finding.assumption: finding for finding in findings}
    if of["-"].verdict is not Verdict.HOLDS:
        return f"no bounds: they ask for {of['-'].remedy}"
    if of["2(i)"].verdict is not Verdict.HOLDS:
        return "no bounds: they all hold the diameter D_X of a compact X"
    if total is None:
        return "no bounds: T is not known; --rounds that reaches the end of the run"
    return ""


def _beyond(job: Job, seen: Participation) -> str:
    """The part of the run that the schedule does not reach, in words; empty if it reaches the
    end.
    """
    if job.spec.rounds is not None:
        return f"the run has {job.spec.rounds}" if seen.rounds < job.spec.rounds else ""
    end = job.spec.until_clock or 0.0
    return (
        f"they end at {seen.clock:.4g}, the run at {end:g} of the clock" if seen.clock < end else ""
    )


def _is_random(spec: RunSpec, method: Method) -> bool:
    low, high = method.steps
    fixed = all(isinstance(law, Constant) for law in (spec.clock.arrival, spec.clock.step))
    return low < high or not (fixed and spec.clock.is_alike)


def recorded_jobs(jobs: Sequence[Job], log: Path, made: Federations) -> tuple[list[Job], list[str]]:
    """Those of the jobs whose run the log records, and a sentence for each other one; an error if
    it records none of them.
    """
    jobs = [job.going_on(LogReader(log).header.get("identity") or {}) for job in jobs]
    others = {job.name: other_schedule(log, job.spec, made.of(job)) for job in jobs}
    if all(others.values()):
        reasons = "; ".join(f"{name!r}: {other}" for name, other in others.items())
        raise RecordError(
            f"{log} records no run of this job ({reasons}); give a log of it, or none"
        )
    skipped = [
        f"{name} was not judged: the log records another run ({other})"
        for name, other in others.items()
        if other
    ]
    return [job for job in jobs if not others[job.name]], skipped


def _source(log: Path | None, seen: Participation) -> str:
    if log is None:
        return "planned"
    return "recorded; the log's last line is not whole and was left out" if seen.cut else "recorded"


def _is_algorithm_1(method: Method) -> bool:
    """Whether devices do what Algorithm 1 says: steps with momentum, drawn towards z_n."""
    match method.plan:
        case (Steps(prev=prev, pulls=(toward,)),):
            drawn = bool(prev) and toward == Toward()
            return drawn and method.counts == "members" and method.weight == "penalty"
    return False


def _is_coupled(method: Method) -> bool:
    """Whether it is about problem (2): own models that z draws, and a step of z towards them."""
    penalty = method.penalty if isinstance(method.penalty, Sequence) else [method.penalty]
    is_drawn = min(penalty) > 0
    return method.keeps_personal and is_drawn and isinstance(method.step, Relative | Absolute)


def _scope(method: Method, moves: bool) -> Finding:
    says = "Theorem 1 is about FedBCD with K_i = K_z = 1"
    if not _is_algorithm_1(method):
        found = f"{method.name} is another algorithm; the theorem says nothing about it"
        remedy = 'algorithm = { name = "fedbcd" }'
        return Finding(
            "-",
            says,
            Verdict.FAILS,
            found + ("" if _is_coupled(method) else ", so nothing else was looked at"),
            remedy,
        )
    steps = (*method.lengths(offline=False), method.cloud_iterations)
    first = method.first_steps
    if first is not None and first.schedule is not None:
        found = f"device_step changes by {first.schedule}; the theorem's eta_x is one number"
        return Finding("-", says, Verdict.LAPSES, found, "no schedule")
    if first is not None and first.decay:
        found = (
            f"weight_decay adds {first.decay:g}/2 ||x||^2 to each g_i, and {first.decay:g} to each"
            " L_i; what follows was measured without it"
        )
        return Finding("-", says, Verdict.UNKNOWN, found, "weight_decay = 0")
    if steps == (1, 1, 1) and moves:
        found = "devices join or leave; the theorem's Q_n are the same in every round"
        return Finding("-", says, Verdict.UNKNOWN, found, "no joins, leaves or churn")
    if steps == (1, 1, 1):
        return Finding("-", says, Verdict.HOLDS, "FedBCD, one step on devices and servers")
    found = (
        f"K_i from {steps[0]} to {steps[1]}, K_z = {steps[2]}; the proof says that it 'can be"
        " easily modified' and does not show how"
    )
    return Finding("-", says, Verdict.UNKNOWN, found, "steps = [1, 1], cloud_iterations = 1")


def _graphs(spec: RunSpec, federation: Federation, seen: Participation) -> Graphs:
    """The mixing matrices, and the edges of every round that was seen; with Sync-cloud there is one
    global model, so |V| = 1 in the theory.
    """
    if spec.cloud.sync:
        return Graphs([torch.ones(1, 1, dtype=torch.float64)], [[]] * seen.rounds)
    if isinstance(spec.cloud, GraphCloud):
        matrices = [torch.tensor(m, dtype=torch.float64) for m in spec.cloud.mixing]
    else:
        matrices = mixing_matrices(len(federation.servers), seen.mixes, spec.cloud.weights)
    edges = [[(n, m) for n, m in matrix.nonzero().tolist()] for matrix in matrices]
    return Graphs(matrices, [edges[t % len(edges)] for t in range(seen.rounds)])


def _of_the_schedule(
    spec: RunSpec, seen: Participation, graphs: Graphs, source: str, beyond: str
) -> list[Finding]:
    found = [assumptions.activation(seen.active, seen.watched, source, beyond)]
    if spec.cloud.sync:
        says = "the servers' graphs of any q rounds are jointly connected"
        alone = "q = 1. Sync-cloud: one global model, so |V| = 1 in the theory"
        found.append(Finding("1(ii)", says, Verdict.HOLDS, alone))
    else:
        if isinstance(spec.cloud, GraphCloud) and seen.rounds >= 2 * len(graphs.matrices):
            beyond = ""  # the graphs come round again and again
        found.append(assumptions.connectivity(graphs.servers, graphs.edges, source, beyond))
    return [*found, *assumptions.mixing_weights(graphs.matrices)]


class _OfTheProblem:
    """What costs, steps and X say, measured on some devices."""

    def __init__(self, spec: RunSpec, federation: Federation, devices: int) -> None:
        self.spec, self.federation, self.devices = spec, federation, devices
        self.method = spec.method_of(federation)
        module = federation.make_model(spec.seed)
        self.objective = Objective(module.to(spec.dtype), federation.loss)
        layout = self.objective.layout
        self.start = layout.flatten(module, spec.dtype)
        p = layout.size_P
        self.start[:p] = projected(self.method.projection, self.start[:p])
        self.diameter = diameter(self.method.projection, p)
        self.penalties = self.method.penalties(federation.devices).tolist()
        self.known, self.why_not = _smoothness(
            federation, self.method, self.objective, self.start, devices
        )
        self.server_steps = _server_steps(spec, federation, self.method)
        self.noise, self.sigma = _noise(
            federation, self.method, self.objective, self.start, devices
        )

    def findings(self, rounds: int | None) -> list[Finding]:
        method, known, gamma = self.method, self.known, self.penalties
        step = assumptions.device_step(method.device_step, gamma, known)
        fails = step.verdict is Verdict.FAILS
        return [
            assumptions.compactness(self.diameter),
            assumptions.smoothness(known, self.why_not),
            step,
            self._server_step(rounds),
            assumptions.momentum(method.momentum, method.device_step, gamma, known, fails),
            self.noise,
        ]

    def _server_step(self, rounds: int | None) -> Finding:
        """4(ii)."""
        cloud, servers = self.spec.cloud, self.federation.servers
        if isinstance(cloud, AsyncCloud | DynamicGraph) and cloud.first < len(servers):
            return assumptions.unequal_server_steps()
        gamma = max(self.penalties)
        return assumptions.server_step(self.server_steps, gamma, self._members, rounds)

    @property
    def _members(self) -> int:
        federation = self.federation
        return federation.devices if self.spec.cloud.sync else max(map(len, federation.servers))

    def promise(self, graphs: Graphs, seen: Participation, rounds: int) -> Promise | str:
        """Theorem 1 in numbers, for a job of which no assumption fails."""
        spread = 0.0 if self.method.batch == "all" else self.sigma
        if self.known is None or self.diameter is None or spread is None:
            return "no bounds: L_i or sigma could not be measured"
        shared = (self.federation, self.method, self.objective, self.start)
        costs = constants(*shared, self.known, spread, self.diameter)
        job = (self.method, self.penalties, self.server_steps, self._members)
        try:
            return promise_of(*job, graphs, seen, self.known, costs, self.diameter, rounds)
        except ConfigError as error:  # L_i is not known to be so small
            return f"no bounds: with the largest constants {error}"


def _smoothness(
    federation: Federation,
    method: Method,
    objective: Objective,
    start: torch.Tensor,
    devices: int,
) -> tuple[Smoothness | None, str]:
    try:
        return estimate(federation, method, objective, start, devices), ""
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        return None, _error_line(error)


def _server_steps(spec: RunSpec, federation: Federation, method: Method) -> dict[str, float]:
    """eta_z of every group of servers as printed: the relative form is divided by the sum of
    gamma_i over those who count.
    """
    weights, step = method.penalties(federation.devices), method.step
    assert isinstance(step, Relative | Absolute)
    groups = [list(range(federation.devices))] if spec.cloud.sync else federation.servers
    return {
        f"server {n}": (
            step.step / (1.0 if isinstance(step, Absolute) else float(weights[list(members)].sum()))
        )
        for n, members in enumerate(groups)
    }


def _noise(
    federation: Federation,
    method: Method,
    objective: Objective,
    start: torch.Tensor,
    devices: int,
) -> tuple[Finding, float | None]:
    """Assumption 5 judged, and sigma where it was measured."""
    if method.batch == "all":
        return assumptions.noise(None, None, devices), None
    try:
        found = bias(federation, method, objective, start)
        spread = None if found is not None else sigma(federation, objective, start, devices)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        found, spread = (
            Bias(
                (f"gradients of single samples could not be compared ({_error_line(error)})",), ()
            ),
            None,
        )
    few = min(devices, federation.devices)
    return assumptions.noise(spread, method.batch, few, found), spread


def _error_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
