"""A server that has lost its store, or has an older one, goes on: its log is brought up to its last
report from the log of its coordinator, and a new generation begins (docs/recovery.md).
"""

from collections.abc import Iterator

from fedbcd.engines.deploy.roles import snapshot
from fedbcd.engines.deploy.roles.coordinator import report_name
from fedbcd.engines.deploy.roles.known import STORE
from fedbcd.engines.deploy.roles.server import REPORT, ServerRole
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import RecordError
from fedbcd.protocol import ServerState
from fedbcd.protocol.clouds import RigorousCloud
from fedbcd.protocol.messages import (
    COORDINATOR,
    Event,
    Recovered,
    RetryDue,
    Send,
    ServerReady,
    Started,
)
from fedbcd.record.eventlog import Transition
from fedbcd.record.journal import unpack


def recover(role: ServerRole, coordinator: Store, now: float) -> int:
    """Bring a server up to what its coordinator knows of it, and begin a new generation there, all
    of it or nothing; how many events came from the coordinator's log.
    """
    if coordinator.facts.get("actor") != COORDINATOR:
        raise RecordError("a server is recovered from the store of its coordinator")
    if coordinator.facts["run"] != role.store.facts["run"]:
        raise RecordError(
            f"the store of the coordinator belongs to another run than that of {role.actor}"
        )
    if isinstance(role.blueprint.cloud, RigorousCloud):
        raise RecordError(
            f"{role.actor} takes steps alone that its coordinator does not hear of (cloud"
            " 'rigorous'), so nobody knows its log; put its newest store back"
        )
    before, heard = role.store.length, [*_heard(coordinator, role.server)]
    if heard:  # whatever it has heard of the coordinator was said by then
        last = max(step.time for step in coordinator.transitions(coordinator.length - 1))
        role._clock.last = role._clock.after(last, now)
    with role.store.group_commit():
        for ready in heard:
            _bring_up(role, ready, now)
        if role.machine.state is ServerState.NEW:
            _follow(role, Started(), now)
        brought = role.store.length - before
        _begin_generation(role, coordinator, heard, now)
    return brought


def _heard(coordinator: Store, server: int) -> Iterator[ServerReady]:
    """What the coordinator has heard of a server, in order, without copies."""
    last = (-1, 0)
    for step in coordinator.transitions():
        event = step.event
        if not isinstance(event, ServerReady) or event.server != server:
            continue
        if (event.phase, event.iteration) > last:
            last = (event.phase, event.iteration)
            yield event


def _bring_up(role: ServerRole, ready: ServerReady, now: float) -> None:
    """By what happened until this report, as far as the store does not have it."""
    machine, place = role.machine, (ready.phase, ready.iteration)
    has_reported = machine.state is ServerState.WAITING
    if (machine.phase, machine.iteration, has_reported) >= (*place, True):
        return
    if not ready.journal:
        raise RecordError(
            f"the coordinator does not know what {role.actor} did until its report of phase"
            f" {ready.phase}, which older software sent, or which was too long; put its newest"
            " store back"
        )
    first, events = unpack(ready.journal)
    if first > role.store.length:
        raise RecordError(
            f"nobody has events {role.store.length} to {first - 1} of the log of {role.actor}; put"
            " a newer store back"
        )
    for event in events[role.store.length - first :]:
        _follow(role, event, now)
    if (machine.phase, machine.iteration) != place or machine.state is not ServerState.WAITING:
        raise RecordError(
            f"what the coordinator knows of {role.actor} does not lead to its report of phase"
            f" {ready.phase}: this store has gone on by itself. Put the newest one back"
        )


def _follow(role: ServerRole, event: Event, now: float) -> None:
    """Handle an event of the log once more: what was made of it is lost, and is not computed."""
    role._recovering = True
    commands = role.machine.handle(event)
    role._apply(role.store.length, event, None, commands)
    assert role.shared_log is not None
    facts = role.shared_log.note(role.store.length, event, commands)
    role._clock.last = role._clock.at(now)
    role.store.commit(Transition(role._clock.last, role.actor, event, tuple(commands)), facts)
    role._recovering = False


def _begin_generation(
    role: ServerRole, coordinator: Store, heard: list[ServerReady], now: float
) -> None:
    machine, store, plan = role.machine, role.store, role.blueprint
    report = None
    is_own = True  # whether its tensors are of the last that is known of it
    if machine.state is ServerState.WAITING:
        (retry,) = machine.handle(RetryDue())
        assert isinstance(retry, Send)
        is_own = not heard or heard[-1] != retry.message
        report = (
            role._tensor(retry.to, retry.message)
            if is_own
            else coordinator.tensor(report_name(heard[-1]))
        )
    for name in {*store.names()} - ({machine.model} if is_own else set()):
        store.drop(name)
    if report is not None:
        role._report = report
        store.save(REPORT, report)
        if not is_own and plan.method.order == "mix, step" and not plan.cloud.sync:
            role.z = report  # elsewhere the answer brings it
            store.save(machine.model, report)
    role._copies.uncounted = []
    role._sum.nobody()
    role.tell(Recovered(generation=machine.generation + 1), now)
    taken = snapshot.take(role._parts(), store.length, role._clock.last)
    known = coordinator.facts.get(f"store/{role.server}", store.id)
    store.commit(facts={"snapshot": taken, "id": known, STORE: coordinator.id})
