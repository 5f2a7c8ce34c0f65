"""The coordinator: its machine, and the models that are on their way. It holds no data and does
light work only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbcd.algorithm.method import Absolute, Relative
from fedbcd.compute.steps import mixed_models, stepped_globally
from fedbcd.engines.deploy.links.letter import Letter
from fedbcd.engines.deploy.roles.base import Role
from fedbcd.engines.deploy.roles.blueprint import DTYPE, Blueprint
from fedbcd.engines.deploy.roles.checks import (
    TrustLimits,
    check_model,
    check_norm,
    check_reach,
    check_run,
    check_sent,
    check_weight,
    check_within,
    finite,
    is_store_id,
)
from fedbcd.engines.deploy.roles.known import GENERATION
from fedbcd.engines.deploy.roles.parts import in_parts, several_in_parts
from fedbcd.engines.deploy.roles.shared_log import SharedMixes
from fedbcd.engines.deploy.roles.snapshot import Parts
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import Refused
from fedbcd.protocol import Coordinator
from fedbcd.protocol.clouds import RigorousCloud, SyncCloud
from fedbcd.protocol.messages import (
    COORDINATOR,
    Actor,
    AnswersLost,
    Command,
    Event,
    GlobalUpdated,
    Mixed,
    MixModels,
    ModelRef,
    Send,
    ServerReady,
    StepGlobal,
    number_of,
    ref,
)
from fedbcd.protocol.senders import is_counter


class CoordinatorRole(Role):
    """The coordinator. Per server it keeps what was last reported and what was last answered, on
    disk.
    """

    OWN = (AnswersLost,)
    machine: Coordinator

    def __init__(
        self, store: Store, blueprint: Blueprint, limits: TrustLimits, rounds: int | None
    ) -> None:
        """See `open`."""
        super().__init__(COORDINATOR, store, blueprint, limits)
        self.rounds = rounds
        self.machine = blueprint.coordinator_machine()
        self.z = blueprint.first_model  # Sync-cloud: the one global model
        self._current: ModelRef = ref("z", 0)
        self._heard: dict[int, ServerReady] = {}
        self._said: dict[int, ModelRef] = {}
        self._fresh: dict[
            ModelRef, Tensor
        ] = {}  # of the last mix, so that answers need not read it

    @classmethod
    def open(
        cls,
        store: Store,
        blueprint: Blueprint,
        limits: TrustLimits | None = None,
        rounds: int | None = None,
    ) -> "CoordinatorRole":
        """The coordinator of this store, where it left off. After `rounds` rounds it mixes no more,
        but still repeats answers that were lost.
        """
        role = cls(store, blueprint.going_on(store.facts), limits or TrustLimits(), rounds)
        role._recover()
        role.shared_log = SharedMixes(store, len(blueprint.servers))
        return role

    def hello(self) -> dict[str, Any]:
        """Who it is, and how far."""
        generation = int(self.store.facts.get(GENERATION, 0))
        return super().hello() | {"round": self.machine.round, "generation": generation}

    def check_guest(self, server: Actor, hello: Mapping[str, Any]) -> None:
        """Refuse a server that has lost its store, or has an old one, since its sum exists nowhere
        else; and one that is ahead of us.

        Only reads, so it may run beside an event.
        """
        number = number_of(server)
        if number >= len(self.blueprint.servers):
            raise Refused(
                "membership",
                f"there is no {server}; this deployment has {len(self.blueprint.servers)} servers",
            )
        check_run(server, hello, self.store.facts)
        store, phase = hello.get("store"), hello.get("phase")
        if not is_store_id(store) or not (is_counter(phase) or phase == -1):
            raise Refused(
                "hello",
                f"{server} does not say how far it is (store={store!r:.80}, phase={phase!r:.80})",
            )
        assert isinstance(store, str)
        assert isinstance(phase, int)
        heard, known = self._heard.get(number), self.store.facts.get(f"store/{number}")
        if known not in (None, store):
            raise Refused(
                "lost",
                f"{server} comes with another store than before; what its devices have contributed"
                " is in the old one: put that back (only if everything is to begin anew, the"
                " coordinator begins a new store as well)",
            )
        _check_generation(server, hello, self.store.facts.get(f"generation/{number}", "0"))
        if heard is not None and phase < heard.phase:
            raise Refused(
                "behind",
                f"{server} is in phase {phase}, but has reported phase {heard.phase}: its store is"
                " an old one",
            )
        if phase > self._latest_phase(heard):
            raise Refused(
                "ahead",
                f"{server} is in phase {phase}, but phase {self._latest_phase(heard)} is the latest"
                " that the coordinator can know of: its store is empty or an old one. Put the"
                f" newest store of the coordinator back; until then {server} tries on",
            )

    def greet(self, server: Actor, hello: Mapping[str, Any], now: float) -> list[Letter]:  # noqa: ARG002
        """A server has connected: from now on it is known by its store."""
        self.check_guest(server, hello)
        number = number_of(server)
        fact = {f"store/{number}": str(hello["store"])}
        if hello.get("generation", 0):
            fact[f"generation/{number}"] = str(hello["generation"])
        if not fact.items() <= self.store.facts.items():
            self.store.commit(facts=fact)
        return []

    def _latest_phase(self, heard: ServerReady | None) -> int:
        """The latest phase that a server can be in: it needs an answer to begin the next."""
        if isinstance(self.blueprint.cloud, SyncCloud | RigorousCloud):
            return self.machine.round
        return 0 if heard is None else heard.phase + 1

    # ---------------------------------------------------------------------------------------------
    # transitions
    def receive(
        self, letter: Letter, now: float, refused: Callable[[Refused], None] = lambda _: None
    ) -> list[Letter]:
        """As every role, but a report that would end one round too many stays unanswered."""
        event, machine = letter.event, self.machine
        is_over = self.rounds is not None and machine.round >= self.rounds
        if is_over and isinstance(event, ServerReady) and machine.ends_round(event):
            return []
        return super().receive(letter, now, refused)

    def _size_of(self, event: Event) -> tuple[int, torch.dtype] | None:  # noqa: ARG002
        return self.blueprint.report

    def _check(self, letter: Letter) -> str | None:
        """What a server reports is checked as an upload is: its model, or the mean of which it
        reports the sum.
        """
        event, size, plan = letter.event, self._size_of(letter.event), self.blueprint
        assert isinstance(event, ServerReady)
        assert size is not None
        remark = check_model(letter.model, *size, replace(self.limits, norm=None))
        assert letter.model is not None
        if event.server >= len(plan.servers) or not self._is_news(event):
            return remark
        roundings = _roundings(plan, event.server)
        if plan.cloud.sync:
            mean = self._mean(event.server, letter.model)
            if mean is None:
                return remark
            check_sent(mean, plan.bound, self.z, self.limits, roundings)
            return check_norm(mean, self.limits)
        z = letter.model[: plan.size_F]
        if plan.bound.in_set and isinstance(plan.method.step, Relative | Absolute):
            check_within(z[: plan.size_P], plan.method.projection, roundings)
        check_reach(letter.model, self._answered(event.server), self.limits)
        return check_norm(z, self.limits)

    def _mean(self, server: int, vector: Tensor) -> Tensor | None:
        """Of those that a sum counts, whose weights must be those of devices of its server; None if
        it counts nobody.
        """
        size, weights = self.blueprint.bound.upload.size, self.blueprint.weights()
        total, weight = vector[:size], float(vector[size])
        check_weight(
            weight,
            [weights[device] for device in self.blueprint.servers[server]],
            self.blueprint.method.counts == "members",
        )
        if weight == 0.0:
            if bool(total.any()):
                raise Refused("weight", f"the sum of server/{server} counts nobody, but is not 0")
            return None
        total = self.blueprint.bound.total(total, weight)
        mean = in_parts(len(total), DTYPE, lambda part: (total[part] / weight).to(DTYPE))
        check_model(mean, len(mean), DTYPE, replace(self.limits, norm=None))
        return mean

    def _answered(self, server: int) -> Tensor:
        """The model that this server was last sent."""
        handle = self._said.get(server)
        if handle is None:
            return self.blueprint.first_model
        return self._fresh[handle] if handle in self._fresh else self.store.tensor(handle)

    def _apply(
        self,
        number: int,  # noqa: ARG002
        event: Event,
        model: Tensor | None,
        commands: Sequence[Command],
    ) -> None:
        if isinstance(event, AnswersLost):
            self._said = {}
            for server in event.servers:
                last = self._heard.pop(server, None)
                if last is not None and last.phase > 0:
                    self._heard[server] = replace(last, phase=last.phase - 1)
            return
        assert isinstance(event, ServerReady)
        if self._is_news(event):
            heard = self._heard.get(event.server)
            if heard is not None:
                self._drop(report_name(heard))
            self._heard[event.server] = event
            if model is not None:
                self.store.save(report_name(event), model)
        before = {*self._said.values()}
        for command in commands:
            if isinstance(command, Send) and isinstance(command.message, Mixed):
                self._said[number_of(command.to)] = command.message.model
        if model is not None:
            self._compute(event, model, commands)
        for handle in before - {*self._said.values()}:
            self._drop(handle)

    def _compute(self, event: ServerReady, model: Tensor, commands: Sequence[Command]) -> None:
        self._fresh = {}
        for command in commands:
            match command:
                case MixModels():
                    self._mix(command, self._reports(command.servers, event, model))
                case StepGlobal():
                    servers = range(len(self.blueprint.servers))
                    self._step(command, self._reports(servers, event, model))
        for handle, tensor in self._fresh.items():
            if handle in self._said.values():
                self.store.save(handle, finite(tensor, handle, self.actor))

    def _reports(self, servers: Iterable[int], event: ServerReady, model: Tensor) -> list[Tensor]:
        """What these servers have reported; one of them just now, unless it is a copy."""
        return [
            model
            if self._heard[server] is event
            else self.store.tensor(report_name(self._heard[server]))
            for server in servers
        ]

    def _mix(self, command: MixModels, reports: Sequence[Tensor]) -> None:
        """Eq. (6a)."""
        size = self.blueprint.bound.model.size
        weights = self.blueprint.cloud.weights(command.round, command.servers)

        def mixed(part: slice) -> dict[ModelRef, Tensor]:
            models = mixed_models([r[part] for r in reports], len(command.results), weights)
            return dict(zip(command.results, models, strict=True))

        self._fresh |= several_in_parts(size, mixed)

    def _step(self, command: StepGlobal, reports: Sequence[Tensor]) -> None:
        """Eq. (5), from the sums of all servers."""
        bound, z = self.blueprint.bound, self.z
        size = bound.upload.size
        weight, count, members = (
            [*map(sum, zip(*(report[size:].tolist() for report in reports), strict=True)), 0, 0]
        )[:3]

        def step(part: slice) -> Tensor:
            total_VU = torch.stack([report[:size][part] for report in reports])
            counted = weight, int(count), int(members)
            return stepped_globally(bound, z[part], total_VU, counted, command.iterations)

        self.z = in_parts(len(z), DTYPE, step) if bound.in_parts else step(slice(None))
        self.store.save(command.result, finite(self.z, command.result, self.actor))
        self._drop(self._current)
        self._current = command.result

    def _is_news(self, event: ServerReady) -> bool:
        heard = self._heard.get(event.server)
        return heard is None or (event.phase, event.iteration) > (heard.phase, heard.iteration)

    def _parts(self) -> Parts:
        return {**super()._parts(), "coordinator": (self, ("_heard", "_said"))}

    def _load(self) -> None:
        self._current = getattr(self.machine, "model", self._current)
        if self.blueprint.cloud.sync and self._current in self.store.names():
            self.z = self.store.tensor(self._current)

    def _tensor(self, to: Actor, message: Event) -> Tensor | None:  # noqa: ARG002
        match message:
            case GlobalUpdated():
                return self.z
            case Mixed() if message.model in self._fresh:
                return self._fresh[message.model]
            case Mixed():
                return self.store.tensor(message.model)
        return None


def _check_generation(server: Actor, hello: Mapping[str, Any], known: str) -> None:
    """Refuse the process of a store that another has taken the place of."""
    generation = hello.get("generation", 0)
    if not is_counter(generation) or generation < int(known):
        raise Refused(
            "behind",
            f"{server} is of generation {generation!r:.20}, but has gone on from another store"
            f" since, as generation {known}; stop this one",
        )


def report_name(ready: ServerReady) -> str:
    """Of the file that holds what a server reported."""
    return f"report/{ready.server}/{ready.phase}/{ready.iteration}"


def _roundings(plan: Blueprint, server: int) -> float:
    """How often a model of the cloud may have been rounded: twice on its device, and twice in
    each step, of which 1 - eta_z stays.
    """
    step, weights = plan.method.step, plan.weights()
    length = step.step if isinstance(step, Relative | Absolute) else 1.0
    if isinstance(step, Absolute):
        length *= min(weights[device] for device in plan.servers[server])
    return 2.0 + 2.0 / min(length, 1.0)
