"""What devices have contributed to a server: one file each, and one sum of them."""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedbcd.algorithm.cloud import absorb
from fedbcd.algorithm.method import Bound
from fedbcd.engines.deploy.roles.blueprint import DTYPE, Blueprint
from fedbcd.engines.deploy.roles.parts import in_parts, parts
from fedbcd.engines.deploy.roles.store import Store


class Sum:
    """sum gamma_i x_i and sum gamma_i in float64, over the members (FedBCD) or over the active
    ones: as in simulation.
    """

    def __init__(self, start: Tensor, weights: Sequence[float], bound: Bound) -> None:
        """Of members with these weights, each of which contributes `start`."""
        self.of_members = bound.method.counts == "members"
        self._bound = bound
        # the latest `vector`, as long as somebody holds it
        self._vector: Callable[[], Tensor | None] = lambda: None
        self.members = len(weights)
        self.weight = float(sum(weights)) if self.of_members else 0.0
        self.count = len(weights) if self.of_members else 0
        self.total = start.double().mul_(self.weight)

    def open(self) -> None:
        """A phase begins: where only the active ones count, there are none yet."""
        if not self.of_members:
            self.nobody()

    def absorb(self, weight: float, after: Tensor, before: Tensor | None) -> None:
        """Count an upload."""
        self._changes()
        factor = self._bound.factor(weight)
        for part in parts(len(self.total)):
            absorb(self.total[part], factor, after[part], None if before is None else before[part])
        if not self.of_members:
            self.weight += weight
            self.count += 1

    def step(self, mixed: Tensor) -> Tensor:
        """Eq. (6b)."""
        counted = self.weight, self.count, self.members

        def compute(part: slice) -> Tensor:
            z, total = mixed[part].double(), self.total[part]
            return self._bound.stepped(z, total, *counted).to(DTYPE)

        if not self._bound.in_parts:
            return compute(slice(None))
        return in_parts(len(mixed), DTYPE, compute)

    def nobody(self) -> None:
        """What was contributed is lost."""
        self._changes()
        self.total.zero_()
        self.weight, self.count = 0.0, 0

    def change(
        self, weight: float, contribution: Tensor, members: int, count: int | None = None
    ) -> None:
        """A member comes, or goes (`weight` is then negative, in what 0.1.0 wrote); `members` is
        the number afterwards, of whom all count, or `count`.
        """
        self._changes()
        self.members = members
        if self.of_members:
            factor = self._bound.factor(weight)
            for part in parts(len(self.total)):
                absorb(self.total[part], factor, contribution[part], None)
            self.weight += weight
            self.count = members if count is None else count

    def form(self, contributions: Iterable[tuple[float, Tensor]], members: int) -> None:
        """Of these contributions with their weights, in order, whatever was in it before."""
        self._changes()
        self.members = members
        if self.of_members:
            self.nobody()
            for count, (weight, contribution) in enumerate(contributions, start=1):
                self.change(weight, contribution, members, count)

    def vector(self) -> Tensor:
        """All as one float64 vector: total, weight and, where the server step asks for them, how
        many count and how many members there are. The same one while it is on its way, however
        often it is sent.
        """
        vector = self._vector()
        if vector is None:
            more = [self.count, self.members] if self._bound.needs_counts else []
            counted = torch.tensor([self.weight, *more], dtype=torch.float64)
            vector = torch.cat([self.total, counted])
            self._vector = weakref.ref(vector)
        return vector

    def _changes(self) -> None:
        self._vector = lambda: None

    def load(self, vector: Tensor) -> None:
        """The inverse of `vector`."""
        self._changes()
        size = self._bound.upload.size
        self.total, (self.weight, *more) = vector[:size].clone(), vector[size:].tolist()
        if more:
            self.count, self.members = map(int, more)


class Copies:
    """Which file holds the last contribution of which device. In memory there are names only, and
    the upload that has just come.
    """

    def __init__(self, store: Store, blueprint: Blueprint) -> None:
        self._store = store
        self._bound = blueprint.bound
        self._start = blueprint.bound.first_upload(blueprint.start)
        self._keeps = blueprint.bound.keeps_last
        self._counted: dict[
            int, str
        ] = {}  # device -> what its server's sum holds of it; missing: as at x(0)
        self._held: dict[int, str] = {}  # device -> an upload that is accepted and not yet counted
        # device, weight, before and after of what is absorbed and not yet in the sum
        self.uncounted: list[tuple[int, float, str, str]] = []
        self._obsolete: list[str] = []
        self._fresh: tuple[str, Tensor] = ("", self._start)

    def accept(self, device: int, activation: int, contribution: Tensor | None) -> None:
        """Take note of an upload, and keep what the device contributes by it, unless it is kept
        already.
        """
        name = self._held[device] = f"x/{device}/{activation}"
        if contribution is not None:
            self._store.save(name, contribution)
            self._fresh = (name, contribution)

    def absorb(self, device: int, weight: float) -> None:
        """An upload is to be counted, in the place of what was counted of this device."""
        old, new = self._counted.get(device, ""), self._held.pop(device)
        self._counted[device] = new
        self.uncounted.append((device, weight, old, new))
        self._obsolete += [old, *([] if self._keeps else [new])]

    def count(self, total: Sum) -> None:
        """Into the sum what is not in it yet; after a crash, again."""
        for device, weight, old, new in self.uncounted:
            before = self._contribution(device, old) if total.of_members else None
            total.absorb(weight, self.tensor(new), before)
        self.uncounted = []

    def admit(self, device: int, number: int) -> None:
        """A new member, by the number of the transition that made it one."""
        if self._keeps:
            self._counted[device] = f"a/{device}/{number}"

    def keep_start(self, device: int, model: Tensor) -> None:
        """What a new member starts from."""
        if self._keeps:
            self._store.save(self._counted[device], model)

    def bring(self, device: int, incarnation: int, contribution: Tensor | None) -> None:
        """A member contributes again, what it has contributed last."""
        if self._keeps:
            name = f"b/{device}/{incarnation}"
            if contribution is not None:
                self._store.save(name, contribution)
            self._obsolete += [self._counted[device]] if device in self._counted else []
            self._counted[device] = name

    def forget_all(self) -> None:
        """What was contributed is lost."""
        self._obsolete += [*self._counted.values(), *self._held.values()]
        self._counted, self._held, self.uncounted = {}, {}, []

    def dismiss(self, device: int) -> None:
        """A member has gone."""
        self._obsolete += [
            names.pop(device) for names in (self._counted, self._held) if device in names
        ]

    def counted(self, device: int) -> Tensor:
        """What the sum holds of a device."""
        return self._contribution(device, self._counted.get(device, ""))

    def latest(self, device: int) -> Tensor:
        """What a device last contributed, counted or not."""
        return self._contribution(device, self._latest(device))

    def accepted(self, device: int) -> Tensor:
        """The same as it is kept: a contribution, or what the device began with."""
        return self.tensor(self._latest(device))

    def _latest(self, device: int) -> str:
        return self._held.get(device) or self._counted.get(device, "")

    def _contribution(self, device: int, name: str) -> Tensor:
        kept = self.tensor(name)
        return kept if name.startswith(("x/", "b/")) else self._bound.contributed(device, kept)

    def tensor(self, name: str) -> Tensor:
        """What is kept under a name."""
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
        needed = {*self._held.values(), *(self._counted.values() if self._keeps else ())}
        self._obsolete = [
            name
            for name in self._store.names()
            if name.startswith(("x/", "a/", "b/")) and name not in needed
        ]
