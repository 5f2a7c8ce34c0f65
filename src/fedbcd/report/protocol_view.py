"""What a log says about time, as plain data for a page: the timeline of the protocol, where the
time went, who stands where.
"""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbcd.record.timeline import Timeline

Floats = npt.NDArray[np.float64]
MOST_PHASES = 4_000  # in a page; of a longer run the longest rounds and the last ones are kept
LONGEST, AROUND, LAST = 5, 8, 50  # rounds: how many longest, with how many beside each; the last
MOST_VISITS_SHOWN = 12_000
POINTS = 100  # of the pace of a run
# of an overview of the rest: at most so many of a server, and of all; of all for each phase shown
BINS, CELLS, PER_PHASE, FEWEST_BINS = 400, 10_000, 20, 20


def timeline_view(
    timeline: Timeline, begin: float = 0.0, end: float | None = None, most: int = MOST_PHASES
) -> dict[str, Any]:
    """The protocol between two times: phases, visits and mixes in columns. Of more than `most`
    phases, those of the stretches that are `known`; for the rest an overview, shares in percent.
    """
    stop = timeline.now if end is None else end
    phases = timeline.phases
    opened, released = _floats(phases.opened), _floats(phases.released)
    released = np.where(released < 0, np.inf, released)
    chosen = np.flatnonzero((opened <= stop) & (released >= begin))
    known = [(begin, stop)]
    if len(chosen) > most:
        known = _stretches(timeline, begin, stop)
        within = [(opened[chosen] <= b) & (released[chosen] >= a) for a, b in known]
        shown = chosen[np.logical_or.reduce(within)] if known else chosen[-most:]
        if len(shown) > most:
            shown = shown[-most:]
            known = [(float(opened[shown[0]]), stop)]
    else:
        shown = chosen
    columns = {
        name: _picked(getattr(phases, name), shown) for name in ("server", "round", "last_device")
    }
    times = {
        name: _picked(getattr(phases, name), shown)
        for name in ("opened", "ended", "mixed", "released", "last_admitted")
    }
    return {
        "servers": max(timeline.servers, default=-1) + 1,
        "begin": begin,
        "end": stop,
        "phases": columns | times,
        "visits": _visits(timeline, shown),
        "mixes": _mixes(timeline, known),
        "total_phases": len(chosen),
        "known": [[round(a, 4), round(b, 4)] for a, b in known],
        "overview": None
        if len(chosen) == len(shown)
        else _overview(timeline, begin, stop, min(CELLS, PER_PHASE * most)),
    }


def _stretches(timeline: Timeline, begin: float, end: float) -> list[tuple[float, float]]:
    """The times of the longest rounds between these, with those beside them, and of the last."""
    time = _floats(timeline.mixes.time)
    first, stop = int(np.searchsorted(time, begin)), int(np.searchsorted(time, end, side="right"))
    lengths = np.diff(time[first:stop], prepend=begin)
    wanted = np.argsort(lengths, kind="stable")[::-1][:LONGEST]
    pieces = [(k - AROUND, k + AROUND) for k in wanted] + [(len(lengths) - LAST, len(lengths))]
    found: list[tuple[float, float]] = []
    for low, high in sorted(pieces):
        a = begin if low <= 0 else float(time[first + low - 1])
        b = end if high >= len(lengths) else float(time[first + high])
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        else:
            found.append((a, b))
    return found


def _visits(timeline: Timeline, shown: npt.NDArray[np.int64]) -> dict[str, list[float]]:
    """The visits of these phases, by place in them, as far as they are kept."""
    visits = timeline.visits
    names = ("phase", "device", "asked", "admitted", "uploaded")
    if not len(shown) or not len(visits):
        return {name: [] for name in names}
    phase = np.asarray(visits.phase)
    first, last = int(shown[0]), int(shown[-1])
    inside = np.flatnonzero((phase >= first) & (phase <= last))
    place = np.searchsorted(shown, phase[inside])
    inside = inside[shown[np.minimum(place, len(shown) - 1)] == phase[inside]][-MOST_VISITS_SHOWN:]
    found = {name: _picked(getattr(visits, name), inside) for name in names}
    found["phase"] = np.searchsorted(shown, phase[inside]).tolist()
    return found


