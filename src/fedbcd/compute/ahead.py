"""Rounds on a GPU without an event loop between them: the schedule is known ahead, so a round is a
few launches of recorded work.

`Outline` says who works in a round. Here the same algorithm functions as in `batch.py` and
`numbers.py` run on fixed shapes: the devices of a round together, K_max steps with those that have
finished masked out; or, where there are thousands, in groups of equal steps. Fixed shapes can be
recorded once as a CUDA graph and replayed; `compile=True` also fuses the operations in between.
Everything works without either, on any device, which is how it is compared with the event loop in
the tests.

Shapes: N jobs of a round (in tables of all: N devices), V servers, B blocks of R jobs of one server
each, F values of a model (P parameters and its buffers), U values of an upload.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.device import Iterates, Work, aspg, penalty_steps
from fedbcd.algorithm.method import SENT, Method, Sums
from fedbcd.algorithm.objective import Gradients
from fedbcd.algorithm.plan import Steps, one_loop
from fedbcd.algorithm.wire import Wire
from fedbcd.compute.batch import Trainer
from fedbcd.compute.devices import StackedDevices
from fedbcd.compute.graphs import Compiler, Program
from fedbcd.compute.numbers import Numbers
from fedbcd.errors import NumericalError
from fedbcd.schedule.arrays import Jobs, Outline
from fedbcd.schedule.effort import Effort
from fedbcd.schedule.events import Simulation
from fedbcd.schedule.work import Reader

COMPILED_WHOLE = 100  # parameter tensors times steps, at most
Packed = np.ndarray[Any, np.dtype[np.int64]]  # (4, N): device, session, steps, server
# at most this number of jobs of a round train as one masked batch; more are grouped by their steps,
MASKED_JOBS = 512
# a group has at most this number of jobs, in blocks of jobs of one server each
GROUP_JOBS, BLOCK_JOBS = 1024, 8
FEW_ROWS = 8  # up to this number, rows are added one by one
CHECKED_MODELS = 256  # models checked at a time for numbers that are not finite


@dataclass(frozen=True)
class _Shape:
    """What a recorded piece of training does."""

    jobs: int
    steps: int
    offline: bool
    masked: bool  # jobs take up to `steps` steps; otherwise all take just these
    blocks: int  # equally many jobs of one server in each; 0: they are not counted


class _Packing:
    """How the jobs of a round are cut into batches of fixed shapes."""

    def __init__(self, steps: tuple[int, int], devices: int, servers: int, most: int) -> None:
        """`most` jobs in a round."""
        self._steps, self.nobody, self._servers = steps, devices, servers
        self._most = most
        self.group = self._group_size()

    def together(self, jobs: Jobs, blocks: int) -> _Shape:
        """All jobs as one batch: up to the most steps, masked where they differ; a number that
        varies is rounded up.
        """
        low, high = self._steps
        size = len(jobs.device) if blocks else -(-len(jobs.device) // 16) * 16
        return _Shape(size, high, not blocks, low < high or not jobs.steps.all(), blocks)

    def groups(self, jobs: Jobs, offline: bool) -> Iterator[tuple[_Shape, Packed]]:
        """Jobs by their steps, in groups of one size."""
        packed = jobs.packed
        for steps in range(self._steps[1], 0, -1):
            group = packed[:, packed[2] == steps]
            if not offline:
                group = self._in_blocks(group)
            shape = _Shape(
                self.group, steps, offline, False, 0 if offline else self.group // BLOCK_JOBS
            )
            for k in range(0, group.shape[1], self.group):
                yield shape, group[:, k : k + self.group]

    def _group_size(self) -> int:
        """At most `GROUP_JOBS`: the jobs of a round with one number of steps, in whole blocks,
        just fill a few groups.
        """
        low, high = self._steps
        expected = self._most / (high - low + 1)
        usual = expected + 1.5 * expected**0.5 + self._servers * (BLOCK_JOBS - 1) / 2
        groups = -(-usual // GROUP_JOBS)
        return int(-(-usual // (groups * BLOCK_JOBS))) * BLOCK_JOBS

    def _in_blocks(self, packed: Packed) -> Packed:
        """Jobs by server, each server's filled up to whole blocks."""
        of_server = (packed[:, packed[3] == server] for server in range(self._servers))
        return np.concatenate(
            [self.filled(part, -(-part.shape[1] // BLOCK_JOBS) * BLOCK_JOBS) for part in of_server],
            axis=1,
        )

    def filled(self, packed: Packed, size: int) -> Packed:
        """With jobs of nobody, up to a fixed number."""
        missing = size - packed.shape[1]
        if missing == 0:
            return packed
        nobody = np.repeat(np.array([[self.nobody], [0], [0], [0]]), missing, axis=1)
        return np.concatenate([packed, nobody], axis=1)


def _lengths(method: Method) -> tuple[int, int]:
    """The fewest and the most steps of any session."""
    lows, highs = zip(*(method.lengths(offline=off) for off in (True, False)), strict=True)
    return min(lows), max(highs)


class _RecordedTraining:
    """Jobs of a fixed shape: their models are read, trained and kept."""

    def __init__(self, trainer: Trainer, devices: StackedDevices, compiler: Compiler) -> None:
        self._trainer, self._method = trainer, trainer.method
        self._tables, self._compiler = devices.with_nobody, compiler
        self._dtype, self._p = devices.dtype, trainer.objective.layout.size_P
        self._nobody = len(trainer.bound.weights)

    def of(self, shape: _Shape) -> Callable[[Tensor, Tensor, Tensor], Tensor | None]:
        """Such jobs train towards these z, and their losses are added up; the models are returned
        if nobody keeps them.

        For a model of few layers all steps are compiled together, with the reading and writing of
        models; for a large one, each step by itself.
        """
        step, draw = self._stepper(shape), self._draw
        whole = shape.steps * len(self._trainer.objective.layout.parameters) <= COMPILED_WHOLE
        if not whole:
            step, draw = self._compiler(step), self._compiler(draw)

        def train(jobs_4N: Tensor, z_VF: Tensor, total_loss: Tensor) -> Tensor | None:
            z_NF = z_VF if len(z_VF) == 1 else z_VF.index_select(0, jobs_4N[3])
            x, prev = self._models(jobs_4N[0], z_NF, shape.jobs)
            penalty, per_step = draw(jobs_4N, shape.steps)
            losses = []
            for positions, hashes, active in per_step:
                x, prev, loss = step(
                    x, prev, z_NF, penalty, positions, hashes, active if shape.masked else None
                )
                losses.append(loss)
            total_loss.add_(torch.stack(losses).sum())
            if not self._method.keeps_personal:
                return x
            kept, kept_prev = (self._tables[name] for name in ("x", "x_prev"))
            kept.index_copy_(0, jobs_4N[0], x.to(kept.dtype))
            kept_prev.index_copy_(0, jobs_4N[0], prev.to(kept.dtype))
            return None

        return self._compiler(train) if whole else train

    def _draw(
        self, jobs_4N: Tensor, most: int
    ) -> tuple[Tensor | float, list[tuple[Tensor, Tensor | None, Tensor]]]:
        """gamma_i; and for each step: mini-batches, hashes for augmentation, and which jobs are
        still at work.
        """
        device, session, steps, _ = jobs_4N
        owner = device.clamp(max=self._nobody - 1)
        batches = self._trainer.batches_of(owner, session, most)
        per_step = []
        for k in range(most):
            hashes = None if batches.hashes is None else batches.hashes[:, k].contiguous()
            per_step.append((batches.positions[:, k].contiguous(), hashes, (steps > k)[:, None]))
        return self._trainer.penalty_of(owner), per_step

    def _models(self, device: Tensor, z_NF: Tensor, jobs: int) -> tuple[Tensor, Tensor]:
        if not self._method.keeps_personal:
            x = z_NF.expand(jobs, -1)
            return x, x[:, : self._p]
        x, prev = (self._tables[name].index_select(0, device) for name in ("x", "x_prev"))
        return x.to(self._dtype), prev.to(self._dtype)

    def _stepper(self, shape: _Shape) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        """One step of all jobs. The gradient is traced, so that a compiler sees plain
        operations.
        """
        plan = one_loop(self._method.offline if shape.offline else self._method.plan)
        assert plan is not None
        loop, p = plan.loop, self._p
        traced = self._trainer.traced_gradients(shape.jobs) if isinstance(loop, Steps) else None

        def step(
            x_NF: Tensor,
            prev_NP: Tensor,
            z_NF: Tensor,
            penalty: Any,
            positions: Tensor,
            hashes: Tensor | None,
            active: Tensor | None,
        ) -> tuple[Tensor, Tensor, Tensor]:
            found: list[Gradients] = []

            def gradient(_: int, ex: Tensor) -> tuple[Tensor, ...]:
                assert traced is not None
                found.append(traced(ex, x_NF[:, p:], positions, hashes))
                # a compiler puts one piece together as it goes
                return (found[0].gradient_NP,) if self._compiler.wanted else found[0].parts

            z_NP = z_NF[:, :p] if plan.pulled else None
            rows, work = (
                Iterates(x_NF[:, :p], prev_NP),
                Work([1] * len(x_NF), gradient, z_NP, penalty),
            )
            if isinstance(loop, Steps):
                rows = aspg(rows, work, loop.step, loop.momentum, loop.projection)
            else:
                rows = penalty_steps(rows, work, loop.projection, loop.contact)
            loss_N = found[0].loss_N if found else torch.zeros_like(x_NF[:, 0])
            buffers_NB = found[0].buffers_NB if found else x_NF[:, p:]
            x = torch.cat([rows.x_NP, buffers_NB], 1) if buffers_NB.shape[1] else rows.x_NP
            if active is None:
                return x, rows.prev_NP.contiguous(), loss_N.sum()
            masked = torch.where(active[:, 0], loss_N, torch.zeros_like(loss_N)).sum()
            return torch.where(active, x, x_NF), torch.where(active, rows.prev_NP, prev_NP), masked

        return step


class Ahead:
    """Plays rounds like `engine.Simulation`: `now`, `round` and `activations` are where it
    stands.
    """

    def __init__(self, numbers: Numbers, outline: Outline, compile: bool = False) -> None:
        self.numbers, self._outline, self._method = numbers, outline, numbers.method
        assert isinstance(numbers.devices, StackedDevices)
        self._devices, self._servers = numbers.devices, len(numbers.held)
        self._where = numbers.sums.total_VU.device
        compiler = Compiler(compile)
        self._packing = _Packing(
            _lengths(self._method), len(numbers.weights), self._servers, outline.most_jobs
        )
        self._training = _RecordedTraining(numbers.trainer, numbers.devices, compiler)
        self._programs: dict[Any, Program] = {}
        self._activations: dict[_Shape, Callable[[Tensor], None]] = {}
        self._counted, self._mixed = compiler(self._count), compiler(self._mix)
        self._z_VF = numbers.global_VF()[:1].clone() if outline.sync else numbers.global_VF()
        self._weight_V = self._float64(numbers.sums.weight_V)
        factors = map(numbers.bound.factor, numbers.weights)
        self._weight_N, self._factor_N = (  # the last is of nobody
            self._float64([*each, 0.0]) for each in (numbers.weights, factors)
        )
        tables = numbers.devices.with_nobody
        # where members count: what each contributes
        self._last_NU = tables.get(SENT, tables.get("x", torch.empty(0)))
        self._loss = self._float64(0.0)  # of all steps; here to see that it is finite

    def _float64(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._where)

    @property
    def now(self) -> float:
        """The virtual clock."""
        return self._outline.now

    @property
    def round(self) -> int:
        """Rounds played."""
        return self._outline.round

    @property
    def activations(self) -> int:
        """Uploads so far."""
        return self._outline.activations

    @property
    def done(self) -> Effort:
        """What devices have done so far."""
        return self._outline.done

    def play_round(self) -> None:
        """One more round; on a GPU it returns before the work is done."""
        planned = self._outline.next_round()
        if planned.offline is not None:
            self._train(planned.offline, offline=True)
        if len(planned.jobs.device) <= MASKED_JOBS:
            shape = self._packing.together(planned.jobs, blocks=len(planned.servers))
            self._run(shape, planned.jobs.packed, then_cloud=True)
            return
        self._train(planned.jobs)
        self._program(
            ("cloud", len(planned.servers)), self._mixed, torch.from_numpy(planned.servers)
        )

    def settle(self) -> None:
        """Bring the numbers up to this moment of the clock, and see that they are finite."""
        late = self._outline.settle()
        if late is not None:
            shape = _Shape(
                self._outline.most_jobs,
                self._method.lengths(offline=False)[1],
                False,
                True,
                self._servers,
            )
            self._run(shape, late.packed)
        numbers = self.numbers
        for n, handle in enumerate(numbers.held):
            numbers.models[handle] = self._z_VF[min(n, len(self._z_VF) - 1)]
        numbers.sums.weight_V = self._weight_V.tolist()
        self._check()

    def _check(self) -> None:
        numbers = self.numbers
        x_NF = numbers.personal_NF
        assert isinstance(x_NF, Tensor)
        rows = (
            torch.cat([~torch.isfinite(part).all(1) for part in torch.split(x_NF, CHECKED_MODELS)])
            if len(x_NF)
            else None
        )
        advice = f"use a smaller device_step (now {self._method.device_step:g})"
        if rows is not None and bool(rows.any()):
            device = int(rows.nonzero()[0])
            raise NumericalError(
                f"the model of device {device} is no longer finite after round {self.round};"
                f" {advice}"
            )
        if not bool(torch.isfinite(self._loss)) or not bool(torch.isfinite(self._z_VF).all()):
            raise NumericalError(
                f"a loss or a global model is no longer finite after round {self.round}; check the"
                f" data, or {advice}"
            )

    # ---------------------------------------------------------------------------------------------
    # training
    def _train(self, jobs: Jobs, offline: bool = False) -> None:
        if len(jobs.device) <= MASKED_JOBS and offline:
            self._run(self._packing.together(jobs, blocks=0), jobs.packed)
            return
        for shape, packed in self._packing.groups(jobs, offline):
            self._run(shape, packed)

    def _run(self, shape: _Shape, packed: Packed, then_cloud: bool = False) -> None:
        if shape not in self._activations:
            self._activations[shape] = self._activation(shape)
        activation = self._activations[shape]

        def work(jobs_4N: Tensor) -> None:
            activation(jobs_4N)
            if then_cloud:
                self._mixed(jobs_4N[3].view(shape.blocks, -1)[:, 0])

        filled = self._packing.filled(packed, shape.jobs)
        self._program((shape, then_cloud), work, torch.from_numpy(filled))

    def _activation(self, shape: _Shape) -> Callable[[Tensor], None]:
        """Such jobs train, and their uploads are counted."""
        train = self._training.of(shape)

        def activation(jobs_4N: Tensor) -> None:
            # where members count, an upload replaces the device's last one, its model until now
            if shape.blocks and self._method.counts == "members":
                self._counted(shape.blocks, None, jobs_4N, -1.0)
            x = train(jobs_4N, self._z_VF, self._loss)
            if shape.blocks and self.numbers.bound.wire is not None:
                x = self._through(self.numbers.bound.wire, x, jobs_4N)
            if shape.blocks:
                self._counted(shape.blocks, x, jobs_4N, 1.0)

        return activation

    def _through(self, wire: Wire, x_NF: Tensor | None, jobs_4N: Tensor) -> Tensor | None:
        """Models that were trained, or those kept, as contributions, row by row as the event loop
        makes them; None: they are in the table of those.
        """
        x_NF = self._devices.with_nobody["x"][jobs_4N[0]] if x_NF is None else x_NF
        members, bound = self._method.counts == "members", self.numbers.bound
        found_NU = torch.zeros(x_NF.shape, dtype=torch.float64, device=x_NF.device)
        for k, (device, session, steps, server) in enumerate(jobs_4N.T.tolist()):
            if steps:
                last = self._last_NU[device] if members else None
                base = bound.base(device, last, self._z_VF[min(server, len(self._z_VF) - 1)])
                sender = bound.sender(device, session)
                (self._last_NU[device] if members else found_NU[k]).copy_(
                    base + wire.message(x_NF[k], base, sender)
                )
        return None if members else found_NU

    def _program(self, key: Any, function: Callable[[Tensor], None], given: Tensor) -> None:
        """Record it the first time, and do it for what is given."""
        if key not in self._programs:
            changes = (self._z_VF, self.numbers.sums.total_VU, self._weight_V, self._loss)
            idle = given
            if given.ndim == 2:
                none = np.zeros((4, 0), dtype=np.int64)
                idle = torch.from_numpy(self._packing.filled(none, given.shape[-1]))
            self._programs[key] = Program(function, idle.to(self._where), changes)
        self._programs[key].run(given)

    def _count(self, blocks: int, x_NF: Tensor | None, jobs_4N: Tensor, sign: float) -> None:
        """Add these models, or those kept, to the servers' sums, in float64; a job without steps
        has been counted before.
        """
        device, _, steps, server = jobs_4N
        share_BR = (sign * self._factor_N[device] * (steps > 0)).view(blocks, -1)
        of_server_VB = (
            server.view(blocks, -1)[:, 0]
            == torch.arange(self._servers, device=server.device)[:, None]
        )
        if blocks <= self._servers and share_BR.shape[1] <= FEW_ROWS:
            self._count_rows(x_NF, device.view(blocks, -1), share_BR, of_server_VB)
        else:
            x_NF = self._last_NU.index_select(0, device) if x_NF is None else x_NF
            sums_BF = _sum_of_rows(
                (share_BR.view(-1, 1) * x_NF.double()).view(blocks, -1, x_NF.shape[1])
            )
            self.numbers.sums.total_VU.add_(of_server_VB.double() @ sums_BF)
        if self._method.counts == "active":
            weight_BR = (sign * self._weight_N[device] * (steps > 0)).view(blocks, -1)
            self._weight_V.add_(of_server_VB.double() @ weight_BR.sum(1))

    def _count_rows(
        self, x_NF: Tensor | None, device_BR: Tensor, share_BR: Tensor, of_server_VB: Tensor
    ) -> None:
        """With one block for each server at most, and then blocks of nobody: every server reads the
        few rows of its own.
        """
        block_V, has_block_V = of_server_VB.to(torch.int64).argmax(1), of_server_VB.any(1)
        share_VR = share_BR.index_select(0, block_V) * has_block_V[:, None]
        rows = self._last_NU if x_NF is None else x_NF
        places_BR = (
            device_BR
            if x_NF is None
            else torch.arange(len(x_NF), device=device_BR.device).view(device_BR.shape)
        )
        places_VR, total_VU = places_BR.index_select(0, block_V), self.numbers.sums.total_VU
        for r in range(share_VR.shape[1]):
            total_VU = (
                total_VU + share_VR[:, r, None] * rows.index_select(0, places_VR[:, r]).double()
            )
        self.numbers.sums.total_VU.copy_(total_VU)

    # ---------------------------------------------------------------------------------------------
    # the cloud
    def _mix(self, servers: Tensor) -> None:
        """Eqs. (5) and (6) for the servers of this round."""
        total_VU, dtype = self.numbers.sums.total_VU, self.numbers.dtype
        if self._outline.sync:
            ones_1V = torch.ones(1, len(total_VU), dtype=total_VU.dtype, device=total_VU.device)
            total, weight = ones_1V @ total_VU, self._weight_V.sum().view(1, 1)
            z = self._z_VF.double()
            for _ in range(self._method.cloud_iterations):
                z = self._stepped(z, total, weight)
            self._z_VF.copy_(z)
        else:
            total, weight = total_VU.index_select(0, servers), self._weight_V[servers][:, None]
            z = self._z_VF.index_select(0, servers)
            for _ in range(self._method.cloud_iterations):
                if self._method.order == "step, mix":
                    z = self._stepped(z.double(), total, weight).to(dtype)
                z = cloud_step.mean(z.double()).to(dtype).expand(len(servers), -1)
                if self._method.order == "mix, step":
                    z = self._stepped(z.double(), total, weight).to(dtype)
            self._z_VF.index_copy_(0, servers, z)
        if self._method.counts == "active":
            total_VU.index_fill_(0, servers, 0.0)
            self._weight_V.index_fill_(0, servers, 0.0)

    def _stepped(self, mixed: Tensor, total: Tensor, weight: Tensor) -> Tensor:
        """As `Bound.stepped` does it: in float64, and with nobody to count z = w."""
        total = self.numbers.bound.total(total, weight)
        sums = Sums({"x": total}, weight, 0, 0)  # type: ignore[arg-type]  # of every server
        return torch.where(weight == 0.0, mixed, self._method.step({"z": mixed}, sums)["z"])


class AheadWithEvents:
    """Rounds planned ahead, and beside them their events, for the log: time does not depend on
    numbers, so each goes its own way.

    On a GPU a round is under way while its events are played.
    """

    def __init__(self, ahead: Ahead, events: Simulation, reader: Reader) -> None:
        """`reader` follows the events, and knows which model each server holds."""
        self._ahead = ahead
        self._events = events
        self._reader = reader

    @property
    def now(self) -> float:
        """The virtual clock."""
        return self._events.now

    @property
    def round(self) -> int:
        """Rounds played."""
        return self._events.round

    @property
    def activations(self) -> int:
        """Uploads so far."""
        return self._events.activations

    @property
    def done(self) -> Effort:
        """What devices have done so far."""
        return self._reader.done

    def play_round(self) -> None:
        """One more round."""
        self._ahead.play_round()
        next(self._events)
        assert self._ahead.round == self._events.round, (
            "the outline of this schedule is not that of its events"
        )

    def settle(self) -> None:
        """Bring the numbers up to this moment of the clock, under the handles that the log has for
        them.
        """
        self._ahead.settle()
        self._ahead.numbers.rename_models(self._reader.held)


def _sum_of_rows(blocks_BRF: Tensor) -> Tensor:
    """Over R. A few rows are added one by one: a compiler reads them as they lie, where a reduction
    would go across them.
    """
    if blocks_BRF.shape[1] > FEW_ROWS:
        return blocks_BRF.sum(1)
    return functools.reduce(torch.add, blocks_BRF.unbind(1))
