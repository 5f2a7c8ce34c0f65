"""A coordinator that has lost its store: its log is put together from those of its servers, which
know of every mix whose answer one of them has heard (docs/recovery.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedbcd.engines.deploy.roles import snapshot
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.known import GENERATION, STORE
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import RecordError
from fedbcd.protocol.clouds import RigorousCloud
from fedbcd.protocol.messages import (
    AnswersLost,
    Event,
    GlobalUpdated,
    Mixed,
    Recovered,
    Send,
    ServerId,
    ServerReady,
    ref,
)
from fedbcd.record.eventlog import Transition
from fedbcd.record.journal import pack


@dataclass
class _Known:
    """What the log of one server says of its coordinator."""

    reports: dict[int, ServerReady] = field(default_factory=dict)  # by phase
    answered: dict[int, Mixed] = field(default_factory=dict)  # by phase
    rounds: int = 0
    generation: int = 0
    time: float = 0.0


def rebuild(role: CoordinatorRole, servers: Sequence[Store], now: float) -> int:
    """Give a coordinator with a new store the log that its servers know of; its rounds."""
    plan = role.blueprint
    is_known = plan.cloud.sync or plan.method.cloud_iterations == 1
    if isinstance(plan.cloud, RigorousCloud) or not is_known:
        raise RecordError(
            "on the rigorous cloud, and with several iterations on others, the servers do not know"
            " enough of each mix; put the coordinator's newest store back"
        )
    _check_stores(role, servers)
    known = [_known(store) for store in servers]
    role._clock.last = role._clock.after(max(each.time for each in known), now)
    with role.store.group_commit():
        lost = _sync(role, known) if plan.cloud.sync else _async(role, known)
        _take_model(role, servers)
        role.tell(lost, now)
        _finish(role, servers, known)
    return role.machine.round


def _check_stores(role: CoordinatorRole, servers: Sequence[Store]) -> None:
    if role.store.length:
        raise RecordError("a coordinator is rebuilt in a new store, not in one that has begun")
    if len(servers) != len(role.blueprint.servers):
        raise RecordError(
            f"there are {len(role.blueprint.servers)} servers, but {len(servers)} stores; name"
            " those of all"
        )
    for n, store in enumerate(servers):
        found = store.facts.get("actor"), store.facts["run"]
        if found != (f"server/{n}", role.store.facts["run"]):
            raise RecordError(
                f"store {n} is not that of server/{n} of this run; name those of all, in order"
            )


def _known(store: Store) -> _Known:
    found, since, first = _Known(), list[Event](), 0
    for number, step in enumerate(store.transitions()):
        since.append(step.event)
        found.time = step.time
        match step.event:
            case Mixed() as mixed:
                found.answered.setdefault(mixed.phase, mixed)
            case GlobalUpdated() as updated:
                found.rounds = max(found.rounds, updated.phase + 1)
            case Recovered() as recovered:
                found.generation = recovered.generation
        for command in step.commands:
            if isinstance(command, Send) and isinstance(command.message, ServerReady):
                journal = pack(first, since)
                ready = replace(command.message, journal=journal)
                found.reports.setdefault(ready.phase, ready)
                since, first = [], number + 1
    return found


def _sync(role: CoordinatorRole, known: Sequence[_Known]) -> AnswersLost:
    for round_ in range(max(each.rounds for each in known)):
        for each in known:
            _hear(role, each.reports[round_])
    return AnswersLost(servers=(), models=())


def _async(role: CoordinatorRole, known: Sequence[_Known]) -> AnswersLost:
    """Mix after mix, in order, each from the reports that its servers had given."""
    mixes: dict[int, tuple[ServerId, ...]] = {}
    for each in known:
        for mixed in each.answered.values():
            mixes[int(mixed.model.split("/")[1])] = mixed.among
    waiting: set[ServerId] = set()
    for round_ in range(max(mixes, default=-1) + 1):
        among = mixes.get(round_, ())
        if not among:
            raise RecordError(
                f"nobody has heard which servers mix {round_} was of; put the coordinator's newest"
                " store back"
            )
        for n in among:
            phase = _phase_of(known[n], round_)
            if phase not in known[n].answered:
                waiting.add(n)
            _hear(role, known[n].reports[phase])
    who = tuple(sorted(waiting))
    return AnswersLost(servers=who, models=tuple(role._said[n] for n in who))


def _phase_of(server: _Known, round_: int) -> int:
    """Of its report in a mix: the one that was answered by it, or the one that waits."""
    for phase, mixed in server.answered.items():
        if int(mixed.model.split("/")[1]) == round_:
            return phase
    return max(server.reports)


def _hear(role: CoordinatorRole, ready: ServerReady) -> None:
    """As if it came now: what was made of it is lost, and is not computed."""
    role._recovering = True
    commands = role.machine.handle(ready)
    role._apply(role.store.length, ready, None, commands)
    assert role.shared_log is not None
    facts = role.shared_log.note(role.store.length, ready, commands)
    role._clock.last = role._clock.at(role._clock.last)
    role.store.commit(Transition(role._clock.last, role.actor, ready, tuple(commands)), facts)
    role._recovering = False


def _take_model(role: CoordinatorRole, servers: Sequence[Store]) -> None:
    """Sync-cloud: the one global model, of a server that has adopted it."""
    if not role.blueprint.cloud.sync or not role.machine.round:
        return
    name = ref("z", role.machine.round)
    for store in servers:
        if name in store.names():
            role.z, role._current = store.tensor(name), name
            role.store.save(name, role.z)
            return
    raise RecordError(f"no server has {name}; put the coordinator's newest store back")


def _finish(role: CoordinatorRole, servers: Sequence[Store], known: Sequence[_Known]) -> None:
    """The name of the store that servers know, and what it knew of them."""
    names = {store.facts[STORE] for store in servers if STORE in store.facts}
    if len(names) > 1:
        raise RecordError("these servers have met different coordinators; restore those that erred")
    taken = snapshot.take(role._parts(), role.store.length, role._clock.last)
    facts = {f"store/{n}": store.id for n, store in enumerate(servers)}
    facts |= {f"generation/{n}": str(each.generation) for n, each in enumerate(known)}
    facts[GENERATION] = str(1 + max(int(store.facts.get(GENERATION, 0)) for store in servers))
    name = names.pop() if names else role.store.id
    role.store.commit(facts={**facts, "snapshot": taken, "id": name})
