"""The commands of a deployment: `fedbcd coordinator | server | device | up | status | admit |
dismiss | log`.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from fedbcd.cli.output import (
    Data,
    Grid,
    Json,
    Trust,
    console,
    note,
    print_json,
    say,
    say_how_to_go_on,
    screen_for,
    show,
    table_of,
    waiting,
)
from fedbcd.cli.overrides import new_folder, override
from fedbcd.config import dump_toml, read_toml
from fedbcd.data.federation import Federation
from fedbcd.engines.deploy.processes.options import Deploy, merge_options
from fedbcd.engines.warnings import never_mixes
from fedbcd.errors import ConfigError, RecordError, Refused
from fedbcd.experiments.deployed import deployment_of, one_job, read_job, spec_of
from fedbcd.experiments.job import Job, default_table, read_job_file
from fedbcd.experiments.pictures import draw_run
from fedbcd.own import imports
from fedbcd.protocol.messages import COORDINATOR, Actor, device_actor, server_actor
from fedbcd.record.history import in_words
from fedbcd.record.names import DEPLOY, JOB, LOG, REPORT
from fedbcd.record.tensorfile import write_whole

if TYPE_CHECKING:
    from fedbcd.engines.deploy.links.tls import Security
    from fedbcd.engines.deploy.local.up import Up, View
    from fedbcd.engines.deploy.processes.assemble import Deployment
    from fedbcd.engines.deploy.roles.blueprint import Blueprint
    from fedbcd.engines.result import Run

LOOK_S = 1.0  # between two looks at stores that grow

File = Annotated[
    Path,
    typer.Argument(help="A job file (TOML) with a [deploy] section; the same for all roles."),
]
OptionalFile = Annotated[
    Path | None,
    typer.Argument(help="A job file (TOML). Without one: FedBCD on digits that ship with fedbcd."),
]
Folder = Annotated[
    str | None, typer.Option(help="Where this role keeps its store (in a folder of its own).")
]
Certificates = Annotated[
    str | None, typer.Option(help="Folder of certificates, as 'fedbcd certs' makes it.")
]
Plain = Annotated[bool | None, typer.Option("--plain", help="No TLS; on loopback only.")]
Listen = Annotated[
    str | None, typer.Option(help="host:port to listen at, where it differs from what others dial.")
]
Health = Annotated[
    str | None, typer.Option(help="host:port of /healthz, /readyz, /metrics, /status.")
]
Coordinator = Annotated[
    str | None, typer.Option("--coordinator", help="host:port of the coordinator.")
]
Init = Annotated[
    bool,
    typer.Option(
        "--init",
        help="Begin a new store. For the very first start only: without it there must be one.",
    ),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


# ------------------------------------------------------------------------------------------------
# one role
def coordinator_command(
    file: File,
    rounds: Annotated[int | None, typer.Option(help="Stop mixing after this many rounds.")] = None,
    init: Init = False,
    folder: Folder = None,
    certificates: Certificates = None,
    plain: Plain = None,
    listen: Listen = None,
    health: Health = None,
    log_level: LogLevel = "info",
) -> None:
    """Run the coordinator of a deployment."""
    flags = {
        "folder": folder,
        "certificates": certificates,
        "plain": plain,
        "listen": listen,
        "health": health,
    }
    _serve(COORDINATOR, file, flags, log_level, rounds, init)


def server_command(
    file: File,
    number: Annotated[int, typer.Option("--id", help="Which server, from 0.")],
    init: Init = False,
    folder: Folder = None,
    coordinator: Coordinator = None,
    certificates: Certificates = None,
    plain: Plain = None,
    listen: Listen = None,
    health: Health = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one server of a deployment."""
    flags = {
        "folder": folder,
        "certificates": certificates,
        "plain": plain,
        "listen": listen,
        "health": health,
    }
    _serve(server_actor(number), file, {**flags, "coordinator": coordinator}, log_level, init=init)


