"""The commands about time: `fedbcd plan` and `fedbcd explain`. Thin, like `cli`; scipy is loaded
only when one of them runs.
"""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from fedbcd.cli.output import (
    INTERRUPTED,
    Data,
    Grid,
    Json,
    note,
    print_json,
    say,
    say_where,
    screen_for,
    show,
    table_of,
    waiting,
)
from fedbcd.cli.overrides import read_jobs
from fedbcd.config import choose
from fedbcd.errors import ConfigError, RecordError
from fedbcd.experiments.job import Job
from fedbcd.protocol.clouds import AsyncCloud, DynamicGraph, GraphCloud
from fedbcd.record.runfolder import writing_to
from fedbcd.schedule.delays import DELAYS

if TYPE_CHECKING:
    from fedbcd.planner.explain import ExplainedRound, ServerPart
    from fedbcd.planner.order_statistics import Distribution, LargeN
    from fedbcd.planner.pilots import Recommendation
    from fedbcd.planner.plan import Plan, PlanRow
    from fedbcd.planner.server_time import Fit, ServerTime
    from fedbcd.schedule.availability import PerServer

MOST_ROWS = 16
LEGEND = """fresh: E[tau_(B)] of servers that start together, r: its ratio to that of all (eq. 7)
round: mean time between two mixes, where servers left out carry on (+- 95 %); ratio: to that of all
steps/h: server steps from a mix; age: rounds since its last mix, of a server left out
(old: 95 in 100 are younger)"""

LARGE_N = """F^-1, sd: mean and standard deviation of tau_(B) by eq. (8); r: exactly, as above
eq. 8: r as F^-1(beta) / F^-1(1 - 1/N); limit: the paper's closed form, for Weibull times or a
finite support; off: relative to r"""
Row = TypeVar("Row", "PlanRow", "LargeN")
LINKED = """linked: of the servers in a mix, those with a link to another that is there, where all
servers are alike; the rest step from their own model"""
NO_BARS = (
    "+- is -: these times have no finite variance, so a sampled mean has no error bar and is likely"
    " too short; B = all is exact"
)


