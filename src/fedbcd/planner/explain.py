"""One round of an event log: who waited for whom, and why it took as long as it did."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from fedbcd.errors import ConfigError, RecordError
from fedbcd.planner.record import Record, RecordedMix, RecordedPhase, RecordedVisit, read_record
from fedbcd.planner.slowest import alone, recorded_times


@dataclass(frozen=True)
class ServerPart:
    """One server in one round: its phase, when it was ready, and how long it then waited for the
    mix (None: not in the mix).
    """

    server: int
    opened: float
    ready: float | None
    waited: float | None
    last_device: int | None  # whose upload ended its phase, or who has not uploaded yet
    arrival: float | None  # of that device: from the opening of the phase to its request
    work: float | None  # and from there to its upload
    steps: int | None


@dataclass(frozen=True)
class ExplainedRound:
    """A round: from the mix before it to its own."""

    round: int
    began: float
    ended: float
    typical: float  # median length of the rounds of this log
    mixed: tuple[ServerPart, ...]  # in the order in which they were ready
    left_out: tuple[ServerPart, ...]
    alone: tuple[int, ...] = ()  # servers of the mix without a link to the others
    why_slow: str = ""  # what the clock says of the last device, where devices differ

    @property
    def length(self) -> float:
        return self.ended - self.began

    @property
    def last(self) -> ServerPart:
        """The server for which the others waited."""
        return self.mixed[-1]

    @property
    def sentences(self) -> list[str]:
        return [_length(self), _critical(self), *_waits(self), *_rest(self), *_alone(self)]


def explain(
    log: Path, round_: int | None = None, on_notice: Callable[[str], None] = lambda _: None
) -> ExplainedRound:
    """The story of a round of a log (default: its longest)."""
    record = read_record(log, on_notice)
    if not record.mixes:
        raise RecordError(f"{record.path} has no finished round to explain; record at least one")
    ends = [record.phases[0].opened, *(mix.time for mix in record.mixes)]
    lengths = [after - before for before, after in pairwise(ends)]
    chosen = max(range(len(lengths)), key=lengths.__getitem__) if round_ is None else round_
    if not 0 <= chosen < len(lengths):
        raise ConfigError(
            f"round {chosen} is not in {record.path}, which has rounds 0 to {len(lengths) - 1}"
        )
    mix = record.mixes[chosen]
    parts = {server: _part(phase, mix) for server, phase in _phases_at(record, mix).items()}
    mixed = sorted((parts[server] for server in mix.servers), key=lambda part: part.ready or 0.0)
    left_out = tuple(part for server, part in sorted(parts.items()) if server not in mix.servers)
    lone = tuple(alone(record.header, mix.round, mix.servers))
    times, device = recorded_times(record.header), mixed[-1].last_device
    why = "" if times is None or device is None else times.why_slow(device)
    return ExplainedRound(
        mix.round, ends[chosen], mix.time, median(lengths), tuple(mixed), left_out, lone, why
    )


def _phases_at(record: Record, mix: RecordedMix) -> dict[int, RecordedPhase]:
    """Each server's phase at the moment of the mix: the last that had opened before; a phase that
    the mix itself opens begins then.
    """
    found: dict[int, RecordedPhase] = {}
    for phase in record.phases:
        if phase.opened < mix.time or phase.server not in found:
            found[phase.server] = phase
    return found


def _part(phase: RecordedPhase, mix: RecordedMix) -> ServerPart:
    member = phase.server in mix.servers
    ready = phase.ended if phase.ended is not None and phase.ended <= mix.time else None
    visit = _last_visit(phase)
    arrival = None if visit is None else max(0.0, visit.asked - phase.opened)
    work = (
        None
        if visit is None or visit.uploaded is None
        else visit.uploaded - max(visit.asked, phase.opened)
    )
    return ServerPart(
        server=phase.server,
        opened=phase.opened,
        ready=ready,
        waited=mix.time - ready if member and ready is not None else None,
        last_device=None if visit is None else visit.device,
        arrival=arrival,
        work=work,
        steps=None if visit is None else visit.steps,
    )


def _last_visit(phase: RecordedPhase) -> RecordedVisit | None:
    """The device that the server waited for longest: the last to upload, or one that never did."""
    never = [visit for visit in phase.visits.values() if visit.uploaded is None]
    done = phase.complete
    if never and phase.ended is None:
        return max(never, key=lambda visit: visit.asked)
    return max(done, key=lambda visit: visit.uploaded or 0.0) if done else None


# ------------------------------------------------------------------------------------------------
# in words
def _length(story: ExplainedRound) -> str:
    times = story.length / story.typical if story.typical > 0 else 1.0
    return (
        f"round {story.round} took {story.length:.2f} (clock {story.began:.2f} to"
        f" {story.ended:.2f}), {times:.1f} times the median round of this log, {story.typical:.2f}"
    )


def _critical(story: ExplainedRound) -> str:
    last, count = story.last, len(story.mixed)
    text = (
        f"it ended when server {last.server}, number {count} of {count}, was ready: its phase had"
        f" opened at {last.opened:.2f}"
    )
    if last.last_device is None or last.arrival is None or last.work is None:
        return text
    took = f"took {last.work:.2f} for {last.steps} steps" if last.steps else f"took {last.work:.2f}"
    cause = "the wait for its request" if last.arrival > last.work else "its work"
    return (
        f"{text}, its last device {last.last_device} asked {last.arrival:.2f} later and {took};"
        f" {cause} was the larger part"
        + (f". It differs from others by {story.why_slow}" if story.why_slow else "")
    )


def _waits(story: ExplainedRound) -> list[str]:
    waits = [part for part in story.mixed[:-1] if part.waited]
    if not waits:
        return ["no other server waited for it"]
    total = sum(part.waited or 0.0 for part in waits)
    longest = max(waits, key=lambda part: part.waited or 0.0)
    who = f"server {longest.server} longest, {longest.waited:.2f}"
    return [f"{len(waits)} of the others waited for it, {total:.2f} in all, {who}"]


def _alone(story: ExplainedRound) -> list[str]:
    if not story.alone:
        return []
    who = ", ".join(map(str, story.alone))
    return [f"without a link to the others of this mix, from their own model: servers {who}"]


def _rest(story: ExplainedRound) -> list[str]:
    if not story.left_out:
        return []
    queued = [part.server for part in story.left_out if part.ready is not None]
    busy = len(story.left_out) - len(queued)
    text = f"{len(story.left_out)} servers were not in this mix: {busy} in the middle of a phase"
    return [text + (f", {len(queued)} ready and queued for the next" if queued else "")]
