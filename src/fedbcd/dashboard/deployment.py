"""A running deployment, seen through the /status of its roles (and the coordinator's /metrics):
each is asked about once a second.

What changes makes a timeline. Phases and mixes are known as exactly as roles are asked, so shorter
phases blur. The folder of `fedbcd up` holds the merged log, which grows while the deployment runs
and is exact: then that is shown, and of the roles only their states.
"""

import http.client
import json
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedbcd.engines.deploy.local.status_client import get
from fedbcd.errors import ConfigError
from fedbcd.record.names import LOG
from fedbcd.record.timeline import ServerStanding, Timeline
from fedbcd.report.advice import advice
from fedbcd.report.planning import Planned, arrivals_of
from fedbcd.report.protocol_view import timeline_view
from fedbcd.report.runs import Extras
from fedbcd.report.standing import RunStanding
from fedbcd.report.view import RunRecord, run_view

EVERY_S = 1.0
AT_A_TIME = 16
METRICS = ("fedbcd_disagreement{", "fedbcd_staleness_rounds_sum", "fedbcd_staleness_rounds_count")
MOST_NAMED = 5  # roles in one remark
HARM = {  # what it means that such a role does not answer
    "coordinator": "if it is down, nothing is mixed until it is back",
    "server": (
        "if it is down, its devices wait, and the mixes of a cloud that waits for all servers"
        " do too"
    ),
    "device": (
        "if it is down, its server counts it as lost after a while and goes on with the others"
    ),
    "role": "it was never heard, so it is not known which role that is",
}
WAITING = "waiting for the coordinator"  # the state of a server between its phase and the mix


@dataclass
class Seen:
    """What a role last said, and when (by our own clock)."""

    address: str
    status: dict[str, Any] = field(default_factory=dict)
    at: float | None = None
    error: str = ""