def plan_command(
    file: Annotated[
        Path | None, typer.Argument(help="A job file (TOML). Without one: the default job.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Plan from an event log, or the folder of a run, in place of a job."),
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            help=(
                "Plan from a distribution of server times: '{ name = \"gamma\", shape = 2 }', or a"
                " name of scipy.stats."
            )
        ),
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="N, how many servers (default: those of the job or log).")
    ] = None,
    first: Annotated[
        str | None,
        typer.Option(
            help=(
                "Which B, such as 3, 1-5 or 1,3,10 (default: every B; 50 of them beyond 100"
                " servers)."
            )
        ),
    ] = None,
    active: Annotated[
        str | None,
        typer.Option(help="Which q, such as 3 or 1-6 (default: that of the job or log)."),
    ] = None,
    cloud: Annotated[
        str | None, typer.Option(help="async or rigorous (default: that of the job, else async).")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help=(
                "Which of the runs of the job file, by title (default: the first on an async"
                " cloud)."
            )
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rigorous cloud: how many rounds the run is to have.")
    ] = 100,
    clock_seconds: Annotated[float, typer.Option(help="Seconds in one unit of the clock.")] = 1.0,
    pilots: Annotated[
        bool, typer.Option(help="Train short pilots of the job to find the best B.")
    ] = True,
    seeds: Annotated[int, typer.Option(help="Pilots: how many seeds for each B.")] = 2,
    by: Annotated[
        str,
        typer.Option(
            help="Pilots: the column of the history that decides (default: global models by the"
            " first measure)."
        ),
    ] = "",
    until_clock: Annotated[
        float | None, typer.Option(help="Pilots: where they end (default: a quarter of the job).")
    ] = None,
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for plan.json and plan.png (default: nothing is written)."),
    ] = None,
    large_n: Annotated[
        bool, typer.Option("--large-n", help="Show eq. (8) and its closed forms beside the plan.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say how long a round takes for each number B of servers to wait for, and which B is best for
    your job.
    """
    from fedbcd.planner.plan import make_plan

    _check_sources(file, log, times, active)
    _check_pilots(seeds, until_clock)
    screen = screen_for(as_json)
    fits: list[Fit] = []
    sources: dict[PerServer, ServerTime]
    job: Job | None = None
    if log is not None:
        sources, number, fits = _from_log(log, _numbers(active, "--active"))
    elif times is not None:
        sources, number = {1: _from_times(times)}, _required(servers, "--times")
    else:
        job = _job(file, run, data)
        sources, number = _from_job(job, _numbers(active, "--active")), job.federation.servers
    chosen = _cloud(screen, job, cloud)
    firsts = _numbers(first, "--first")
    with waiting("planning ..."):
        plan = make_plan(
            sources,
            number if servers is None else servers,
            firsts=firsts,
            cloud=chosen,
            rounds=rounds,
            clock_seconds=clock_seconds,
            links=_links(job, chosen),
        )
    _show_plan(screen, plan, fits, job, large_n)
    recommendation, interrupted = None, False
    if job is not None and pilots and servers not in (None, number):
        say(f"no pilots: the job has {number} servers, not {servers}", screen)
    elif job is not None and pilots:
        try:
            recommendation = _pilots(screen, job, firsts, seeds, by, until_clock, chosen)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: the plan is kept, without pilots")
    _keep(screen, plan, recommendation, fits, out, as_json)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check_sources(
    file: Path | None, log: Path | None, times: str | None, active: str | None
) -> None:
    if sum(given is not None for given in (file, log, times)) > 1:
        raise ConfigError("give a job file, --log or --times, one of them")
    if times is not None and active is not None:
        raise ConfigError(
            f"--active {active} does not go with --times, which are of whole servers; use a job or"
            " a log"
        )


def _check_pilots(seeds: int, until_clock: float | None) -> None:
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} must be 1 or more")
    if until_clock is not None and not 0 < until_clock < math.inf:
        raise ConfigError(f"--until-clock {until_clock:g} must be a finite number above 0")


def explain_command(
    log: Annotated[Path, typer.Argument(help="An event log, or the folder of a run.")],
    round_: Annotated[
        int | None, typer.Option("--round", help="Which round, from 0 on (default: the longest).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say who waited for whom in one round of a recorded run, and why the round took as long as it
    did.
    """
    from fedbcd.planner.explain import explain

    story = explain(log, round_, note)
    screen = screen_for(as_json)
    show(_story_table(story), screen)
    for sentence in story.sentences:
        say(sentence, screen)
    print_json(as_json, asdict(story) | {"length": story.length, "sentences": story.sentences})


# ------------------------------------------------------------------------------------------------
# what to plan from
def _job(file: Path | None, title: str | None, data: Path | None) -> Job:
    jobs = read_jobs(file, data)
    if title is not None:
        named = [job for job in jobs if job.name == title]
        if not named:
            raise ConfigError(
                f"no run is called {title!r}; there are {', '.join(repr(job.name) for job in jobs)}"
            )
        return named[0]
    fitting = [job for job in jobs if hasattr(job.spec.cloud, "first")] or [
        job for job in jobs if not job.method.is_only_sync
    ]
    return (fitting or jobs)[0]


def _cloud(screen: Console, job: Job | None, named: str | None) -> str:
    """Which cloud to plan for, and a word where it takes the place of a mixing matrix."""
    from fedbcd.planner.pilots import planned_cloud

    if job is None:
        return named or AsyncCloud.name
    chosen = planned_cloud(job, named)
    if isinstance(job.spec.cloud, GraphCloud):
        say(f"the mixing matrix of {job.name} is replaced by the {chosen} cloud", screen)
    return chosen


def _links(job: Job | None, cloud: str) -> DynamicGraph | None:
    own = None if job is None else job.spec.cloud
    return own if isinstance(own, DynamicGraph) and own.name == cloud else None


def _from_job(job: Job, actives: Sequence[int] | None) -> "dict[PerServer, ServerTime]":
    from fedbcd.planner.server_time import device_model

    if job.method.takes_time_offline:
        note(
            f"{job.name}: devices cannot ask while they train offline, which this plan leaves out:"
            " rounds will last longer; pilots, or --log of a run, have it in them"
        )
    return {active: device_model(job, active) for active in actives or (job.active,)}


def _from_log(
    log: Path, actives: Sequence[int] | None
) -> "tuple[dict[PerServer, ServerTime], int, list[Fit]]":
    from fedbcd.planner.record import read_record
    from fedbcd.planner.server_time import RecordedTime, fits, observe

    record = read_record(log, note)
    seen = max(len(phase.complete) for phase in record.phases)
    sources: dict[PerServer, ServerTime] = {
        active: RecordedTime(observe(record, active)) for active in actives or ()
    } or {seen: RecordedTime(observe(record))}
    try:
        return sources, record.servers, fits(observe(record))
    except RecordError as error:
        say(f"no distribution was fitted: {error}")
        return sources, record.servers, []


def _from_times(text: str) -> "ServerTime":
    from fedbcd.planner.order_statistics import distribution_of
    from fedbcd.planner.server_time import KnownTime

    try:
        table = tomllib.loads(f"times = {text}")["times"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"--times {text!r} is not a table; write it as '{{ name = \"gamma\", shape = 2 }}'"
        ) from None
    name = table.get("name") if isinstance(table, dict) else None
    if isinstance(name, str) and name not in DELAYS and (found := _scipy(name, table)) is not None:
        return KnownTime(found)
    return KnownTime(distribution_of(choose(DELAYS, table, "times")))


def _scipy(name: str, table: dict[str, Any]) -> "Distribution | None":
    """A continuous distribution of scipy.stats by its name, with scipy's names of its
    parameters.
    """
    from scipy import stats

    kind = getattr(stats, name, None)
    if not isinstance(kind, stats.rv_continuous):
        return None
    values = {key: value for key, value in table.items() if key != "name"}
    for key, value in values.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ConfigError(
                f"--times: {key} = {value!r} of scipy.stats.{name} must be a finite number"
            )
    try:
        found = kind(**values)
    except TypeError as error:
        raise ConfigError(
            f"--times: scipy.stats.{name} cannot be made so ({error}); its shape parameters are"
            f" {kind.shapes or 'none'}"
        ) from None
    if math.isnan(float(found.support()[0])):
        given = ", ".join(f"{key} = {value:g}" for key, value in values.items())
        raise ConfigError(
            f"--times: scipy.stats.{name} does not exist for {given}; shapes and scale are usually"
            " above 0"
        )
    return found


def _numbers(text: str | None, option: str) -> list[int] | None:
    """3, 1-5 or 1,3,10 as a list."""
    if text is None:
        return None
    try:
        found: list[int] = []
        for part in text.split(","):
            low, _, high = part.partition("-")
            found += range(int(low), int(high or low) + 1)
    except ValueError:
        raise ConfigError(f"{option} {text!r} must be numbers such as 3, 1-5 or 1,3,10") from None
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r} must name numbers from 1 on")
    return found


def _required(servers: int | None, option: str) -> int:
    if servers is None:
        raise ConfigError(f"{option} needs --servers N as well")
    return servers


# ------------------------------------------------------------------------------------------------
# pilots
def _pilots(
    screen: Console,
    job: Job,
    firsts: Sequence[int] | None,
    seeds: int,
    by: str,
    until_clock: float | None,
    cloud: str,
) -> "Recommendation | None":
    from fedbcd.planner.pilots import run_pilots

    if job.method.is_only_sync:
        say(
            f"no pilots: {job.method.name} is for the sync cloud, which waits for all servers",
            screen,
        )
        return None
    with waiting("pilot runs ...") as status:
        found = run_pilots(
            job,
            firsts,
            seeds=seeds,
            by=by,
            until_clock=until_clock,
            cloud=cloud,
            on_done=lambda pilot, stop: status.update(
                f"pilot runs: stop {stop + 1}, B = {pilot.first}: {pilot.score:.3f}"
            ),
        )
    show(_pilot_table(found), screen)
    say(found.sentence, screen)
    return found


# ------------------------------------------------------------------------------------------------
# showing
def _show_plan(
    screen: Console, plan: "Plan", fits: "Sequence[Fit]", job: Job | None, large_n: bool
) -> None:
    if fits:
        show(_fit_table(fits), screen)
        say(f"nearest: {fits[0].name}; the plan uses the recorded times themselves", screen)
    what = "" if job is None else f" of {job.name}"
    title = (
        f"{plan.servers} servers on the {plan.cloud} cloud{what}; E[tau_n] = {plan.server_time:.3g}"
    )
    show(_plan_table(plan, title), screen)
    say(LEGEND, screen)
    if _has_links(plan):
        say(LINKED, screen)
    if plan.slowest:
        say(plan.slowest, screen)
    if not plan.has_bars:
        say(NO_BARS, screen)
    if large_n:
        show(_large_n_table(plan), screen)
        say(LARGE_N, screen)


def _plan_table(plan: "Plan", title: str) -> Grid:
    several = len({row.active for row in plan.rows}) > 1
    names = ["q"] * several + [
        "B",
        "fresh",
        "r",
        "round",
        "+-",
        "ratio",
        "rounds/h",
        "steps/h",
        "age",
        "old",
        *["linked"] * _has_links(plan),
    ]
    table = table_of(*names, title=title)
    for row in _some(plan.rows):
        numbers = [
            f"{row.order_statistic:.3g}",
            f"{row.reduction:.3f}",
            f"{row.round_time:.3g}",
            _bar(row),
            f"{row.ratio:.3f}",
        ]
        rates = [f"{row.rounds_per_hour:.0f}", f"{row.updates_per_hour:.0f}"]
        ages = [f"{row.staleness:.1f}", f"{row.staleness_high:.0f}"] if row.beta < 1 else ["-", "-"]
        ages += [] if row.linked is None else [f"{row.linked:.0%}"]
        table.add_row(*[str(row.active)] * several, str(row.first), *numbers, *rates, *ages)
    return table


def _has_links(plan: "Plan") -> bool:
    return plan.rows[0].linked is not None


def _large_n_table(plan: "Plan") -> Grid:
    names = ("B", "F^-1", "sd", "r", "eq. 8", "off", "limit", "off")
    spread = "infinite" if plan.server_spread is None else f"{plan.server_spread:.3g}"
    title = f"eq. (8) at N = {plan.servers}; sigma_tau = {spread}"
    table = table_of(*names, title=title)
    for row in _some(plan.large_n):
        exact = [_or_dash(row.middle), _or_dash(row.deviation), f"{row.exact:.3g}"]
        limit = [_or_dash(row.limit), _percent(row.limit_error)]
        table.add_row(str(row.first), *exact, f"{row.ratio:.3g}", _percent(row.error), *limit)
    return table


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.0%}"