def device_command(
    file: File,
    number: Annotated[int, typer.Option("--id", help="Which device, from 0.")],
    folder: Folder = None,
    certificates: Certificates = None,
    plain: Plain = None,
    health: Health = None,
    log_level: LogLevel = "info",
) -> None:
    """Run one device of a deployment, on its part of the job's data. For data and models of your
    own see examples/own_device.py.
    """
    flags = {"folder": folder, "certificates": certificates, "plain": plain, "health": health}
    _serve(device_actor(number), file, flags, log_level)


def _serve(
    actor: Actor,
    file: Path,
    flags: dict[str, Any],
    log_level: str,
    rounds: int | None = None,
    init: bool = False,
) -> None:
    from fedbcd.engines.deploy.processes.base import run_process
    from fedbcd.engines.deploy.processes.device import TRAINING
    from fedbcd.engines.deploy.processes.failpoints import arm_from_environment

    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(0)
    )  # while it loads; a running process has a handler of its own
    arm_from_environment()
    job, options = read_job(file, flags)
    options.check_servers(job.federation.servers)
    deployment = replace(deployment_of(job, options, rounds), log_level=log_level)
    code = int(run_process(lambda: deployment.process(actor, init=init)))
    if any(
        thread.name == TRAINING for thread in threading.enumerate()
    ):  # not waited for: it is started again
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


