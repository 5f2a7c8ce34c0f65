"""What servers have counted, and of whom: their sums in float64, as devices join, upload and leave.

Shapes: V servers, N devices, F values of a model, U values of an upload.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.method import Bound
from fedbcd.compute.contributions import ServerSums
from fedbcd.compute.devices import Devices
from fedbcd.schedule.changes import Admit, Dismiss


class Tally:
    """The sums of all servers, and who belongs to them."""

    def __init__(
        self,
        bound: Bound,
        devices: Devices,
        homes: Sequence[Sequence[int]],
        absent: set[int],
        start: Tensor,
    ) -> None:
        """`homes`: the devices of each server, of which the `absent` are no members now. Where
        members count, all of them do, by what they would send at `start`, x(0).
        """
        self.absent, self._homes = absent, homes
        self._uncounted: set[int] = set()  # who has to contribute again
        self.members_V = self._counted_members()  # how many each server has
        self._bound, self._contributions = bound, devices.contributions
        self._one_sum = devices.one_sum
        self._members_count = bound.method.counts == "members"
        self._stale: set[int] = set()  # servers whose sums are formed anew before they are used
        # Sync-cloud: servers whose sums are on their way; those that have changed since, as sent
        self._reported: dict[int, tuple[Tensor, float, int] | None] = {}
        self.sums = ServerSums.of(len(homes), bound.upload.size, start.device)
        if self._members_count:
            first = bound.known(0, start).double()
            for n in range(len(homes)):
                present = self.members_of(n)
                self.sums.weight_V[n] = sum(bound.weights[i] for i in present)
                self.sums.count_V[n] = len(present)
                self.sums.total_VU[n] = self.sums.weight_V[n] * first

    def members_of(self, server: int) -> list[int]:
        """Its devices, without those that are absent."""
        return [device for device in self._homes[server] if device not in self.absent]

    def _counted_members(self) -> list[int]:
        return [len(self.members_of(server)) for server in range(len(self._homes))]

    def _contributors(self, server: int) -> list[int]:
        return [device for device in self.members_of(server) if device not in self._uncounted]

    def open(self, server: int) -> None:
        """A phase begins: where only the active count, nobody does yet."""
        if not self._members_count:
            self.sums.clear([server])

    # ---------------------------------------------------------------------------------------------
    # membership
    def begin_with(self, models_NF: Tensor) -> None:
        """All devices start over, each at a model of its own."""
        self.sums.clear(range(len(self._homes)))
        for server, members in enumerate(self._homes):
            for device in members:
                self._start(server, device, models_NF[device])

    def admit(self, part: Admit, model: Tensor) -> None:
        """It begins at this model."""
        self.members_V[part.server] += part.device in self.absent
        self.absent.discard(part.device)
        self._uncounted.discard(part.device)
        if self._bound.keeps_last:
            # with a baseline, one who comes back may finish what it was at
            self._contributions.forget_upload(part.device)
        self._start(part.server, part.device, model)

    def _start(self, server: int, device: int, model: Tensor) -> None:
        first = self._contributions.start_over(device, model)
        if self._members_count and device not in self.absent:
            self._count(server, device, first, 1)

    def dismiss(self, part: Dismiss) -> None:
        """Its last upload counts no longer."""
        self.members_V[part.server] -= part.device not in self.absent
        self.absent.add(part.device)
        if not self._members_count:
            return
        last = self._contributions.last_counted(part.device)
        self._uncounted.discard(part.device)
        if part.anew:
            self._keep_report(part.server)
            self._stale.add(part.server)  # several may leave at once
        else:
            self._count(part.server, part.device, last, -1)

    def count_nobody(self, server: int) -> None:
        """What its members have contributed is lost; what it has reported stays."""
        self._keep_report(server)
        self._stale.discard(server)
        self._uncounted |= {*self._homes[server]}
        self.sums.clear([server])

    def recount(self, server: int, device: int) -> None:
        """A member has contributed again."""
        self._uncounted.discard(device)
        if self._members_count:
            self._keep_report(server)
            self._stale.add(server)

    def form_anew(self) -> None:
        """Sums from the contributions of those who are members, in order, whatever was lost by
        rounding before.
        """
        if self._stale and self._one_sum:
            self._stale = {*range(len(self._homes))}
        for server in sorted(self._stale):
            members = sorted(self._contributors(server))
            self.sums.total_VU[server] = self._contributions.sum_of(members)
            weights = (self._bound.weights[device] for device in members)
            self.sums.weight_V[server] = reduce(operator.add, weights, 0.0)  # one by one
            self.sums.count_V[server] = len(members)
        self._stale.clear()

    def _count(self, server: int, device: int, contribution: Tensor, sign: int) -> None:
        weight = sign * self._bound.weights[device]
        self._keep_report(server)
        factor = self._bound.factor(weight)
        cloud_step.absorb(self.sums.total_VU[server], factor, contribution, None)
        self.sums.weight_V[server] += weight
        self.sums.count_V[server] += sign

    # ---------------------------------------------------------------------------------------------
    # sums that are on their way
    def report(self, server: int) -> None:
        """From here on a global step reads the sum of this server as it is now."""
        self._reported.setdefault(server, None)

    def _keep_report(self, server: int) -> None:
        """What it has reported stays as it was."""
        sums = self.sums
        if server in self._reported and self._reported[server] is None:
            kept = sums.total_VU[server].clone(), sums.weight_V[server], sums.count_V[server]
            self._reported[server] = kept

    def take_reported(self) -> tuple[Tensor, tuple[float, int, int]]:
        """The sums as they were reported; the weight and number of those who are in them, and the
        number of all members.
        """
        total_VU, weights, counts = self.sums.total_VU, self.sums.weight_V, self.sums.count_V
        sent = {n: kept for n, kept in self._reported.items() if kept is not None}
        if sent:
            rows = enumerate(total_VU)
            total_VU = torch.stack([sent[n][0] if n in sent else row for n, row in rows])
            weights = [sent[n][1] if n in sent else w for n, w in enumerate(weights)]
            counts = [sent[n][2] if n in sent else c for n, c in enumerate(counts)]
        self._reported.clear()
        return total_VU, (sum(weights), sum(counts), sum(self.members_V))

    # ---------------------------------------------------------------------------------------------
    # the state
    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        state = {"total": self.sums.total_VU}
        state |= {"weight": torch.tensor(self.sums.weight_V, dtype=torch.float64)}
        return state | (
            {"count": torch.tensor(self.sums.count_V)} if self._bound.needs_counts else {}
        )

    def load_state(self, state: Mapping[str, Tensor], absent: Iterable[int]) -> None:
        """The inverse."""
        self.sums.total_VU.copy_(state["total"])
        self.sums.weight_V[:] = [float(w) for w in state["weight"]]
        if "count" in state:
            self.sums.count_V[:] = state["count"].tolist()
        self.absent = set(absent)
        self.members_V = self._counted_members()
