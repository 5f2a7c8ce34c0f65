"""What to try next, in words, from the numbers of a run. Each remark names the figure it rests on
and the setting it is about.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedbcd.record.history import ACCURACY, APART, GLOBAL, PERSONAL
from fedbcd.report.numbers import in_score

STILL_RISING = 0.005  # gain of accuracy over the last fifth of a run
FALLEN = 0.02  # below its own best
FEWEST_TESTS = 5  # fewer do not show whether accuracy still rises
WAITING = 0.25  # of all server time
ARRIVAL = 0.5  # likewise, of waiting for devices
MOST_NAMED = 10  # labels
LOSERS = 0.1  # of all devices
WORST = 0.1  # the worst tenth below the mean
LAGGING = 0.1  # global accuracy behind personal
WITHOUT = ("fedavg", "fedprox")  # algorithms without personal models
FEWEST_FIRST = 2  # servers to wait for: a mix of one is none
WAITING_FOR_ALL = (*WITHOUT, "fedavg-ft")  # those that mean all servers by a round
ALONE = "local"  # everybody for itself: nobody waits for others, or is pulled to them
UNEVEN = 0.5  # the least active tenth against the mean

View = dict[str, Any]
Rule = Callable[[View], Iterator[str]]


def advice(view: View, first: Sequence[str] = ()) -> list[str]:
    """Remarks on one run, the most useful first, after those that must come first; one that needs
    none gets one sentence saying so.
    """
    found = [remark for rule in RULES for remark in remarks_by(rule, view)]
    return [*first, *found] or [_all_clear(view)]


def remarks_by(rule: Rule, view: View) -> list[str]:
    """What one rule says of a run; the bounds of some are of shares."""
    own = view["summary"].get("metric", ACCURACY) != ACCURACY
    return [] if own and rule in OF_ACCURACY else list(rule(view))


def _all_clear(view: View) -> str:
    """What was looked at and found well, and what could not be."""
    tested = view["summary"].get("metric", ACCURACY) == ACCURACY and any(
        len(_curve(view, column)) >= FEWEST_TESTS for column in (GLOBAL, PERSONAL)
    )
    share = view.get("spent", {}).get("share", {})
    timed = sum(share.values()) > 0
    busy = timed and share.get("waiting", 0.0) <= WAITING and share.get("arrival", 0.0) <= ARRIVAL
    well = {
        "accuracy has levelled off": tested,
        "no device is left behind": bool(view.get("personal")),
        "little time is lost": busy,
    }
    unknown = {
        "how accuracy moves": not tested,
        "how single devices do": not view.get("personal"),
        "where the time goes": not timed,
    }
    clauses, open_ = (
        _listed([text for text, holds in table.items() if holds]) for table in (well, unknown)
    )
    if not clauses:
        return (
            f"there is nothing to say yet: {open_} is not known"
            if open_
            else "nothing stands out in these numbers"
        )
    return f"nothing stands out in these numbers: {clauses}" + (
        f"; {open_} is not known" if open_ else ""
    )


def _listed(texts: list[str]) -> str:
    *before, last = texts or [""]
    return f"{', '.join(before)} and {last}" if before else last


def stopped(view: View) -> Iterator[str]:
    if view["summary"].get("state") in ("stopped", "failed"):
        yield view["summary"]["standing"]


def unowned(view: View) -> Iterator[str]:
    part = view.get("partition") or {}
    missing = part.get("unowned")
    if not missing:
        return
    names = [str(label) for label in missing]
    labels = _listed(
        names
        if len(names) <= MOST_NAMED
        else [*names[: MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} more"]
    )
    text, most = (
        f"no device owns {'label' if len(names) == 1 else 'labels'} {labels}",
        part.get("ceiling"),
    )
    if most is not None:
        text += (
            f", {percent(1 - most)} of the test samples, so about {scored(most)} is the most that"
            " global accuracy can reach"
        )
    yield f"{text}: more devices, more labels per device or another seed give every label an owner"


def fallen(view: View) -> Iterator[str]:
    for column, name in ((GLOBAL, "global"), (PERSONAL, "personal")):
        values = _curve(view, column)
        if len(values) > 2 and max(values) - values[-1] > FALLEN:
            best = values.index(max(values))
            when = [
                r
                for r, v in zip(view["history"]["round"], view["history"][column], strict=True)
                if v is not None
            ][best]
            yield (
                f"{name} accuracy fell from {scored(max(values))} in round {when} to"
                f" {scored(values[-1])}: try a smaller device_step"
                f" (now {setting(view, 'algorithm.device_step')}), or stop earlier"
            )


def rising(view: View) -> Iterator[str]:
    if view["summary"].get("state") == "running":  # it goes on anyway
        return
    gains = {}
    for column, name in ((GLOBAL, "global"), (PERSONAL, "personal")):
        values = _curve(view, column)
        if len(values) >= FEWEST_TESTS:
            gains[name] = values[-1] - values[-1 - max(1, len(values) // 5)]
    risen = [
        f"{name} accuracy by {points(gain)}" for name, gain in gains.items() if gain > STILL_RISING
    ]
    if risen:
        gains_in_words = " and ".join(risen)
        yield (
            f"it was still rising: {gains_in_words} over the last fifth of the run; go on for"
            " longer, with a larger rounds or until_clock"
        )


def waiting(view: View) -> Iterator[str]:
    share = view.get("spent", {}).get("share", {})
    servers, cloud = view["summary"]["servers"], view["summary"]["cloud"]
    if share.get("waiting", 0.0) <= WAITING or servers < 2 or _alone(view):
        return
    text = f"servers spent {percent(share['waiting'])} of their time waiting for other servers"
    if view["summary"]["algorithm"] in WAITING_FOR_ALL:
        yield f"{text}: these algorithms need all of them; FedBCD on an async cloud does not"
    elif cloud == "sync" and servers > FEWEST_FIRST:
        first = max(FEWEST_FIRST, round(0.3 * servers))
        cloud = f'cloud = {{ name = "async", first = {first} }}'
        yield f"{text}: try {cloud}; fedbcd plan tells what each B gives{_planned(view)}"
    elif cloud in ("async", "rigorous"):
        first = int(setting(view, "cloud.first") or servers)
        if first > FEWEST_FIRST:
            yield f"{text}: a smaller B than first = {first} waits less{_planned(view)}"


def _planned(view: View) -> str:
    plan = view.get("plan")
    if not plan:
        return ""
    first, times = plan["first"], plan["round_time"]
    place = min(range(len(first)), key=lambda k: abs(first[k] - 0.3 * plan["servers"]))
    return (
        f" (from this run's own arrivals: a round of {times[place]:.2f} with B = {first[place]},"
        f" {times[-1]:.2f} with B = {first[-1]})"
    )


def slow_devices(view: View) -> Iterator[str]:
    share = view.get("spent", {}).get("share", {})
    active = view["summary"].get("active")
    if share.get("arrival", 0.0) > ARRIVAL:
        sooner = "more devices per server make the first ones come sooner"
        fewer = (
            f"a smaller active (now {active}) ends phases earlier, "
            if active and active > 1
            else ""
        )
        yield (
            f"{percent(share['arrival'])} of server time went into waiting for devices to arrive:"
            f" {fewer}{sooner}"
        )


def slowest(view: View) -> Iterator[str]:
    yield from (view[key] for key in ("slowest", "lonely") if view.get(key))


def losers(view: View) -> Iterator[str]:
    personal = view.get("personal")
    gain = personal and personal["gain"]
    if not gain:
        return
    compared = gain["better"] + gain["same"] + gain["worse"]
    if gain["worse"] > LOSERS * compared:
        other = (
            "their server's global model"
            if gain.get("against") is None
            else f"the model of {gain['against']}"
        )
        penalty = setting(view, "algorithm.penalty")
        larger = (
            ""
            if penalty is None
            else f": try a larger penalty (now {penalty}), which draws them nearer to the global"
            " models"
        )
        yield (
            f"{gain['worse']} of {compared} devices would do better with {other} than with their"
            f" own{larger}"
        )


def left_behind(view: View) -> Iterator[str]:
    personal = view.get("personal")
    if personal and personal["mean"] - personal["worst_decile"] > WORST:
        worst = ", ".join(str(row["device"]) for row in personal["worst"][:5])
        yield (
            f"the worst tenth of the devices has {scored(personal['worst_decile'])} against a mean"
            f" of {scored(personal['mean'])} (worst: devices {worst}); a penalty per device, or"
            " more samples for these, would help them"
        )


def global_lags(view: View) -> Iterator[str]:
    last = {name: values[-1] for name in (GLOBAL, PERSONAL) if (values := _curve(view, name))}
    if (
        view["summary"]["algorithm"] in (*WITHOUT, ALONE)
        or len(last) < 2
        or last[PERSONAL] - last[GLOBAL] <= LAGGING
    ):
        return
    distance = _curve(view, "distance")
    text = f"global models are {points(last[PERSONAL] - last[GLOBAL])} behind the personal ones"
    if len(distance) > 2 and distance[-1] >= max(distance):
        yield (
            f"{text}, and those still drift away from them (mean distance {distance[-1]:.3g}): a"
            " larger penalty would hold them together"
        )
    else:
        active, most = view["summary"].get("active"), view["summary"].get("largest_server")
        uploads = (
            "" if active and most and active >= most else "more uploads per phase (active) or "
        )
        yield f"{text}: {uploads}more rounds bring them on"


def disagreement(view: View) -> Iterator[str]:
    apart, distance = (_curve(view, column) for column in APART)
    if (
        apart
        and distance
        and distance[-1] > 0
        and apart[-1] > 0.5 * distance[-1]
        and view["summary"]["cloud"] != "sync"
        and not _alone(view)
    ):
        yield (
            f"servers disagree by {apart[-1]:.3g}, against {distance[-1]:.3g} between devices and"
            f" servers: a larger B (first, now {setting(view, 'cloud.first')}) or more"
            " cloud_iterations draw them together"
        )


def never_active(view: View) -> Iterator[str]:
    devices = view.get("devices")
    if devices and devices["never"]:
        yield (
            f"{devices['never']} of {view['summary']['devices']} devices never uploaded, so"
            " Assumption 5 (every device is active now and then) was not met: more rounds, or a"
            " larger active"
        )


def uneven(view: View) -> Iterator[str]:
    devices = view.get("devices")
    if not devices or devices["never"]:
        return
    times, counts = devices["activations"]["times"], devices["activations"]["devices"]
    spread = [time for time, count in zip(times, counts, strict=True) for _ in range(count)]
    tenth = spread[: max(1, len(spread) // 10)]
    mean = sum(spread) / len(spread) if spread else 0.0
    if mean >= 5 and sum(tenth) / len(tenth) < UNEVEN * mean:
        few = sum(tenth) / len(tenth)
        yield (
            f"the least active tenth of the devices uploaded {few:.1f} times, the mean is"
            f" {mean:.1f}: slow devices are heard less"
        )


def certificate(view: View) -> Iterator[str]:
    gaps = _curve(view, "gap")
    if len(gaps) >= 3 and gaps[-1] > gaps[0]:
        yield (
            "the gap of the personal models (without a bounded X, the norm of their gradients)"
            f" grew from {gaps[0]:.3g} to {gaps[-1]:.3g}: they are not settling; fedbcd check tells"
            " whether the step sizes fit the theory"
        )


def lost(view: View) -> Iterator[str]:
    lost = view.get("events", {}).get("devices lost", 0)
    if lost:
        yield (
            f"{lost} activations were given up because a device was not heard from in time: allow"
            " more time, or expect as many again"
        )


RULES: tuple[Rule, ...] = (
    stopped,
    unowned,
    fallen,
    rising,
    waiting,
    slowest,
    losers,
    left_behind,
    global_lags,
    disagreement,
    never_active,
    uneven,
    slow_devices,
    certificate,
    lost,
)

OF_ACCURACY = (fallen, rising, left_behind, global_lags)


def scored(value: float) -> str:
    return in_score(value, "share")


def points(value: float) -> str:
    return f"{100 * value:.1f} points"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _alone(view: View) -> bool:
    return bool(view["summary"]["algorithm"] == ALONE)


def _curve(view: View, column: str) -> list[float]:
    return [value for value in view["history"].get(column, ()) if value is not None]


def setting(view: View, key: str) -> Any:
    found = dict(view["settings"]).get(key)
    return None if found in (None, "null") else found