def _bar(row: "PlanRow") -> str:
    return "-" if row.error is None else f"{float(f'{row.error:.1g}'):g}"


def _some(rows: "Sequence[Row]") -> "list[Row]":
    """All rows where they fit on a page; otherwise B evenly spread, with the first and the last.
    --json has all.
    """
    firsts = sorted({row.first for row in rows})
    if len(firsts) <= MOST_ROWS:
        return list(rows)
    kept = {firsts[round(k * (len(firsts) - 1) / (MOST_ROWS - 1))] for k in range(MOST_ROWS)}
    return [row for row in rows if row.first in kept]


def _fit_table(fits: "Sequence[Fit]") -> Grid:
    names = ("fitted to the log", "parameters", "KS distance")
    table = table_of(*names, words=names[:2])
    for fit in fits:
        parameters = ", ".join(f"{name} {value:.4g}" for name, value in fit.parameters.items())
        table.add_row(fit.name, parameters, f"{fit.distance:.4f}")
    return table


def _pilot_table(found: "Recommendation") -> Grid:
    title = (
        f"pilots on the {found.cloud} cloud: {found.by.replace('_', ' ')} at equal clock, mean"
        " (spread) over seeds"
    )
    stops = [f"clock {stop:.0f}" for stop in found.stops]
    table = table_of("B", *stops, "rounds", "", title=title, words=("",))
    for pilot in found.pilots:
        cells = [
            f"{mean(scores):.3f} ({f'{stdev(scores):.3f}' if len(scores) > 1 else '-'})"
            for scores in pilot.scores
        ]
        stopped = "" if pilot.stopped_at is None else "stopped"
        table.add_row(
            str(pilot.first),
            *cells,
            *[""] * (len(found.stops) - len(cells)),
            str(pilot.rounds),
            "best" if pilot.first == found.first else stopped,
        )
    return table


