"""Who was the slowest in a recorded run, and why: what its clock says of that server's devices. And
which servers had no link to the others of a mix.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbcd.errors import ConfigError
from fedbcd.record.timeline import MISSING, NEVER, Timeline
from fedbcd.schedule.times import Times
from fedbcd.spec import RunSpec


def recorded_times(header: Mapping[str, Any]) -> Times | None:
    """How long the devices of a log take, by its own words; None where they are alike, or where it
    does not say, or names code that may not be imported here.
    """
    try:
        identity = header["identity"]
        spec = RunSpec.from_identity(identity)
        if spec.clock.is_alike:
            return None
        return Times(spec.clock, spec.seed, identity["servers"])
    except (KeyError, TypeError, ValueError, IndexError, ConfigError):
        return None


LOOKED_AT = 200  # mixes, the last ones


def alone(header: Mapping[str, Any], round_: int, servers: Sequence[int]) -> list[int]:
    """The servers that had no link to the others of this mix, where the log's cloud has links."""
    return _without_links(_cloud(header), round_, servers)


def _cloud(header: Mapping[str, Any]) -> Any:
    """As the log says; None where it does not, or names code that may not be imported here."""
    try:
        return RunSpec.from_identity(header["identity"]).cloud
    except (KeyError, TypeError, ValueError, IndexError, ConfigError):
        return None


def _without_links(cloud: Any, round_: int, servers: Sequence[int]) -> list[int]:
    rows = () if cloud is None else cloud.weights(round_, servers) or ()
    return [n for n, row in zip(servers, rows, strict=False) if sum(a > 0 for a in row) < 2]


def lonely(timeline: Timeline) -> str:
    """How often servers of a mix had nobody to mix with; empty where they always had."""
    mixes, cloud = timeline.mixes, _cloud(timeline.header)
    last = range(max(0, len(mixes) - LOOKED_AT), len(mixes))
    groups = [(k, [*mixes.members(k)]) for k in last]
    count = sum(len(_without_links(cloud, k, servers)) for k, servers in groups)
    if not count:
        return ""
    return (
        f"{count / sum(len(servers) for _, servers in groups):.0%} of the servers that were mixed"
        " had no link to the others who were there: they stepped from their own model; more links,"
        " or a larger first, lets them meet more often"
    )


def slowest(timeline: Timeline) -> str:
    """The server whose phases took longest, for whom it waited, and why; empty where a run says
    that all devices are alike.
    """
    times, phases = recorded_times(timeline.header), timeline.phases
    over = np.flatnonzero(np.asarray(phases.ended) != NEVER)
    if times is None or not len(over):
        return ""
    server = np.asarray(phases.server)[over]
    lasted = np.asarray(phases.ended)[over] - np.asarray(phases.opened)[over]
    mean_N = np.bincount(server, lasted) / np.maximum(np.bincount(server), 1)
    worst = int(mean_N.argmax())
    last = np.asarray(phases.last_device)[over][server == worst]
    text = (
        f"server {worst} was the slowest: its phases took {mean_N[worst]:.3g} on average, those of"
        f" the median server {np.median(mean_N[np.unique(server)]):.3g}"
    )
    for device, count in Counter(last[last != MISSING].tolist()).most_common(1):
        why = times.why_slow(device)
        text += f"; it waited most often for device {device} ({count} of {len(last)} phases)" + (
            f", by {why}" if why else ""
        )
    return text
