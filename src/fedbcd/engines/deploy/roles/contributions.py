"""What devices have contributed to a server: one file each, and one sum of them."""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedbcd.algorithm.cloud import absorb
from fedbcd.algorithm.variants import Algorithm
from fedbcd.compute.steps import stepped
from fedbcd.engines.deploy.roles.blueprint import DTYPE, Blueprint
from fedbcd.engines.deploy.roles.parts import in_parts, parts
from fedbcd.engines.deploy.roles.store import Store


class Sum:
    """sum gamma_i x_i and sum gamma_i in float64, over the members (FedBCD) or over the active
    ones: as in simulation.
    """

    def __init__(self, start: Tensor, weights: Sequence[float], members: bool) -> None:
        self.members = members
        self._vector: Callable[[], Tensor | None] = lambda: (
            None
        )  # the latest `vector`, as long as somebody holds it
        self.weight = float(sum(weights)) if members else 0.0
        self.total = start.double().mul_(self.weight)

    def open(self) -> None:
        """A phase begins: where only the active ones count, there are none yet."""
        if not self.members:
            self._changes()
            self.total.zero_()
            self.weight = 0.0

    def absorb(self, weight: float, after: Tensor, before: Tensor | None) -> None:
        """Count an upload."""
        self._changes()
        for part in parts(len(self.total)):
            absorb(self.total[part], weight, after[part], None if before is None else before[part])
        if not self.members:
            self.weight += weight

    def step(self, algorithm: Algorithm, mixed: Tensor) -> Tensor:
        """Eq. (6b)."""

        def compute(part: slice) -> Tensor:
            return stepped(algorithm, mixed[part].double(), self.total[part], self.weight, DTYPE)

        return in_parts(len(mixed), DTYPE, compute)

    def change(self, weight: float, model: Tensor) -> None:
        """A member comes, or goes (`weight` is then negative, in what 0.1.0 wrote)."""
        if self.members:
            self._changes()
            for part in parts(len(self.total)):
                absorb(self.total[part], weight, model[part], None)
            self.weight += weight

    def form(self, contributions: Iterable[tuple[float, Tensor]]) -> None:
        """Of these contributions with their weights, in order, whatever was in it before."""
        if self.members:
            self._changes()
            self.total.zero_()
            self.weight = 0.0
            for weight, model in contributions:
                self.change(weight, model)

    def vector(self) -> Tensor:
        """Both as one float64 vector, the weight last; the same one while it is on its way, however
        often it is sent.
        """
        vector = self._vector()
        if vector is None:
            vector = torch.cat([self.total, torch.tensor([self.weight], dtype=torch.float64)])
            self._vector = weakref.ref(vector)
        return vector

    def _changes(self) -> None:
        self._vector = lambda: None

    def load(self, vector: Tensor) -> None:
        """The inverse of `vector`."""
        self._changes()
        self.total, self.weight = vector[:-1].clone(), float(vector[-1])


class Copies:
    """Which file holds the last contribution of which device. In memory there are names only, and
    the upload that has just come.
    """

    def __init__(self, store: Store, blueprint: Blueprint) -> None:
        self._store = store
        self._start = blueprint.start
        self._personal = blueprint.algorithm.personal
        self._counted: dict[
            int, str
        ] = {}  # device -> what its server's sum holds of it; missing: x(0)
        self._held: dict[int, str] = {}  # device -> an upload that is accepted and not yet counted
        # weight, before and after of what is absorbed and not yet in the sum
        self.uncounted: list[tuple[float, str, str]] = []
        self._obsolete: list[str] = []
        self._fresh: tuple[str, Tensor] = ("", self._start)

    def accept(self, device: int, activation: int, model: Tensor | None) -> None:
        """Take note of an upload, and keep it, unless it is kept already."""
        name = self._held[device] = f"x/{device}/{activation}"
        if model is not None:
            self._store.save(name, model)
            self._fresh = (name, model)

    def absorb(self, device: int, weight: float) -> None:
        """An upload is to be counted, in the place of what was counted of this device."""
        old, new = self._counted.get(device, ""), self._held.pop(device)
        self._counted[device] = new
        self.uncounted.append((weight, old, new))
        self._obsolete += [old, *([] if self._personal else [new])]

    def count(self, total: Sum) -> None:
        """Into the sum what is not in it yet; after a crash, again."""
        for weight, old, new in self.uncounted:
            before = self.tensor(old) if total.members else None
            total.absorb(weight, self.tensor(new), before)
        self.uncounted = []

    def admit(self, device: int, number: int) -> None:
        """A new member, by the number of the transition that made it one."""
        if self._personal:
            self._counted[device] = f"a/{device}/{number}"

    def keep_start(self, device: int, model: Tensor) -> None:
        """What a new member starts from."""
        if self._personal:
            self._store.save(self._counted[device], model)

    def dismiss(self, device: int) -> None:
        """A member has gone."""
        self._obsolete += [
            names.pop(device) for names in (self._counted, self._held) if device in names
        ]

    def counted(self, device: int) -> Tensor:
        """What the sum holds of a device."""
        return self.tensor(self._counted.get(device, ""))

    def accepted(self, device: int) -> Tensor:
        """What a device last contributed, counted or not."""
        return self.tensor(self._held.get(device) or self._counted.get(device, ""))

    def tensor(self, name: str) -> Tensor:
        """A contribution by name."""
        if not name:
            return self._start
        return self._fresh[1] if name == self._fresh[0] else self._store.tensor(name)

    def drop_obsolete(self) -> None:
        """The sum has been saved: what it was made from can go with the same commit."""
        for name in self._obsolete:
            self._store.drop(name)
        self._obsolete = []
        self._fresh = ("", self._start)

    def find_obsolete(self) -> None:
        """After a crash: what can go when the sum is saved next."""
        needed = {*self._held.values(), *(self._counted.values() if self._personal else ())}
        self._obsolete = [
            name
            for name in self._store.names()
            if name.startswith(("x/", "a/")) and name not in needed
        ]