# ------------------------------------------------------------------------------------------------
# up
def up_command(
    file: OptionalFile = None,
    servers: Annotated[int | None, typer.Option(help="How many servers.")] = None,
    devices: Annotated[int | None, typer.Option(help="How many devices in all.")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Stop after this many rounds, whatever the file says.")
    ] = None,
    cloud: Annotated[str | None, typer.Option(help="sync, async or rigorous.")] = None,
    first: Annotated[
        int | None, typer.Option(help="B, how many servers a mix waits for (async and rigorous).")
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(help="Draw the delays of [clock]; a unit lasts this many seconds."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed.")] = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything (default: a new one under runs/).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the deployment in --out.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No TLS.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Start a whole deployment on this machine, show it live, and leave a run folder. Ctrl-C stops
    it; --resume goes on.
    """
    changes = {
        "servers": servers,
        "devices": devices,
        "rounds": rounds,
        "cloud": cloud,
        "first": first,
        "seed": seed,
        "data": data,
    }
    if resume:
        if out is None:
            raise ConfigError(
                "--resume needs --out DIR, the folder of the deployment to go on with"
            )
        asked = {**changes, "a job file": file, "time-scale": time_scale, "plain": plain or None}
        if any(value is not None for value in asked.values()):
            names = ", ".join(name for name, value in asked.items() if value is not None)
            raise ConfigError(
                f"--resume goes on with the deployment as it was; leave out {names}, or start a"
                " new one"
            )
        with imports(allowed=trust):
            job, options = _resumed(out)
    else:
        folder = out or new_folder("deployment" if file is None else file.stem)
        job, options = _planned(
            file, folder, changes, {"time_scale": time_scale, "plain": plain or None}
        )
        out = folder
    _run_up(job, options, out, as_json)


def _planned(
    file: Path | None, out: Path, changes: dict[str, Any], flags: dict[str, Any]
) -> tuple[Job, Deploy]:
    """The job and options of a new deployment in a new folder, with certificates."""
    from fedbcd.engines.deploy.local.up import free_ports

    if out.exists() and any(out.iterdir()):
        raise RecordError(
            f"{out} is not empty; choose a new folder with --out, or go on with --resume"
        )
    table = _up_table() if file is None else read_job_file(file)
    _change(table, changes)
    job = one_job(table)
    ports = free_ports(job.federation.servers + 1)
    places = {
        "folder": str(out / "state"),
        "certificates": None if flags["plain"] else str(out / "certs"),
        "coordinator": f"127.0.0.1:{ports[0]}",
        "servers": [f"127.0.0.1:{port}" for port in ports[1:]],
        "health": "127.0.0.1:0",
    }
    return job, merge_options(table.get("deploy", {}), os.environ, {**places, **flags})


def _up_table() -> dict[str, Any]:
    """The default deployment: the model of the default job, digits for any number of devices,
    FedBCD, the first 3 servers that are ready.
    """
    return {
        "data": {"name": "digits", "diversity": 3, "samples": 60},
        "federation": {"servers": 10, "devices": 10, "active": 3},
        "model": default_table()["model"],
        "algorithm": {
            "name": "fedbcd",
            "device_step": 0.02,
            "projection": {"name": "box", "low": -2, "high": 2},
        },
        "cloud": {"name": "async", "first": 3},
        "run": {"rounds": 30},
    }


def _change(table: dict[str, Any], changes: dict[str, Any]) -> None:
    given = {key: value for key, value in changes.items() if value is not None}
    federation = dict(table.get("federation", {}))
    servers = given.get("servers", federation.get("servers", 10))
    federation["servers"] = servers
    if "devices" in given:
        if given["devices"] % servers:
            raise ConfigError(
                f"--devices {given['devices']} cannot be shared evenly by {servers} servers; use a"
                f" multiple of {servers}"
            )
        federation["devices"] = given["devices"] // servers
        if isinstance(active := federation.get("active", 3), int):
            federation["active"] = min(active, federation["devices"])
    override(table, rounds=given.get("rounds"), seed=given.get("seed"), folder=given.get("data"))
    cloud = dict(table.get("cloud", {"name": "sync"}))
    if "cloud" in given and given["cloud"] != cloud.get("name"):
        cloud = {"name": given["cloud"]}
    if "first" in given:
        cloud["first"] = given["first"]
    elif "servers" in given and "first" in cloud:
        # A mix cannot wait for more servers than there are.
        cloud["first"] = min(cloud["first"], servers)
    table |= {"federation": federation, "cloud": cloud}


def _resumed(out: Path) -> tuple[Job, Deploy]:
    """The job and options of the deployment in a folder, as they were."""
    if not (out / DEPLOY).is_file():
        raise RecordError(
            f"{out} holds no deployment to go on with; start a new one without --resume"
        )
    job = one_job(read_toml(out / JOB), recorded=True)
    return job, merge_options(read_toml(out / DEPLOY).get("deploy", {}), {}, {})


def _run_up(job: Job, options: Deploy, out: Path, as_json: bool) -> None:
    from fedbcd.engines.deploy.local.finish import growing_log
    from fedbcd.engines.deploy.local.up import Up, actors_of, check_stores, rehearse_apart

    federation = job.make_federation()
    job = job.settled(federation)
    rehearse_apart(job.spec, federation)
    warning = never_mixes(job.spec.cloud, job.federation.servers)
    if warning is not None:
        note(warning)
    deployment = deployment_of(job, options, job.spec.rounds, federation=federation)
    if (out / DEPLOY).exists():
        check_stores(options, deployment.blueprint)
    else:
        options = _begin(job, options, deployment.blueprint, out)
        deployment = replace(deployment, options=options)
    log = growing_log(out, federation, spec_of(job, options), options, job.to_table())
    up = Up(deployment, out, log)
    processes = len(actors_of(deployment.blueprint))
    say(f"{processes} processes, logs in {out / 'logs'}; Ctrl-C stops them")
    finished = _watch(up, job, options)
    facts = up.facts()
    codes = up.stop()
    log.close()
    # one that had not begun yet has no handler
    bad = {actor: code for actor, code in codes.items() if code not in (0, -signal.SIGTERM)}
    if bad:
        say(f"did not end well (docs/operations.md explains the codes): {bad}")
    if not finished:
        say_how_to_go_on("fedbcd up", out, [job.to_table()])
        sys.exit(next(iter(bad.values()), 130))
    facts["cpu_seconds"] = round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), 3)
    _conclude(job, federation, deployment, out, facts, as_json)


def _begin(job: Job, options: Deploy, blueprint: "Blueprint", out: Path) -> Deploy:
    """Certificates, stores and settings of a new deployment; its options, with when it begins."""
    from fedbcd.engines.deploy.local.up import actors_of, make_certificates, make_stores, start_up_s

    options = replace(options, epoch=time.time() + start_up_s(len(actors_of(blueprint))))
    out.mkdir(parents=True, exist_ok=True)
    if not options.plain:
        make_certificates(out / "certs", blueprint)
    make_stores(options, blueprint)
    write_whole(out / JOB, dump_toml(job.to_table()).encode())
    write_whole(out / DEPLOY, dump_toml({"deploy": asdict(options)}).encode())
    return options


def _watch(up: "Up", job: Job, options: Deploy) -> bool:
    """Show the deployment until it is done; False: it was stopped before."""
    asked: list[int] = []
    before = {
        n: signal.signal(n, lambda n, _: asked.append(n)) for n in (signal.SIGINT, signal.SIGTERM)
    }
    until = (
        None if job.spec.until_clock is None else job.spec.until_clock * (options.time_scale or 1.0)
    )
    finished, told = False, 0
    try:
        up.start()
        with Live(
            console=console, auto_refresh=False, transient=False
        ) as live:  # no thread: children are forked from this one
            for view in up.watch(lambda: bool(asked)):
                live.update(_picture(view, job), refresh=console.is_terminal)
                for child in view.crashed[told:]:
                    say(
                        f"{child.actor} has ended with code {child.code} (docs/operations.md); see"
                        " its log"
                    )
                told = len(view.crashed)
                finished = bool(view.coordinator.get("finished")) or (
                    until is not None and view.coordinator.get("clock", 0.0) >= until
                )
                if finished and until is not None:
                    break
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return finished


def _picture(view: "View", job: Job) -> Grid:
    seen, goal = view.coordinator, job.spec.rounds or f"clock {job.spec.until_clock:g}"
    title = (
        f"round {seen.get('round', '-')} of {goal}, clock {seen.get('clock', 0.0):.1f} s,"
        f" {view.running} processes"
    )
    title += (
        f", {view.restarts} restarts, {view.memory_bytes / 2**30:.2f} GiB"
        if view.memory_bytes
        else ""
    )
    names = ("server", "phase", "uploads", "devices", "received", "sent", "refused", "waits for")
    table = table_of(*names, title=title, words=("waits for",), plain=True)
    for n, server in view.servers.items():
        totals = server.get("totals", {})
        uploads = f"{server.get('received', '-')}/{server.get('active', '-')}"
        bytes_ = (f"{totals.get(key, 0.0) / 1e6:.1f} MB" for key in ("bytes_in", "bytes_out"))
        refused = str(int(sum(totals.get("refused", {}).values())))
        table.add_row(
            str(n),
            str(server.get("phase", "-")),
            uploads,
            str(server.get("devices", "-")),
            *bytes_,
            refused,
            server.get("waits_for", "down"),
        )
    return table


def _conclude(
    job: Job,
    federation: Federation,
    deployment: "Deployment",
    out: Path,
    facts: dict[str, Any],
    as_json: bool,
) -> None:
    from fedbcd.engines.deploy.local.finish import conclude
    from fedbcd.report.page import write_report

    with waiting("merging the logs, and replaying them ..."):
        run = conclude(
            out,
            federation,
            spec_of(job, deployment.options),
            deployment.options,
            job.to_table(),
            facts,
        )
    draw_run(job.name, run, out)
    write_report([out], out / REPORT, plan=False)
    _report(run, out, as_json)


def _report(run: "Run", out: Path, as_json: bool) -> None:
    s, d = run.summary, run.summary["deployment"]
    screen = screen_for(as_json)
    memory, digest = d["memory_bytes"] / 2**30, s["digest"][:16]
    measure = run.history.first_measure
    ends = run.history.scores("global")[-1], run.history.scores("personal")[-1]
    for sentence in s.get("notices", ()):
        note(sentence)
    say(
        f"{s['rounds']} rounds in {s['clock']:.1f} s: global {in_words(measure)} {ends[0]:.3f},"
        f" personal {ends[1]:.3f}; {d['processes']} processes, {memory:.2f} GiB,"
        f" {d['restarts']} restarts, {d['bytes_per_activation']} bytes per activation"
        f" ({d['bytes_over_least']:.2%} more than a model down and one up). The replay of the log"
        f" ends with the same models: digest {digest}. Everything is in {out}, the report in"
        f" {out / REPORT}",
        screen,
    )
    print_json(as_json, s | {"out": str(out)})


# ------------------------------------------------------------------------------------------------
# members
Deployed = Annotated[
    Path, typer.Argument(help="The job file of the deployment, or the folder of 'fedbcd up'.")
]
Devices = Annotated[list[int], typer.Argument(help="Numbers of devices.")]


def admit_command(
    file: Deployed,
    devices: Devices,
    certificates: Certificates = None,
    plain: Plain = None,
    trust: Trust = False,
) -> None:
    """Make devices members of a running deployment, each of its own server; needs the certificate
    of 'operator'.
    """
    with imports(allowed=trust):
        _change_members(file, devices, {"certificates": certificates, "plain": plain}, "admit")


def dismiss_command(
    file: Deployed,
    devices: Devices,
    certificates: Certificates = None,
    plain: Plain = None,
    trust: Trust = False,
) -> None:
    """Let devices leave a running deployment: they no longer count, until they are admitted again;
    needs the certificate of 'operator'.
    """
    with imports(allowed=trust):
        _change_members(file, devices, {"certificates": certificates, "plain": plain}, "dismiss")


def read_deployment(file: Path, flags: dict[str, Any]) -> "Deployment":
    """The deployment of a job file, or of the folder of `fedbcd up`."""
    job, options = _resumed(file) if file.is_dir() else read_job(file, {})
    given = {name: value for name, value in flags.items() if value is not None}
    return deployment_of(job, replace(options, **given))


def _change_members(file: Path, devices: list[int], flags: dict[str, Any], what: str) -> None:
    import asyncio

    from fedbcd.engines.deploy.links.operator_client import ask_change

    deployment = read_deployment(file, flags)
    options = deployment.options
    for device in devices:
        deployment.check_actor(device_actor(device))
    for device in devices:
        server = server_actor(deployment.blueprint.home_of(device))
        changed = asyncio.run(
            ask_change(server, options.addresses_of(server)[0], _operator(options), what, device)
        )
        now = {"admit": "a member", "dismiss": "no member"}[what]
        print(f"device {device} is {now} of {server}" + ("" if changed else ", as before"))


def _operator(options: Deploy) -> "Security":
    from fedbcd.engines.deploy.links.tls import Credentials, Plain as PlainText

    return (
        PlainText()
        if options.plain
        else Credentials(options.certificates_of(options.operator), options.operator)
    )


# ------------------------------------------------------------------------------------------------
# log
def log_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Stores of roles on this machine, or folders that hold such."),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on as they grow; Ctrl-C ends it.")
    ] = False,
) -> None:
    """Print what roles have recorded, as lines of the event log, in order of time; they may be
    running.
    """
    from fedbcd.engines.deploy.local.growing_log import LogTail, stores_in

    onlooker = LogTail([store for folder in folders for store in stores_in(folder)])
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        while True:
            sys.stdout.buffer.writelines(onlooker.lines(wait=follow))
            sys.stdout.flush()
            if not follow:
                return
            time.sleep(LOOK_S)


# ------------------------------------------------------------------------------------------------
# status
def status_command(
    file: Annotated[
        Path, typer.Argument(help="The job file of the deployment, or the folder of 'fedbcd up'.")
    ],
    certificates: Certificates = None,
    plain: Plain = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per role.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a role has to answer; more over long distances.")
    ] = 1.5,
) -> None:
    """Ask the coordinator and the servers of a running deployment how they are doing; needs the
    certificate of 'operator'.
    """
    path = file / DEPLOY if file.is_dir() else file
    options = merge_options(
        read_toml(path).get("deploy", {}),
        os.environ,
        {"certificates": certificates, "plain": plain},
    )
    found = _statuses(options, timeout)
    for status in found if as_json else ():
        print(json.dumps(status))
    silent = [status for status in found if "error" in status]
    if not as_json and len(silent) == len(found):
        print(_nobody(file, silent))
    elif not as_json:
        show(_status_table(found), Console())
        for status in found:
            if "error" in status:
                say(f"{status['actor'].replace('/', ' ')}: {status['error']}", Console())
            for sentence in status.get("trouble", ()):
                say(f"{status['actor']}: {sentence}", Console())
    if silent:
        raise typer.Exit(1)


def _statuses(options: Deploy, timeout_s: float) -> list[dict[str, Any]]:
    """What coordinator and servers say of themselves, or why one says nothing; all are asked at
    once, at all of their addresses.
    """
    import asyncio

    from fedbcd.engines.deploy.links.operator_client import request_status

    security = _operator(options)

    async def ask(actor: Actor, address: str) -> dict[str, Any]:
        try:
            return await request_status(actor, address, security, timeout_s)
        except Refused as error:
            return {"actor": actor, "error": str(error)}

    async def ask_all() -> list[dict[str, Any]]:
        actors = (COORDINATOR, *(server_actor(n) for n in range(len(options.servers))))
        asked = [(actor, place) for actor in actors for place in options.addresses_of(actor)]
        answers = await asyncio.gather(*(ask(actor, place) for actor, place in asked))
        found: dict[Actor, dict[str, Any]] = {}
        for (actor, _), answer in zip(asked, answers, strict=True):
            if actor not in found or "error" not in answer:
                found[actor] = answer
        return _with_silence([*found.values()], timeout_s)

    return asyncio.run(ask_all())


def _with_silence(found: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """The coordinator knows for how long nothing has been heard of a server that does not
    answer.
    """
    silent: dict[str, float] = found[0].get("silent", {})
    for status in found:
        if status.get("error", "").endswith("(network?)"):
            seconds = silent.get(status["actor"], timeout_s)
            status["error"] = f"no answer for {seconds:.0f} s (network?)"
    return found


def _nobody(file: Path, silent: list[dict[str, Any]]) -> str:
    """What no answer at all means: a deployment that has finished or was stopped, as far as the log
    in its folder tells.
    """
    from fedbcd.report.view import read_run, standing_of

    if (file / LOG).is_file():
        stands = standing_of(read_run(file))
        if stands.state != "running":
            return f"{stands.words}; no role runs" if stands.state == "finished" else stands.words
    first = silent[0]
    why = first["error"]
    if why.endswith("(network?)"):
        why = f"{first['actor'].replace('/', ' ')}: {why}"
    return f"no role answers: {why}" + (
        f"; nor do its {len(silent) - 1} servers" if silent[1:] else ""
    )


def _status_table(found: list[dict[str, Any]]) -> Grid:
    names = ("role", "round or phase", "clock", "peers", "waits for", "clocks that are off")
    table = table_of(*names, words=("role", "waits for", "clocks that are off"), plain=True)
    for status in found:
        if "error" in status:
            table.add_row(status["actor"], "-", "-", "-", "-", "")
            continue
        table.add_row(
            status["actor"],
            str(status.get("phase", status.get("round"))),
            f"{status['clock']:.1f}",
            str(status["peers"]),
            status["waits_for"],
            _clocks(status),
        )
    return table


def _clocks(status: dict[str, Any]) -> str:
    """Whose clock is off by more than a few seconds: that of a role's own machine, or of the worst
    of its peers.
    """
    from fedbcd.engines.deploy.processes.clock import OFF_S

    own, skew = (
        status.get("clock_ahead", 0.0),
        status.get("clock_skew", 0.0),
    )  # older roles do not say
    parts = [f"own log {own:+,.0f} s"] if abs(own) > OFF_S else []
    parts += [f"{status['clock_skew_of']} {skew:+,.0f} s"] if abs(skew) > OFF_S else []
    return ", ".join(parts)
