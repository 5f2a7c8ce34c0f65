"""One run as plain data for a page: what was run, its curves, its devices, its protocol."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedbcd.data.measure import measure_in
from fedbcd.describe import flat
from fedbcd.palette import as_plain, looks_of
from fedbcd.planner.slowest import lonely, slowest
from fedbcd.record.history import (
    ACCURACY,
    CERTIFICATES,
    ENDS,
    PLACE,
    History,
    column_of,
    columns_of,
    in_words,
)
from fedbcd.record.names import DEPLOY, LOG
from fedbcd.record.tensorfile import FLOATS
from fedbcd.record.timeline import Timeline
from fedbcd.report.baseline import Baseline, has_personal_models
from fedbcd.report.follow import LogFollower
from fedbcd.report.protocol_view import (
    device_summary,
    round_lengths,
    server_table,
    staleness,
    time_spent,
    timeline_view,
)
from fedbcd.report.runs import Extras, read_extras, series_of
from fedbcd.report.standing import RunStanding, job_file, standing

MOST_POINTS = 1_000  # of a curve
MOST_ROWS = 200  # of a picture of the split
ENDED = ("stopped", "failed")  # states of runs that have no end
WORST = 10  # devices that are named
MOST_PAIRS = 300  # devices that are drawn one by one
SHARES = ("accuracy", "f1", "recall", "precision")  # measures that people read in percent


@dataclass
class RunRecord:
    """A run folder that has been read: its log, folded, and what lies beside it."""

    folder: Path
    timeline: Timeline | None
    extras: Extras
    notices: tuple[str, ...] = ()
    damage: str = ""  # what is wrong with its log

    @cached_property
    def header(self) -> dict[str, Any]:
        return {} if self.timeline is None else self.timeline.header

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What makes this run this run: algorithm, cloud, clock, servers."""
        found = self.header.get("identity")
        return found if isinstance(found, dict) else {}

    @cached_property
    def job(self) -> dict[str, Any]:
        """The job file of the run, or as much of it as its identity says."""
        job = self.header.get("job")
        if isinstance(job, dict) and job:
            return job
        return {
            key: value
            for key, value in self.identity.items()
            if key not in ("servers", "data", "model", "joins", "leaves")
        }

    @property
    def name(self) -> str:
        return str(self.job.get("title") or self.folder.name)

    @property
    def seed(self) -> int:
        found = self.identity.get("seed", 0)
        return found if isinstance(found, int) else 0

    @cached_property
    def homes(self) -> dict[int, int]:
        servers = self.identity.get("servers", [])
        return (
            {device: n for n, members in enumerate(servers) for device in members}
            if isinstance(servers, list)
            else {}
        )

    @cached_property
    def group(self) -> str:
        """The same for runs that differ by their seed (and title) only."""
        run = self.job.get("run")
        plain = {
            **self.job,
            "title": "",
            "seed": 0,
            "run": {**run, "seed": 0} if isinstance(run, dict) else run,
        }
        return json.dumps(plain, sort_keys=True)


def read_run(folder: Path) -> RunRecord:
    """Read a run folder whole. A log that is damaged is read up to there, and a notice says so."""
    follower = LogFollower(folder / LOG)
    follower.poll()
    return record_of(folder, follower, read_extras(folder))


def record_of(folder: Path, follower: LogFollower, extras: Extras) -> RunRecord:
    """What a follower has read so far, with what lies beside the log."""
    damage = follower.notice or ""
    if follower.timeline is None and not damage:
        damage = (
            f"{follower.path} has no whole line yet: the run has just begun, or was killed at once"
        )
    notices = (damage, *extras.notices) if damage else extras.notices
    return RunRecord(folder, follower.timeline, extras, notices, damage)


def standing_of(record: RunRecord) -> RunStanding:
    return standing(record.folder, record.timeline, record.job)