def addresses_in(folder: Path) -> dict[str, str]:
    """The roles whose stores are in a folder of `fedbcd up`: place -> address of /status."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("state/**/health.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found[str(path.parent.relative_to(folder / "state"))] = (
                f"127.0.0.1:{int(json.loads(path.read_text())['port'])}"
            )
    return found


class WatchedDeployment:
    """The roles at some addresses, or below a folder of `fedbcd up` (whose ports change when a role
    is restarted).
    """

    key = "deployment"

    def __init__(self, addresses: Sequence[str] = (), folder: Path | None = None) -> None:
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigError(
                    f"--connect {address!r} must be host:port, the health address of a coordinator,"
                    " server or device"
                )
        self.name = folder.name if folder is not None else ", ".join(addresses[:3])
        self._fixed = {address: address for address in addresses}
        self.folder = folder
        self._seen: dict[str, Seen] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._version = 0
        self._timeline = Timeline({"identity": {}, "job": {}})
        self._phase: dict[int, int] = {}  # server -> its present phase, by its own count
        self._answered: dict[str, int] = {}
        self._metrics: dict[str, float] = {}
        self._planned = Planned()

    # ---------------------------------------------------------------------------------------------
    # asking
    def start(self) -> None:
        """Ask for ever, in a thread of its own that ends with the process."""
        threading.Thread(target=self._run, name="deployment", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            while not self._stop.is_set():
                began = time.monotonic()
                self.ask(pool)
                self._stop.wait(max(0.05, EVERY_S - (time.monotonic() - began)))

    def ask(self, pool: ThreadPoolExecutor) -> None:
        places = self._fixed | ({} if self.folder is None else addresses_in(self.folder))
        answers = dict(zip(places, pool.map(_ask, places.values()), strict=True))
        coordinator = next(
            (
                place
                for place, found in answers.items()
                if isinstance(found, dict) and found.get("actor") == "coordinator"
            ),
            None,
        )
        metrics = {} if coordinator is None else _ask_metrics(places[coordinator])
        with self._lock:
            self._metrics = metrics
            for place, answer in answers.items():
                self._note(place, places[place], answer)
            self._version += 1

    def _note(self, place: str, address: str, answer: dict[str, Any] | str) -> None:
        seen = self._seen.setdefault(place, Seen(address))
        seen.address = address
        if isinstance(answer, str):
            seen.error = answer
            return
        seen.status, seen.at, seen.error = answer, time.monotonic(), ""
        actor = str(answer.get("actor", ""))
        with suppress(KeyError, TypeError, ValueError):
            if actor.startswith("server/"):
                self._server(int(actor[7:]), answer)
            elif actor == "coordinator":
                self._coordinator(answer)

    # ---------------------------------------------------------------------------------------------
    # what has changed
    def _server(self, server: int, status: dict[str, Any]) -> None:
        timeline, clock, phase = self._timeline, float(status["clock"]), int(status["phase"])
        timeline.now = max(timeline.now, clock)
        standing = timeline.servers.setdefault(server, ServerStanding())
        if server not in self._phase and phase > 0:
            # Nobody knows when it opened, so the timeline begins with the next one.
            self._phase[server] = phase
        waits = str(status.get("state")) == WAITING
        now = "waiting" if waits else "collecting" if phase >= 0 else "new"
        changed = standing.state != now or standing.phases != phase + 1
        since = clock if changed else standing.since
        if phase > self._phase.get(server, -1):
            self._phase[server] = phase
            timeline.open_phase(server, phase, clock)
        if waits and standing.state == "collecting":
            timeline.end_phase(server, clock)
        standing.state, standing.since, standing.phases = now, since, phase + 1

    def _coordinator(self, status: dict[str, Any]) -> None:
        timeline, clock = self._timeline, float(status["clock"])
        timeline.now = max(timeline.now, clock)
        answered = {str(key): int(value) for key, value in dict(status.get("released", {})).items()}
        members = [int(key) for key, phase in answered.items() if self._answered.get(key) != phase]
        self._answered = answered
        while len(timeline.mixes) < int(
            status["round"]
        ):  # of several mixes since we last asked we know only the last
            timeline.mix(members, clock)

    # ---------------------------------------------------------------------------------------------
    # showing
    def view(self, logged: RunStanding | None = None) -> tuple[str, dict[str, Any]]:
        """A word that changes with every round of asking; the run as far as it can be seen from
        outside, and every role.

        `logged` is what the merged log says of how the run stands, where there is one.
        """
        with self._lock:
            now = time.monotonic()
            roles = [
                _role(place, seen, now)
                for place, seen in sorted(self._seen.items(), key=lambda item: _order(item[1]))
            ]
            told = self._standing()
            stands = told if logged is None or told.state == "finished" else logged
            dead = _dead(roles) if stands.state in ("running", "silent") else []
            run = (
                None
                if self.has_log
                else {**run_view(self._record(stands), self.key, 3_000, stands=stands), "unread": 0}
            )
            if run is not None:
                run["advice"] = advice(run, dead)
            return f"-{self._version}", {
                "run": run,
                "roles": roles,
                "metrics": self._metrics,
                "dead": dead,
                "standing": asdict(stands),
            }

    @property
    def has_log(self) -> bool:
        return self.folder is not None and (self.folder / LOG).is_file()

    def _standing(self) -> RunStanding:
        """As far as the roles tell: of one that does not answer any more, what it said last."""
        status = self._said_by("coordinator")
        heard = any(seen.status is status and not seen.error for seen in self._seen.values())
        place = (
            f"round {status['round']}" + (f" of {status['rounds']}" if status.get("rounds") else "")
            if "round" in status
            else ""
        )
        if status.get("finished"):
            return RunStanding("finished", f"finished, {status['round']} rounds")
        if self._seen and all(seen.error for seen in self._seen.values()):
            return RunStanding(
                "silent", "no role answers" + (f"; last seen at {place}" if place else "")
            )
        return RunStanding("running", place if heard or not place else f"last seen at {place}")

    def _said_by(self, actor: str) -> dict[str, Any]:
        return next(
            (seen.status for seen in self._seen.values() if seen.status.get("actor") == actor), {}
        )

    def timeline(self, begin: float, end: float) -> dict[str, Any]:
        with self._lock:
            return timeline_view(self._timeline, begin, end, 3_000)

    def plan(self) -> dict[str, Any] | None:
        """Round times for every B, from the phases that were seen."""
        with self._lock:
            arrivals = arrivals_of(self._record(self._standing()))
        return self._planned.plan(arrivals)

    def _record(self, stands: RunStanding) -> RunRecord:
        statuses = [seen.status for seen in self._seen.values()]
        servers = max(self._timeline.servers, default=-1) + 1
        coordinator = self._said_by("coordinator")
        active = next((s["active"] for s in statuses if "active" in s), 1)
        job: dict[str, Any] = {"title": self.name}
        if coordinator.get("rounds"):
            job["run"] = {"rounds": coordinator["rounds"]}
        self._timeline.header = {
            "identity": {"servers": [[] for _ in range(servers)], "active": active},
            "job": job,
        }
        silent = (
            [seen.address for seen in self._seen.values() if seen.error]
            if stands.state in ("running", "silent")
            else []
        )
        notices = (
            (f"no answer from {', '.join(silent[:5])}{' and others' if len(silent) > 5 else ''}",)
            if silent
            else ()
        )
        if not self._seen:
            notices = ("no role has been found yet",)
        return RunRecord(Path(self.name), self._timeline, Extras(), notices)


def _role(place: str, seen: Seen, now: float) -> dict[str, Any]:
    status = seen.status
    totals = status.get("totals") if isinstance(status.get("totals"), dict) else {}
    known = (
        "state",
        "phase",
        "round",
        "activation",
        "received",
        "active",
        "members",
        "devices",
        "peers",
        "waits_for",
        "ready",
        "clock",
    )
    return {
        "actor": str(status.get("actor", place)),
        "address": seen.address,
        "error": seen.error,
        "silent_s": None if seen.at is None else round(now - seen.at, 1),
        **{
            key: status[key]
            for key in known
            if isinstance(status.get(key), str | int | float | bool)
        },
        "totals": totals,
    }


def _dead(roles: list[dict[str, Any]]) -> list[str]:
    """A remark on each kind of role that does not answer, the one that holds up most first."""
    silent = [role for role in roles if role["error"]]
    return [
        text
        for kind, harm in HARM.items()
        if (text := _remark([role for role in silent if _kind(role["actor"]) == kind], harm))
    ]


def _remark(silent: list[dict[str, Any]], harm: str) -> str:
    if not silent:
        return ""
    names = ", ".join(
        f"{role['actor']} ({_since(role['silent_s'])})" for role in silent[:MOST_NAMED]
    )
    more = f" and {len(silent) - MOST_NAMED} more" if silent[MOST_NAMED:] else ""
    return f"{names}{more} {'does' if len(silent) == 1 else 'do'} not answer: {harm}"


def _since(silent_s: float | None) -> str:
    return "never heard" if silent_s is None else f"for {silent_s:.0f} s"


def _kind(actor: str) -> str:
    kind = actor.replace("-", "/").partition("/")[0]
    return kind if kind in HARM else "role"


def _order(seen: Seen) -> tuple[int, int]:
    kind, _, number = str(seen.status.get("actor", "")).partition("/")
    return {"coordinator": 0, "server": 1, "device": 2}.get(kind, 3), (
        int(number) if number.isdecimal() else 0
    )


def _ask(address: str) -> dict[str, Any] | str:
    try:
        found = json.loads(get(address, "/status"))
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return found if isinstance(found, dict) else "its /status is no object"


def _ask_metrics(address: str) -> dict[str, float]:
    """How far apart the servers' models are, and how stale servers were when mixed, from /metrics;
    empty where it says nothing.
    """
    try:
        lines = get(address, "/metrics").decode(errors="replace").splitlines()
    except (OSError, http.client.HTTPException):
        return {}
    found: dict[str, float] = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith(METRICS):
            with suppress(ValueError):
                number = float(value)
                found |= {name: number} if math.isfinite(number) else {}
    return found
