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
from fedbcd.algorithm.projection import diameter
from fedbcd.compute.smoothness import bias, estimate, sigma
from fedbcd.data.federation import Federation
from fedbcd.engines.participation import (
    Participation,
    other_schedule,
    planned_participation,
    recorded_participation,
)
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import Federations, Job
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
    findings = [_scope(method)]
    if method.has_personal:
        seen = (
            planned_participation(spec, federation, job.spec.rounds, job.spec.until_clock, rounds)
            if log is None
            else recorded_participation(log)
        )
        beyond = _beyond(job, seen)
        total = job.spec.rounds or (None if beyond else seen.rounds)
        findings += _of_the_schedule(spec, federation, seen, _source(log, seen), beyond)
        findings += _of_the_problem(spec, federation, devices, total)
    return CheckReport(
        job.name,
        tuple(sorted(findings, key=lambda finding: finding.assumption)),
        _is_random(spec, method),
    )


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
    return low < high or not all(
        isinstance(delay, Constant) for delay in (spec.clock.arrival, spec.clock.step)
    )


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


def _scope(method: Method) -> Finding:
    says = "Theorem 1 is about FedBCD with K_i = K_z = 1"
    if not _is_algorithm_1(method):
        found = f"{method.name} is another algorithm; the theorem says nothing about it"
        remedy = 'algorithm = { name = "fedbcd" }'
        return Finding(
            "-",
            says,
            Verdict.FAILS,
            found + ("" if method.has_personal else ", so nothing else was looked at"),
            remedy,
        )
    steps = (*method.lengths(offline=False), method.cloud_iterations)
    if steps == (1, 1, 1):
        return Finding("-", says, Verdict.HOLDS, "FedBCD, one step on devices and servers")
    found = (
        f"K_i from {steps[0]} to {steps[1]}, K_z = {steps[2]}; the proof says that it 'can be"
        " easily modified' and does not show how"
    )
    return Finding("-", says, Verdict.UNKNOWN, found, "steps = [1, 1], cloud_iterations = 1")


def _of_the_schedule(
    spec: RunSpec, federation: Federation, seen: Participation, source: str, beyond: str
) -> list[Finding]:
    servers = len(federation.servers)
    found = [assumptions.activation(seen.active, seen.watched, source, beyond)]
    if spec.cloud.sync:
        alone = "Sync-cloud: one global model, so |V| = 1 in the theory"
        return [
            *found,
            Finding(
                "1(ii)",
                "the servers' graphs of any q rounds are jointly connected",
                Verdict.HOLDS,
                f"q = 1. {alone}",
            ),
            *assumptions.mixing_weights([torch.ones(1, 1, dtype=torch.float64)]),
        ]
    if isinstance(spec.cloud, GraphCloud):
        matrices = [torch.tensor(m, dtype=torch.float64) for m in spec.cloud.mixing]
        beyond = (
            beyond if seen.rounds < 2 * len(matrices) else ""
        )  # the graphs come round again and again
    else:
        matrices = mixing_matrices(servers, seen.mixes, spec.cloud.weights)
    graphs = [[(n, m) for n, m in matrix.nonzero().tolist()] for matrix in matrices]
    edges = [graphs[t % len(graphs)] for t in range(seen.rounds)]
    return [
        *found,
        assumptions.connectivity(servers, edges, source, beyond),
        *assumptions.mixing_weights(matrices),
    ]


def _of_the_problem(
    spec: RunSpec, federation: Federation, devices: int, rounds: int | None
) -> list[Finding]:
    method = spec.method_of(federation)
    module = federation.make_model(spec.seed)
    objective = Objective(module.to(spec.dtype), federation.loss)
    start = objective.layout.flatten(module, spec.dtype)
    p = objective.layout.size_P
    start[:p] = method.projection.project(start[:p])
    known, why_not = _smoothness(federation, method, objective, start, devices)
    gamma = method.penalties(federation.devices)
    step = assumptions.device_step(method.device_step, gamma.tolist(), known)
    step_fails = step.verdict is Verdict.FAILS
    return [
        assumptions.compactness(diameter(method.projection, p)),
        assumptions.smoothness(known, why_not),
        step,
        _server_step(spec, federation, float(gamma.max()), rounds),
        assumptions.momentum(
            method.momentum, method.device_step, gamma.tolist(), known, step_fails
        ),
        _noise(federation, method, objective, start, devices),
    ]


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


def _server_step(
    spec: RunSpec, federation: Federation, gamma: float, rounds: int | None
) -> Finding:
    """4(ii), with the relative form turned into the printed one: eta_abs = eta_z / sum of gamma_i
    over those who count.
    """
    method = spec.method_of(federation)
    if isinstance(spec.cloud, AsyncCloud | DynamicGraph) and spec.cloud.first < len(
        federation.servers
    ):
        return assumptions.unequal_server_steps()
    weights, step = method.penalties(federation.devices), method.step
    assert isinstance(step, Relative | Absolute)
    groups = [list(range(federation.devices))] if spec.cloud.sync else federation.servers
    steps = {
        f"server {n}": (
            step.step / (1.0 if isinstance(step, Absolute) else float(weights[list(members)].sum()))
        )
        for n, members in enumerate(groups)
    }
    return assumptions.server_step(steps, gamma, max(len(members) for members in groups), rounds)


def _noise(
    federation: Federation,
    method: Method,
    objective: Objective,
    start: torch.Tensor,
    devices: int,
) -> Finding:
    if method.batch == "all":
        return assumptions.noise(None, None, devices)
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
    return assumptions.noise(spread, method.batch, min(devices, federation.devices), found)


def _error_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