def run_view(
    record: RunRecord,
    key: str,
    phases: int | None = None,
    still: dict[str, Any] | None = None,
    stands: RunStanding | None = None,
) -> dict[str, Any]:
    """Everything a page shows of one run. `still` is what `devices_view` gave for the same extras,
    if it is at hand.

    `stands` says how the run stands where its folder does not.
    """
    stands = stands or standing_of(record)
    timeline, extras = record.timeline, record.extras
    view: dict[str, Any] = {
        "key": key,
        "name": record.name,
        "folder": str(record.folder),
        "seed": record.seed,
        "group": record.group,
        "notices": [*record.notices, *([stands.words] if stands.state in ENDED else [])],
        "damage": record.damage,
        "way_on": stands.command,
        "job_file": str(job_file(record.folder) or ""),
        "settings": settings_in(record.job),
        "environment": extras.environment,
        "summary": summary(record) | {"state": stands.state, "standing": stands.words},
        "series": series_of(record.folder, record.name, extras.history.first_measure),
        "history": curves(record),
        "measures": measures_in(record.extras.history),
        **(still or devices_view(record)),
    }
    cluster = cluster_view(extras.summary)
    if cluster is not None:
        view["cluster"] = cluster
    if timeline is not None and len(timeline.phases):
        view |= {
            "timeline": timeline_view(timeline)
            if phases is None
            else timeline_view(timeline, most=phases),
            "spent": time_spent(timeline),
            "rounds": round_lengths(timeline),
            "staleness": staleness(timeline),
            "servers": server_table(timeline),
            "devices": device_summary(timeline, len(record.homes)),
            "events": dict(timeline.events),
            "slowest": slowest(timeline),
            "lonely": lonely(timeline),
        }
    return view


def summary(record: RunRecord) -> dict[str, Any]:
    timeline, found = record.timeline, record.extras.summary
    history = record.extras.history
    rounds = len(timeline.mixes) if timeline is not None else 0
    active = record.identity.get("active")
    return {
        "algorithm": _name(record.identity, "algorithm"),
        "cloud": _name(record.identity, "cloud"),
        "finished": timeline is not None and timeline.end is not None,
        "fraction": _fraction(record),
        "rounds": rounds,
        "clock": timeline.now if timeline is not None else 0.0,
        "bytes": traffic(record, [rounds])[0],
        "values": record.extras.values,
        "devices": len(record.homes),
        "servers": len(record.identity.get("servers", [])),
        "active": active if isinstance(active, int) else None,
        "largest_server": max(Counter(record.homes.values()).values(), default=None),
        **{each: _number(history.scores(each)[-1]) if history else None for each in ENDS},
        "measure": measure_in(record.identity),
        "metric": history.first_measure,
        "better": history.measures.get(history.first_measure, "higher"),
        "unit": unit_of(history.first_measure),
        "own": has_personal_models(record.identity),
        "time": "seconds" if (record.folder / DEPLOY).is_file() else "virtual",
        "seconds": found.get("seconds"),
        "evaluation_share": found.get("evaluation_share"),
        "certificates": _certificates(record),
        "digest": (timeline.end or {}).get("digest") if timeline is not None else None,
    }


def _certificates(record: RunRecord) -> dict[str, Any]:
    """The last that were taken, in which round; or why there are none. Those of a summary are on
    fewer devices than those of a history.
    """
    last = next((row for row in reversed(record.extras.history) if math.isfinite(row.gap)), None)
    if last is not None:
        return {name: _number(getattr(last, name)) for name in (PLACE[0], *CERTIFICATES)}
    found = record.extras.summary.get("certificates")
    if found:
        return {"round": record.extras.summary.get("rounds"), **found}
    return {"none": _why_no_certificates(record)}


def _why_no_certificates(record: RunRecord) -> str:
    if not has_personal_models(record.identity):
        return "its algorithm keeps no personal models"
    if "deployment" in record.extras.summary or (record.folder / DEPLOY).is_file():
        return "a deployment takes none"
    if record.extras.summary:
        return "none were asked for"
    return (
        "none have been taken so far"
        if record.timeline is None or record.timeline.end is None
        else "its folder holds none"
    )


def cluster_view(found: dict[str, Any]) -> dict[str, Any] | None:
    """What each actor of a cluster did, and what travelled; None where the run was on none, or says
    so in another way.
    """
    try:
        cluster = found["cluster"]
        shards = [
            {"node": str(shard["node"])}
            | {key: float(shard[key]) for key in ("devices", "expected_share", "seconds")}
            for shard in cluster["shards"]
        ]
        moved = {key: float(cluster["bytes"][key]) for key in ("models", "work", "sums", "rows")}
        return (
            {"shards": shards, "bytes": moved, "rebuilt": int(cluster["rebuilt"])}
            if shards
            else None
        )
    except (KeyError, TypeError, ValueError):
        return None


def _fraction(record: RunRecord) -> float | None:
    run, timeline = record.job.get("run"), record.timeline
    if not isinstance(run, dict) or timeline is None:
        return None
    if timeline.end is not None:
        return 1.0
    goal, done = (
        (run["rounds"], len(timeline.mixes))
        if run.get("rounds")
        else (run.get("until_clock"), timeline.now)
    )
    return min(1.0, done / goal) if isinstance(goal, int | float) and goal > 0 else None


def _name(table: dict[str, Any], key: str) -> str:
    found = table.get(key)
    return str(found.get("name", "")) if isinstance(found, dict) else ""


