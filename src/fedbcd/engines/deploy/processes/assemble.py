"""From settings to a process that can run: one function per role, the same for `fedbcd device`,
`fedbcd up` and embedded devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedbcd.data.federation import Federation
from fedbcd.engines.deploy.links.codec import Declared
from fedbcd.engines.deploy.processes.base import Process
from fedbcd.engines.deploy.processes.coordinator import CoordinatorProcess
from fedbcd.engines.deploy.processes.device import DeviceProcess
from fedbcd.engines.deploy.processes.logs import LEVELS, RoleLog, log_of
from fedbcd.engines.deploy.processes.options import Deploy
from fedbcd.engines.deploy.processes.pace import Drawn, Pace, Real
from fedbcd.engines.deploy.processes.server import ServerProcess
from fedbcd.engines.deploy.roles.blueprint import Blueprint, OwnData
from fedbcd.engines.deploy.roles.checks import TrustLimits
from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
from fedbcd.engines.deploy.roles.device import DeviceRole
from fedbcd.engines.deploy.roles.filestore import FileStore
from fedbcd.engines.deploy.roles.server import ServerRole
from fedbcd.engines.deploy.roles.store import Store
from fedbcd.errors import ConfigError
from fedbcd.protocol.messages import COORDINATOR, Actor, number_of
from fedbcd.schedule.delays import Clock
from fedbcd.schedule.times import Times
from fedbcd.spec import RunSpec


@dataclass(frozen=True)
class Deployment:
    """What every role of a deployment is made from. `own` gives the data of one device; `rounds` is
    when the coordinator stops.
    """

    blueprint: Blueprint
    declared: Declared
    options: Deploy
    clock: Clock
    own: Callable[[int], OwnData]
    rounds: int | None = None
    log_level: str = "info"
    not_before: float = -math.inf  # the clocks of all roles go on from here

    def __post_init__(self) -> None:
        if self.log_level not in LEVELS:
            raise ConfigError(f"log_level={self.log_level!r} must be one of {', '.join(LEVELS)}")

    @classmethod
    def of(
        cls, federation: Federation, spec: RunSpec, options: Deploy, rounds: int | None = None
    ) -> "Deployment":
        """The deployment of a job whose data everybody can read, as in experiments and tests."""
        blueprint = Blueprint.of(spec, federation)
        return cls(
            blueprint,
            Declared.of(blueprint.layout, blueprint.vectors),
            options,
            spec.clock,
            lambda i: OwnData.of(federation, i, spec.seed),
            rounds,
        )

    @classmethod
    def private(
        cls,
        spec: RunSpec,
        servers: Sequence[Sequence[int]],
        model: Callable[[], nn.Module],
        options: Deploy,
        rounds: int | None = None,
    ) -> "Deployment":
        """The deployment whose devices have data of their own, which nobody else can read."""
        module = make_module(model, spec.seed)
        active = spec.active or 1
        blueprint = Blueprint.make(
            spec, active, servers, options.sizes(sum(map(len, servers))), module
        )
        declared = Declared.of(blueprint.layout, blueprint.vectors)
        return cls(blueprint, declared, options, spec.clock, _no_data, rounds)

    def process(
        self, actor: Actor, available: Callable[[], bool] | None = None, init: bool = False
    ) -> Process:
        """The process of one role, recovered from its store; call it inside an event loop.

        A device begins a store where it finds none: whatever it has lost of what counted, its
        server gives back. What a server or the coordinator has lost nobody can give back, so they
        begin one only with `init`, and only once.
        """
        self.check_actor(actor)
        store = FileStore(self.options.folder_of(actor), begin=init or actor.startswith("device/"))
        try:
            if init and store.length:
                raise ConfigError(
                    f"the store {store.path} of {actor} has begun already; leave --init out to go"
                    " on with it"
                )
            process = self._process(actor, store, log_of(actor, self.log_level), available)
        except BaseException:
            store.close()
            raise
        process.clock.begin_at(self.not_before)
        return process

    def _process(
        self, actor: Actor, store: Store, log: RoleLog, available: Callable[[], bool] | None
    ) -> Process:
        options = self.options
        limits = TrustLimits(
            norm=options.norm_limit, beyond_norm=options.beyond_norm, reach=options.reach_limit
        )
        if actor == COORDINATOR:
            role = CoordinatorRole.open(store, self.blueprint, limits, self.rounds)
            return CoordinatorProcess(role, self.options, self.declared, log)
        number = number_of(actor)
        if actor.startswith("server/"):
            return ServerProcess(
                ServerRole.open(store, self.blueprint, number, limits),
                self.options,
                self.declared,
                log,
            )
        device = DeviceRole.open(store, self.blueprint, number, self.own(number), limits)
        return DeviceProcess(
            device, self.options, self.declared, log, self._pace(number, available)
        )

    def check_actor(self, actor: Actor) -> None:
        if actor != COORDINATOR:
            most = (
                len(self.blueprint.servers)
                if actor.startswith("server/")
                else self.blueprint.devices
            )
            if not 0 <= number_of(actor) < most:
                raise ConfigError(
                    f"there is no {actor} in this job; its {actor.partition('/')[0]}s are 0 to"
                    f" {most - 1}"
                )

    def _pace(self, device: int, available: Callable[[], bool] | None) -> Pace:
        scale, plan = self.options.time_scale, self.blueprint
        if scale is None:
            return Real(available) if available is not None else Real()
        home = plan.home_of(device)
        members = [i for i in plan.servers[home] if i not in plan.late]
        itemsize = plan.initial.itemsize
        sent = plan.bound.heard.size * itemsize, plan.bound.upload.size * itemsize
        times = Times(self.clock, plan.seed, plan.servers, sent)
        return Drawn(device, members, plan.pool(home), times, scale)


def _no_data(device: int) -> OwnData:
    raise ConfigError(
        f"device {device} brings data of its own (deploy.samples), so it starts from Python:"
        f" fedbcd.deploy.device(job, {device}, data=...)"
    )


def make_module(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    nothing = (torch.zeros(1, 1), torch.zeros(1))
    return Federation(model, nn.functional.mse_loss, [nothing], 1).make_model(seed)
