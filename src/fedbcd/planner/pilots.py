"""The trade-off on your own job: smaller B, shorter rounds, less progress per round. Short pilot
runs decide.

Successive halving at equal clock time: every candidate B runs to the first stop; of the worse half
those that are clearly behind the best are hopeless and end there; the others go on to the next
stop, twice as far away. A pilot that goes on resumes its own run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import mean, variance
from tempfile import TemporaryDirectory

from fedbcd.data.federation import Federation
from fedbcd.engines.run import train
from fedbcd.errors import ConfigError
from fedbcd.experiments.job import Federations, Job
from fedbcd.experiments.sweep import judged_by
from fedbcd.planner.order_statistics import check_rank
from fedbcd.planner.round_time import rounds_of
from fedbcd.planner.server_time import device_model
from fedbcd.protocol.clouds import (
    AsyncCloud,
    DynamicGraph,
    GraphCloud,
    RigorousCloud,
    SyncCloud,
)
from fedbcd.record.history import column_of
from fedbcd.spec import Budget, RunSpec, Watch, default_of

Planned = AsyncCloud | RigorousCloud | DynamicGraph  # clouds with a B
PLANNED: dict[str, type[AsyncCloud] | type[RigorousCloud]] = {
    kind.name: kind for kind in (AsyncCloud, RigorousCloud)
}
STOPS = (1 / 16, 1 / 8, 1 / 4)  # of the job's own length


@dataclass
class Pilot:
    """One candidate B: where each of its seeds stood at each stop, and whether it was stopped
    early.
    """

    first: int
    scores: list[tuple[float, ...]] = field(default_factory=list)  # per stop, one score per seed
    rounds: int = 0  # of the first seed, so far
    stopped_at: float | None = None  # the clock at which it was given up
    sign: int = 1  # -1 where lower scores are better

    @property
    def score(self) -> float:
        return mean(self.scores[-1])


@dataclass(frozen=True)
class Recommendation:
    """The best B of the pilots, with all of them as evidence."""

    first: int
    by: str
    stops: tuple[float, ...]  # clock times
    pilots: tuple[Pilot, ...]  # best first
    clear: bool  # whether the lead over the runner-up is more than chance over seeds
    cloud: str  # on which the pilots ran: "async" or "rigorous"

    @property
    def sentence(self) -> str:
        best, name = self.pilots[0], self.by.replace("_", " ")
        text = f"wait for B = {best.first}: {name} {best.score:.3f} at clock {self.stops[-1]:.0f}"
        if len(self.pilots) == 1:
            return text
        rival = self.pilots[1]
        shared = _last_shared_stop(best, rival)
        there = f"{rival.score:.3f} at clock {self.stops[shared]:.0f}"
        if shared < len(best.scores) - 1:
            there += (
                f", where B = {best.first} had {mean(best.scores[shared]):.3f}, and was stopped"
            )
        doubt = "" if self.clear else "; that lead may be chance, so either will do"
        return f"{text}; B = {rival.first} had {there}{doubt}"


def candidates(servers: int) -> list[int]:
    """B to try when none are named: 1, three in between, and all."""
    return sorted({1, *(max(1, round(share * servers)) for share in (0.3, 0.5, 0.7)), servers})


def run_pilots(
    job: Job,
    firsts: Sequence[int] | None = None,
    *,
    seeds: int = 2,
    by: str = "",
    until_clock: float | None = None,
    cloud: str | None = None,
    on_done: Callable[[Pilot, int], None] = lambda _, __: None,
) -> Recommendation:
    """Try each B of `firsts` on the job.

    by           a column of the history; by default the global models by the first measure
    until_clock  where the last stop is (default: a quarter of the job's own length)
    cloud        "async" or "rigorous" (default: see `planned_cloud`)
    """
    name = planned_cloud(job, cloud)
    chosen = candidates(job.federation.servers) if firsts is None else sorted(set(firsts))
    _check(job, chosen, seeds, until_clock)
    last = STOPS[-1] * job_length(job) if until_clock is None else until_clock
    stops = tuple(share / STOPS[-1] * last for share in STOPS)
    jobs = [job.changed(seed=job.spec.seed + k) for k in range(seeds)]
    made = Federations()
    federations = [made.of(each) for each in jobs]
    jobs[0].use_threads(federations[0])
    pilots = [Pilot(first) for first in chosen]
    racing = list(pilots)
    with TemporaryDirectory(prefix="fedbcd-pilots-") as folder:
        for number, stop in enumerate(stops):
            for pilot in racing:
                by = _advance(
                    pilot,
                    cloud_with(job, name, pilot.first),
                    jobs,
                    federations,
                    stop,
                    by,
                    Path(folder),
                )
                on_done(pilot, number)
            if number < len(stops) - 1:
                racing = _without_hopeless(racing, stop)
    pilots.sort(key=lambda pilot: (-len(pilot.scores), -pilot.sign * pilot.score))
    return Recommendation(pilots[0].first, by, stops, tuple(pilots), _is_clear(pilots), name)


def planned_cloud(job: Job, named: str | None = None) -> str:
    """The name of the cloud that a job is planned for: the one `named`, else its own ("async" for
    "sync", which is its B = N).
    """
    chosen = named or ("async" if isinstance(job.spec.cloud, SyncCloud) else job.spec.cloud.name)
    if chosen == GraphCloud.name:
        raise ConfigError(
            f"{job.name} mixes all servers along its matrix, so there is no B to choose; "
            "name the cloud to put in its place: 'async' or 'rigorous' (--cloud)"
        )
    if chosen not in PLANNED and not (chosen == DynamicGraph.name == job.spec.cloud.name):
        raise ConfigError(
            f"cloud={chosen!r} cannot be planned for; use 'async' or 'rigorous' (sync waits for all"
            " servers, which is B = N)"
        )
    return chosen


def cloud_with(job: Job, name: str, first: int) -> Planned:
    """The job's own cloud, or the one of this name, with B = `first`."""
    own = job.spec.cloud
    if own.name == name:
        assert isinstance(own, Planned)
        return replace(own, first=first)
    return PLANNED[name](first)


def job_length(job: Job) -> float:
    """How long the job runs on its clock: as it says, or its rounds times the expected length of
    one.
    """
    if job.spec.until_clock is not None:
        return job.spec.until_clock
    first = getattr(job.spec.cloud, "first", job.federation.servers)
    assert job.spec.rounds is not None
    return (
        job.spec.rounds
        * rounds_of(
            job.spec.cloud.name, device_model(job), job.federation.servers, first, job.spec.rounds
        ).mean
    )


def _check(job: Job, firsts: Sequence[int], seeds: int, until_clock: float | None) -> None:
    for first in firsts:
        check_rank(first, job.federation.servers)
    if seeds < 1:
        raise ConfigError(f"seeds={seeds} must be 1 or more")
    if until_clock is not None and not 0 < until_clock < math.inf:
        raise ConfigError(f"until_clock={until_clock} must be a finite number above 0")
    if job.method.is_only_sync:
        raise ConfigError(
            f"{job.method.name} is for the sync cloud, which waits for all servers; there is no B"
            " to try"
        )


def _advance(
    pilot: Pilot,
    cloud: Planned,
    jobs: Sequence[Job],
    federations: Sequence[Federation],
    stop: float,
    by: str,
    folder: Path,
) -> str:
    """Returns the column that decides, with its direction in the pilot."""
    scores = []
    for seed, (job, federation) in enumerate(zip(jobs, federations, strict=True)):
        run = train(
            federation,
            pilot_spec(job.spec, cloud, stop),
            out=folder / f"{pilot.first}-{seed}",
            resume=True,
            on_notice=lambda _: None,  # the run that is chosen says them
        )
        if run.interrupted:
            raise KeyboardInterrupt
        measure, better = judged_by(by, run.history)
        by, pilot.sign = by or column_of("global", measure), -1 if better == "lower" else 1
        scores.append(run.history.last[by])
        if seed == 0:
            pilot.rounds = run.history.last.round
    if not all(map(math.isfinite, scores)):
        raise ConfigError(
            f"the pilots have no {by.replace('_', ' ')}: the data set has no test samples to"
            " score on"
        )
    pilot.scores.append(tuple(scores))
    return by


def pilot_spec(spec: RunSpec, cloud: Planned, stop: float) -> RunSpec:
    """The job's own run on a cloud up to clock `stop`, looked at once, where it ends."""
    options = (f for part in (Budget, Watch) for f in fields(part))
    quiet = {f.name: default_of(f) for f in options}
    quiet |= {"until_clock": stop, "looks": 1, "certify_every": 0}
    return replace(spec, cloud=cloud, **quiet)


def _without_hopeless(racing: Sequence[Pilot], stop: float) -> list[Pilot]:
    """Give up those of the worse half that are behind the best by more than chance."""
    ranked = sorted(racing, key=lambda pilot: -pilot.sign * pilot.score)
    margin = _margin(ranked)
    for pilot in ranked[math.ceil(len(ranked) / 2) :]:
        if pilot.sign * (ranked[0].score - pilot.score) > margin:
            pilot.stopped_at = stop
    return [pilot for pilot in ranked if pilot.stopped_at is None]


def _margin(pilots: Sequence[Pilot], stop: int = -1) -> float:
    """Two standard errors of a difference of means over seeds, from the spread that all pilots have
    in common; 0 for one seed.
    """
    seeds = len(pilots[0].scores[stop])
    if seeds < 2:
        return 0.0
    pooled = mean(variance(pilot.scores[stop]) for pilot in pilots)
    return 2 * math.sqrt(pooled * 2 / seeds)


def _last_shared_stop(a: Pilot, b: Pilot) -> int:
    return min(len(a.scores), len(b.scores)) - 1


def _is_clear(pilots: Sequence[Pilot]) -> bool:
    """Whether the best leads the runner-up, at the last stop both saw, by more than chance; one
    seed cannot tell.
    """
    if len(pilots) < 2:
        return True
    best, rival = pilots[:2]
    shared = _last_shared_stop(best, rival)
    seen = [pilot for pilot in pilots if len(pilot.scores) > shared]
    lead = best.sign * (mean(best.scores[shared]) - mean(rival.scores[shared]))
    return len(best.scores[shared]) > 1 and lead > _margin(seen, shared)