# ------------------------------------------------------------------------------------------------
# curves
def curves(record: RunRecord) -> dict[str, list[float | None]]:
    """The history in columns, with the traffic up to each row; of a long one every so manieth
    row.
    """
    history = _thinned(record.extras.history)
    names = history.columns or columns_of([ACCURACY])
    columns = {
        name: [_number(value) for value in history.column(name)] if history else []
        for name in names
    }
    return columns | {"bytes": list(traffic(record, [row.round for row in history]))}


def measures_in(history: History) -> list[dict[str, str]]:
    """Each measure: its name, which is better, and the columns that a page draws."""
    return [
        {"name": in_words(name), "better": better, "unit": unit_of(name)}
        | {each: column_of(each, name) for each in ENDS}
        for name, better in history.measures.items()
    ]


def unit_of(measure: str) -> str:
    """How people read it: `share`, in percent, or as it is."""
    return "share" if measure in SHARES or measure.endswith("_accuracy") else ""


def _thinned(history: History) -> History:
    if len(history) <= MOST_POINTS:
        return history
    places = np.unique(np.linspace(0, len(history) - 1, MOST_POINTS).round().astype(int))
    return History([history[int(k)] for k in places], history.measures)


def traffic(record: RunRecord, rounds: Sequence[int]) -> list[float]:
    """Bytes of models that had been sent by the end of these rounds: to and from devices, and
    between servers and coordinator.

    Sync-cloud servers report a sum of float64; everything else travels in the dtype of the run.
    Message heads are not counted.
    """
    timeline, values = record.timeline, record.extras.values
    if timeline is None or not values:
        return [0.0 for _ in rounds]
    width = FLOATS.get(str(record.identity.get("dtype")), FLOATS["float32"]).itemsize
    report = 8 if _name(record.identity, "cloud") == "sync" else width
    r = timeline.mixes
    done = [min(k, len(r)) - 1 for k in rounds]
    return [
        (
            float(values * (width * (r.down[k] + r.up[k] + r.answers[k]) + report * r.reports[k]))
            if k >= 0
            else 0.0
        )
        for k in done
    ]


# ------------------------------------------------------------------------------------------------
# devices
def devices_view(record: RunRecord, baseline: Baseline | None = None) -> dict[str, Any]:
    """What the extras say about devices: their scores, against a baseline where there is one, and
    their data.
    """
    own = has_personal_models(record.identity)
    return {
        "personal": personal_view(record.extras, record.homes, own, baseline),
        "partition": partition_view(record.extras, record.homes),
    }