def _mixes(timeline: Timeline, known: list[tuple[float, float]]) -> dict[str, Any]:
    time = _floats(timeline.mixes.time)
    within = [(time >= a) & (time <= b) for a, b in known]
    places = np.flatnonzero(np.logical_or.reduce(within)) if within else np.arange(0)
    return {
        "round": places.tolist(),
        "time": _short(time[places]),
        "servers": [timeline.mixes.members(int(k)) for k in places],
    }


def _overview(timeline: Timeline, begin: float, end: float, cells: int) -> dict[str, Any]:
    """Per server and bin of time: which share of it was response and update, and which waiting."""
    phases = timeline.phases
    server, opened, ended = np.asarray(phases.server), _floats(phases.opened), _floats(phases.ended)
    released = _floats(phases.released)
    ended = np.where(ended < 0, timeline.now, ended)
    released = np.where(released < 0, timeline.now, released)
    servers = max(timeline.servers, default=-1) + 1
    bins = max(FEWEST_BINS, min(BINS, cells // max(1, servers)))
    edges = np.linspace(begin, max(end, begin + 1e-9), bins + 1)
    percent = 100 / (edges[1] - edges[0])
    collecting: list[list[int]] = []
    waiting: list[list[int]] = []
    for n in range(servers):
        mine = server == n
        for found, begins, ends in ((collecting, opened, ended), (waiting, ended, released)):
            shares = percent * _share(begins[mine], ends[mine], edges)
            found.append(shares.round().astype(int).tolist())
    return {"begin": begin, "end": end, "collecting": collecting, "waiting": waiting}


def _share(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    if not len(begins):
        return np.zeros(len(edges) - 1)
    lasts = ends - begins
    before = np.concatenate([[0.0], np.cumsum(lasts)[:-1]])
    points = np.stack([begins, ends], axis=1).ravel()
    covered = np.stack([before, before + lasts], axis=1).ravel()
    return np.diff(np.interp(edges, points, covered))


# ------------------------------------------------------------------------------------------------
# where the time went
CAUSES = ("arrival", "work", "waiting", "aggregation")


def time_spent(timeline: Timeline) -> dict[str, Any]:
    """Per server, by cause: until its last device was let in, until that one's upload, until the
    mix, until the next phase.
    """
    phases = timeline.phases
    now = timeline.now
    server, opened, ended = np.asarray(phases.server), _floats(phases.opened), _floats(phases.ended)
    mixed, released, admitted = (
        _floats(phases.mixed),
        _floats(phases.released),
        _floats(phases.last_admitted),
    )
    stop = np.where(ended < 0, now, ended)
    seen = (
        len(timeline.visits) > 0
    )  # of a deployment that is seen from outside nobody knows when devices come
    unknown = np.where((ended < 0) & seen, stop, opened)
    let_in = np.clip(np.where(admitted < 0, unknown, admitted), opened, stop)
    freed = np.where(released < 0, now, released)
    mix = np.where(mixed < 0, freed, mixed)
    mix = np.clip(np.where(ended < 0, stop, mix), stop, None)
    freed = np.maximum(freed, mix)
    parts = {
        "arrival": let_in - opened,
        "work": stop - let_in,
        "waiting": mix - stop,
        "aggregation": np.where(ended < 0, 0.0, freed - mix),
    }
    servers = max(timeline.servers, default=-1) + 1
    per_server = {
        cause: np.bincount(server, weights=times, minlength=servers).astype(np.float64)
        for cause, times in parts.items()
    }
    total = {cause: float(times.sum()) for cause, times in per_server.items()}
    whole = sum(total.values()) or 1.0
    return {
        "per_server": {cause: _short(times) for cause, times in per_server.items()},
        "share": {cause: round(value / whole, 4) for cause, value in total.items()},
    }


def round_lengths(timeline: Timeline) -> dict[str, Any] | None:
    time = _floats(timeline.mixes.time)
    if not len(time):
        return None
    begin = timeline.phases.opened[0] if len(timeline.phases) else 0.0
    lengths = np.diff(np.concatenate([[begin], time]))
    longest = np.argsort(lengths, kind="stable")[::-1][:5]
    return {
        "rounds": len(time),
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "high": float(np.quantile(lengths, 0.95)),
        "pace": _pace(time),
        "longest": [_why(timeline, int(k), float(lengths[k])) for k in longest],
    }


def _pace(time: Floats) -> dict[str, Any]:
    """How many rounds had been done when, thinned."""
    places = np.unique(np.linspace(0, len(time) - 1, min(len(time), POINTS)).round().astype(int))
    return {"time": [0.0, *_short(time[places])], "done": [0, *(places + 1).tolist()]}


def _why(timeline: Timeline, round_: int, length: float) -> dict[str, Any]:
    """Which server, and which of its devices, a round waited for."""
    phases = timeline.phases
    members = np.flatnonzero(np.asarray(phases.round) == round_)
    if not len(members):
        return {"round": round_, "length": length}
    last = int(members[np.argmax(_floats(phases.ended)[members])])
    opened, admitted, ended = phases.opened[last], phases.last_admitted[last], phases.ended[last]
    return {
        "round": round_,
        "length": length,
        "server": phases.server[last],
        "device": phases.last_device[last],
        "arrival": max(0.0, admitted - opened),
        "work": max(0.0, ended - max(admitted, opened)),
    }


# ------------------------------------------------------------------------------------------------
# who stands where
def staleness(timeline: Timeline) -> dict[str, list[int]]:
    """How many mixes a server had missed when it was mixed, and how often."""
    items = sorted(timeline.staleness.items())
    return {"missed": [k for k, _ in items], "count": [n for _, n in items]}


def server_table(timeline: Timeline) -> list[dict[str, Any]]:
    """Every server: what it does, since when, and how many mixes it has missed."""
    done = len(timeline.mixes)
    return [
        {
            "server": n,
            "state": s.state,
            "since": round(s.since, 4),
            "phases": s.phases,
            "uploads": s.uploads,
            "missed": done - s.last_mix - 1,
        }
        for n, s in sorted(timeline.servers.items())
    ]


def device_summary(timeline: Timeline, devices: int) -> dict[str, Any]:
    silent = max(0, devices - len(timeline.devices))
    states = Counter(state.state for state in timeline.devices.values())
    states["never heard from"] = silent
    counts = Counter(state.activations for state in timeline.devices.values()) + Counter(
        {0: silent}
    )
    return {
        "states": {name: count for name, count in states.items() if count > 0},
        "activations": {"times": sorted(counts), "devices": [counts[k] for k in sorted(counts)]},
        "never": counts[0],
    }


COLUMNS = ("device", "server", "state", "contact", "activations", "steps", "offline")


def device_page(
    timeline: Timeline,
    homes: dict[int, int],
    sort: str,
    down: bool,
    start: int,
    count: int,
    only: str = "",
) -> dict[str, Any]:
    """One page of the table of devices, sorted by a column; `only` keeps one state."""
    rows = [
        [
            device,
            homes.get(device, -1),
            s.state,
            round(s.contact, 4),
            s.activations,
            s.steps,
            s.offline,
        ]
        for device, s in timeline.devices.items()
        if not only or s.state == only
    ]
    place = COLUMNS.index(sort) if sort in COLUMNS else 0
    rows.sort(key=lambda row: (row[place], row[0]), reverse=down)
    return {
        "columns": COLUMNS,
        "total": len(rows),
        "start": start,
        "rows": rows[start : start + count],
    }


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _picked(values: Any, places: npt.NDArray[np.int64]) -> list[Any]:
    found = np.asarray(values)[places]
    return _short(found) if found.dtype.kind == "f" else found.tolist()


def _short(values: Floats) -> list[float]:
    return np.asarray(values).round(4).tolist()  # type: ignore[no-any-return]
