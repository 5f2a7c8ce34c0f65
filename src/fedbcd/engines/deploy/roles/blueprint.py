"""What all roles of a deployment agree on: who belongs where, the algorithm, the cloud, and the
model that everything starts from.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedbcd.algorithm.augment import Augment
from fedbcd.algorithm.method import Bound, Facts, Method, method_of
from fedbcd.algorithm.methods import Algorithm
from fedbcd.algorithm.objective import Loss
from fedbcd.algorithm.params import Layout
from fedbcd.algorithm.projection import tried
from fedbcd.algorithm.wire import Layer
from fedbcd.data.federation import Federation, Transform, as_dtype
from fedbcd.data.samples import Pool
from fedbcd.describe import describe
from fedbcd.errors import ConfigError
from fedbcd.protocol import Coordinator, Device, Server
from fedbcd.protocol.clouds import Cloud
from fedbcd.protocol.messages import (
    Activated,
    Event,
    GlobalUpdated,
    Mixed,
    Restored,
    ServerReady,
    Uploaded,
    server_actor,
)
from fedbcd.recorded import going_on, in_record
from fedbcd.schedule.availability import Availability, AvailableDevices, PerServer, at_server
from fedbcd.schedule.deadline import Deadline
from fedbcd.spec import RunSpec

DTYPE = torch.float32
CONTRIBUTION = torch.float64  # of what a server adds up, where uploads have layers


@dataclass(frozen=True)
class Blueprint:
    """The plan of a deployment. Models are float32: what a device keeps is what it uploads is what
    replay computes.
    """

    algorithm: Algorithm
    cloud: Cloud
    active: PerServer  # q
    seed: int
    servers: tuple[tuple[int, ...], ...]  # the devices of each server, also those that join later
    sizes: tuple[int, ...]  # samples per device: the weights of FedAvg and FedProx
    late: frozenset[int]  # devices that are members from their DeviceJoined on
    initial: Tensor  # (F,), of the model as it was made
    layout: Layout
    availability: Availability | None = None  # where delays are drawn
    uploads: tuple[Layer, ...] = ()  # on their way to a server's sum
    deadline: Deadline | None = None  # of phases
    start: Tensor = field(init=False)  # x(0), (F,): in X
    method: Method = field(init=False)
    bound: Bound = field(init=False)

    def __post_init__(self) -> None:
        method = method_of(self.algorithm, Facts(self.devices, self.sizes))
        object.__setattr__(self, "method", method)
        cut = tried(self.method.projection, self.initial[: self.size_P])
        same = torch.equal(cut, self.initial[: self.size_P])
        object.__setattr__(
            self, "start", self.initial if same else torch.cat((cut, self.initial[self.size_P :]))
        )
        wiring = self.uploads, self.start, max(map(len, self.servers))
        object.__setattr__(self, "bound", Bound(method, self.layout, self.sizes, wiring))

    @classmethod
    def of(cls, spec: RunSpec, federation: Federation) -> "Blueprint":
        """That of a run in simulation."""
        spec.check(federation)
        module = federation.make_model(spec.seed)
        return cls.make(
            spec, spec.active_of(federation), federation.servers, federation.sizes, module
        )

    @classmethod
    def make(
        cls,
        spec: RunSpec,
        active: PerServer,
        servers: Sequence[Sequence[int]],
        sizes: Sequence[int],
        module: nn.Module,
    ) -> "Blueprint":
        """From its parts, where nobody has the data of all; `module` holds the initial weights."""
        if spec.start is not None:
            raise ConfigError(
                f"start={str(spec.start)!r}: a deployment begins at x(0); leave it out"
            )
        if (spec.dtype, spec.storage or DTYPE, spec.precision) != (DTYPE, DTYPE, "float32"):
            raise ConfigError(
                f"dtype={spec.dtype}, storage={spec.storage}, precision={spec.precision!r}: a"
                " deployment computes and stores float32 only"
            )
        layout = Layout(module)
        groups = tuple(tuple(members) for members in servers)
        who = (
            spec.algorithm,
            spec.cloud,
            active,
            spec.seed,
            groups,
            tuple(sizes),
            frozenset(spec.joins),
        )
        rules = spec.availability, tuple(spec.uploads), spec.deadline
        return cls(*who, layout.flatten(module, DTYPE), layout, *rules)

    def going_on(self, facts: Mapping[str, str]) -> "Blueprint":
        """This plan, with the settings that nobody has given as the facts of a role's store have
        them; those of 0.1.0 have a hash alone.
        """
        if facts.get("run") in (None, self.fingerprint):
            return self
        named = {"name": self.method.name}
        recorded = json.loads(facts["algorithm"]) if "algorithm" in facts else named
        return replace(self, algorithm=going_on(self.algorithm, recorded))

    def pool(self, server: int) -> AvailableDevices:
        """Who of a server's devices is available, where delays are drawn."""
        q = at_server(self.active, server)
        return AvailableDevices(self.method, q, self.seed, self.availability)

    @property
    def first_model(self) -> Tensor:
        """What servers begin with."""
        return self.bound.first_model(self.start)

    @property
    def report(self) -> tuple[int, torch.dtype]:
        """Length and dtype of what a server reports: its sum with what `Sum.vector` says of it, or
        its model.
        """
        if not self.cloud.sync:
            return self.bound.model.size, DTYPE
        return self.bound.upload.size + (3 if self.bound.needs_counts else 1), torch.float64

    @property
    def vectors(self) -> dict[type[Event], frozenset[tuple[int, torch.dtype]]]:
        """Length and dtype of what may come with each event."""
        bound, wire = self.bound, self.bound.wire
        upload = (bound.upload.size, DTYPE if wire is None else wire.dtype)
        kept = {(bound.upload.size, DTYPE if wire is None else CONTRIBUTION)}
        model = (bound.model.size, DTYPE)
        return {
            Activated: frozenset({(bound.heard.size, DTYPE)}),
            Uploaded: frozenset({upload}),
            Restored: frozenset({model, (bound.heard.size, DTYPE), *kept}),
            ServerReady: frozenset({self.report}),
            **dict.fromkeys((Mixed, GlobalUpdated), frozenset({model})),
        }

    @property
    def devices(self) -> int:
        """How many devices there are, with those that join later."""
        return len(self.sizes)

    @property
    def size_P(self) -> int:
        """Of those values, the parameters."""
        return self.layout.size_P

    @property
    def size_F(self) -> int:
        """The length of a model: parameters and floating-point buffers."""
        return len(self.start)

    def home_of(self, device: int) -> int:
        """The server of a device."""
        for server, members in enumerate(self.servers):
            if device in members:
                return server
        raise ConfigError(
            f"device {device} belongs to no server; this deployment has devices 0 to"
            f" {self.devices - 1}"
        )

    def weights(self) -> list[float]:
        """The weight of each device in its server's mean: gamma_i, or its data size."""
        return self.bound.weights

    # ---------------------------------------------------------------------------------------------
    # machines
    def device_machine(self, device: int) -> Device:
        """A fresh machine."""
        limit = self.method.offline_limit
        return Device(device, server_actor(self.home_of(device)), limit)

    def server_machine(self, server: int) -> Server:
        """A fresh machine."""
        members = [device for device in self.servers[server] if device not in self.late]
        method = self.method
        rule = self.deadline or Deadline()
        phases = method.cloud_iterations, self.cloud.sync, method.at_once, rule.least, rule.spare
        return Server(server, members, at_server(self.active, server), *phases)

    def coordinator_machine(self) -> Coordinator:
        """A fresh machine."""
        return self.cloud.coordinator(len(self.servers), self.method.cloud_iterations)

    def facts(self) -> dict[str, str]:
        """What a role's store says of the run that it belongs to."""
        return {"run": self.fingerprint, "algorithm": json.dumps(in_record(self.algorithm))}

    @cached_property
    def fingerprint(self) -> str:
        """A hash by which roles know that they belong together."""
        plain = (
            in_record(self.algorithm),
            describe(self.cloud),
            self.active,
            self.seed,
            self.servers,
            self.sizes,
            sorted(self.late),
        )
        laid = [describe(self.uploads)] if self.uploads else []  # 0.1.0 knew of none
        laid += [] if self.deadline is None else [describe(self.deadline)]
        digest = hashlib.sha256(json.dumps([*plain, self.size_P, *laid], sort_keys=True).encode())
        digest.update(self.start.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class OwnData:
    """What one device trains with, and nobody else sees."""

    samples: Pool
    module: nn.Module
    loss: Loss
    transform: Transform = as_dtype
    augment: Augment | None = None

    @classmethod
    def of(cls, federation: Federation, device: int, seed: int) -> "OwnData":
        """The part of a federation that belongs to one device."""
        positions = federation.owned(device)
        return cls(
            federation.pool.only(positions),
            federation.make_model(seed),
            federation.loss,
            federation.transform,
            federation.augment,
        )