def personal_view(
    extras: Extras, homes: dict[int, int], own: bool = True, baseline: Baseline | None = None
) -> dict[str, Any] | None:
    """How personal accuracy is spread over devices, and who gains and loses: against a baseline, or
    the run's own global models.

    `own` is whether devices keep models of their own; where they do not there is nothing to gain.
    """
    if not extras.personal:
        return None
    devices = sorted(extras.personal)
    scores = np.array([extras.personal[device] for device in devices])
    sign = -1 if extras.judged[1] == "lower" else 1
    order = np.argsort(sign * scores, kind="stable")
    decile = max(1, len(scores) // 10)
    against = baseline.scores if baseline is not None else extras.home if own else {}
    view: dict[str, Any] = {
        "devices": len(devices),
        "own": own,
        "mean": float(scores.mean()),
        "worst_decile": float(scores[order[:decile]].mean()),
        "histogram": _histogram(scores, min(0.0, scores.min()), max(1.0, scores.max()), 40),
        "worst": [_device_row(extras, homes, devices[k], against) for k in order[:WORST]],
        "gain": None,
        "pairs": _pairs([devices[k] for k in order], extras, homes, against),
    }
    compared = [device for device in devices if device in against]
    if compared:
        name = None if baseline is None else baseline.name
        view["gain"] = _gain(extras, homes, compared, against) | {"against": name}
    return view


def _gain(
    extras: Extras, homes: dict[int, int], compared: list[int], against: dict[int, float]
) -> dict[str, Any]:
    """Who gains and who loses by a model of its own."""
    sign = -1 if extras.judged[1] == "lower" else 1
    gains = np.array([sign * (extras.personal[d] - against[d]) for d in compared])
    ranked = np.argsort(gains, kind="stable")
    losing = [compared[k] for k in ranked[:WORST] if gains[k] < 0]
    winning = [compared[k] for k in ranked[::-1][:WORST] if gains[k] > 0]
    return {
        "better": int((gains > 0).sum()),
        "same": int((gains == 0).sum()),
        "worse": int((gains < 0).sum()),
        "mean": float(gains.mean()),
        "histogram": _histogram(gains, -1.0, 1.0, 80),
        "losers": [_device_row(extras, homes, device, against) for device in losing],
        "winners": [_device_row(extras, homes, device, against) for device in winning],
    }


def _pairs(
    ranked: list[int], extras: Extras, homes: dict[int, int], against: dict[int, float]
) -> dict[str, Any]:
    """What devices score by their own model and by the other, in order from the worst; of many
    devices every so manieth.
    """
    places = np.linspace(0, len(ranked) - 1, min(len(ranked), MOST_PAIRS)).round().astype(int)
    shown = [ranked[k] for k in np.unique(places)]
    other = [against[device] for device in shown if device in against]
    return {
        "all": len(ranked),
        "device": shown,
        "server": [homes.get(device) for device in shown],
        "own": [round(extras.personal[device], 4) for device in shown],
        "other": [round(v, 4) for v in other] if len(other) == len(shown) else None,
    }


def _device_row(
    extras: Extras, homes: dict[int, int], device: int, against: dict[int, float]
) -> dict[str, Any]:
    labels, counts = extras.partition.get("labels"), extras.partition.get("counts")
    owned = (
        [label for label, count in zip(labels, counts[device], strict=False) if count]
        if labels and counts
        else None
    )
    return {
        "device": device,
        "server": homes.get(device),
        "personal": extras.personal.get(device),
        "against": against.get(device),
        "labels": owned,
    }


def _histogram(values: Any, low: float, high: float, bins: int) -> dict[str, Any]:
    counts, edges = np.histogram(np.clip(values, low, high), bins=bins, range=(low, high))
    return {"low": low, "high": high, "edges": edges.round(6).tolist(), "counts": counts.tolist()}


def partition_view(extras: Extras, homes: dict[int, int]) -> dict[str, Any] | None:
    """Who owns how many samples of which label; of many devices every so manieth."""
    sizes, labels, counts = (extras.partition.get(key) for key in ("sizes", "labels", "counts"))
    if not sizes:
        return None
    shown = np.unique(
        np.linspace(0, len(sizes) - 1, min(len(sizes), MOST_ROWS)).round().astype(int)
    ).tolist()
    view: dict[str, Any] = {
        "devices": len(sizes),
        "sizes": {
            "least": min(sizes),
            "median": float(np.median(sizes)),
            "most": max(sizes),
            "all": sum(sizes),
        },
        "shown": shown,
        "servers": [homes.get(device, -1) for device in shown],
        "labels": None,
    }
    if labels and counts:
        owned = [sum(count > 0 for count in row) for row in counts]
        view |= {
            "labels": labels,
            "counts": [counts[device] for device in shown],
            "per_device": {
                "least": min(owned),
                "median": float(np.median(owned)),
                "most": max(owned),
            },
            "per_label": np.asarray(counts).sum(axis=0).tolist(),
            **_unowned(labels, np.asarray(counts).sum(axis=0), extras.partition.get("tested")),
        }
    return view


def _unowned(labels: list[int], per_label: Any, tested: list[int] | None) -> dict[str, Any]:
    """Labels that no device owns, and what their share of the test set leaves for a global model to
    reach.
    """
    nobody = per_label == 0
    share = (
        float(np.asarray(tested)[nobody].sum() / max(1, sum(tested)))
        if tested and len(tested) == len(labels)
        else None
    )
    return {
        "unowned": [label for label, missing in zip(labels, nobody, strict=True) if missing],
        "ceiling": None if share is None else 1.0 - share,
    }


# ------------------------------------------------------------------------------------------------
# settings
def settings_in(table: Any) -> list[tuple[str, str]]:
    """A nested table as rows of key and text, in order."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value))
        for key, value in flat(table).items()
    ]


def differences(settings: Iterable[list[tuple[str, str]]]) -> list[dict[str, Any]]:
    """The settings in which runs differ, with the value of each run (None: it has none)."""
    tables = [dict(rows) for rows in settings]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    rows = [{"key": key, "values": [table.get(key) for table in tables]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1 and row["key"] != "title"]


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is said of runs beside each other: in which settings they differ, and how they look."""
    found = differences([run["settings"] for run in runs])
    groups = {run["group"]: run["summary"]["algorithm"] for run in runs}
    looks = dict(zip(groups, looks_of([*groups.values()]), strict=True))
    for place, run in enumerate(runs):
        told = [f"{row['key'].rpartition('.')[2]} {row['values'][place]}" for row in found]
        run["differs"] = ", ".join(told)
    return {
        "differences": found,
        "looks": {run["key"]: as_plain(looks[run["group"]]) for run in runs},
    }


def _number(value: float) -> float | None:
    """NaN and infinity have no place in JSON."""
    return value if math.isfinite(value) else None