def _story_table(story: "ExplainedRound") -> Grid:
    names = ("server", "opened", "ready", "waited", "last device", "arrival", "work", "steps")
    title = f"round {story.round}: who waited"
    table = table_of(*names, title=title)
    for part in [*story.mixed, *story.left_out]:
        table.add_row(*_story_cells(part))
    return table


def _story_cells(part: "ServerPart") -> list[str]:
    waited = "not mixed" if part.waited is None else f"{part.waited:.2f}"
    steps = "-" if part.steps is None else str(part.steps)
    device = "-" if part.last_device is None else str(part.last_device)
    return [
        str(part.server),
        *map(_time, (part.opened, part.ready)),
        waited,
        device,
        *map(_time, (part.arrival, part.work)),
        steps,
    ]


def _time(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _keep(
    screen: Console,
    plan: "Plan",
    recommendation: "Recommendation | None",
    fits: "Sequence[Fit]",
    out: Path | None,
    as_json: bool,
) -> None:
    from fedbcd.planner.pictures import draw_plan

    summary: dict[str, Any] = asdict(plan)
    summary["fits"] = [
        {"name": fit.name, **fit.parameters, "distance": fit.distance} for fit in fits
    ]
    summary["recommendation"] = None
    if recommendation is not None:
        summary["recommendation"] = asdict(recommendation) | {"sentence": recommendation.sentence}
    if out is not None:
        with writing_to(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / "plan.json").write_text(json.dumps(summary, indent=1) + "\n")
        drawn = draw_plan(plan, recommendation, out / "plan.png")
        say_where(drawn, screen, f"plan.json{' and plan.png are' if drawn else ' is'} in {out}")
    print_json(as_json, summary)
