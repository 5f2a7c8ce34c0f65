"""Training many devices at once: gather their mini-batches, run the algorithm on the stack, one
vectorised gradient per step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedbcd.algorithm import draws
from fedbcd.algorithm.augment import Augment
from fedbcd.algorithm.device import Rows, Work
from fedbcd.algorithm.fused.library import ChainTrainer, Pool, Sessions
from fedbcd.algorithm.objective import Gradients, Objective
from fedbcd.algorithm.variants import Algorithm, penalties
from fedbcd.compute.fused import FusedSession, InPlace, fused_for, pool_of
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.data.federation import Transform
from fedbcd.data.samples import Samples
from fedbcd.errors import ConfigError, NumericalError
from fedbcd.schedule.work import Session

# parameters of the models that train together on a CPU: few enough for its cache, enough to share
# the overhead
IN_CACHE = 2**20
# the same of compiled code, which has one of them in the cache at a time: so many as memory for the
# new ones allows
IN_ONE_CALL = 2**24


class Batches(NamedTuple):
    """Mini-batches of all steps: positions in the pool and, for augmentation, one hash per slot;
    (jobs, steps, R) each.
    """

    positions: Tensor
    hashes: Tensor | None

    def of_step(self, k: int, n: int) -> tuple[Tensor, Tensor | None]:
        """Those of step k, for the first n jobs."""
        return self.positions[:n, k], None if self.hashes is None else self.hashes[:n, k]


class TrainingData(Protocol):
    """What training needs of a federation."""

    pool: Samples
    positions: Tensor  # of the devices' samples in the pool, one device after the other
    starts: Tensor  # where each device's begin
    sizes: list[int]
    transform: Transform
    augment: Augment | None

    @property
    def devices(self) -> int:
        """How many devices there are."""
        ...


class Trainer:
    """Runs jobs of one kind together. `max_batch` bounds how many; 1 means one at a time, and no
    result depends on another.
    """

    def __init__(
        self,
        federation: TrainingData,
        algorithm: Algorithm,
        objective: Objective,
        seed: int,
        start: Tensor,
        max_batch: int | None,
    ) -> None:
        if max_batch is not None and max_batch < 1:
            raise ConfigError(
                f"max_batch={max_batch} must be 1 or more; leave it out to train all that is due"
                " together"
            )
        where = start.device
        self.algorithm = algorithm
        self.objective = objective.to(where)
        self._start = start
        self.seed = seed
        self.max_batch = max_batch
        self.one_by_one = max_batch == 1
        self.together = max(1, IN_CACHE // objective.layout.size_P) if where.type == "cpu" else None
        self._transform = federation.transform
        self._augment = federation.augment
        self._inputs, self._targets = (
            federation.pool.inputs.to(where),
            federation.pool.targets.to(where),
        )
        self._positions, self._starts = federation.positions.to(where), federation.starts.to(where)
        self._sizes = torch.tensor(federation.sizes, device=where)
        self._grid = (
            None
            if algorithm.batch == "all"
            else draws.grid(algorithm.steps[1], algorithm.batch, where)
        )
        gamma = penalties(algorithm, federation.devices)
        self._same_penalty = float(gamma[0]) if bool((gamma == gamma[0]).all()) else None
        self._penalty_N1 = gamma.to(start)[:, None]
        self._size_list = federation.sizes
        self.fused: ChainTrainer | None = None  # whole sessions in compiled code
        self.why_not_compiled = self.why_one_by_one = ""
        self._pool: Pool | None = None  # what it can take samples from

    def check_vectorised(self, start: Tensor) -> str | None:
        """Try a gradient. Fall back to one device at a time when the model cannot be vectorised;
        returns the reason, if so.
        """
        inputs, targets = self._fetch(
            self._positions[[0, min(1, self._size_list[0] - 1)]], start.dtype
        )
        self._check_fit(start, inputs, targets)
        if self.one_by_one:
            self.why_not_compiled = self.why_one_by_one = "max_batch = 1: no device with another"
            return None
        self._fuse(start, inputs, targets)
        if self.fused is not None:  # can be vectorised as well, and vmap need not be loaded
            return None
        reason = self.objective.why_not_vectorised(start, inputs, targets)
        if reason is not None:
            self.one_by_one, self.max_batch, self.why_one_by_one = True, 1, reason
        return reason

    def _fuse(self, start: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Let compiled code do the work, if it can."""
        self._pool = pool_of(
            self._inputs, self._targets, None if self._augment is not None else self._transform
        )
        batch = self.algorithm.batch
        samples = max(self._size_list) if batch == "all" else batch
        found = fused_for(
            self.objective,
            self.algorithm.projection,
            start,
            (inputs, targets),
            self._targets,
            samples,
        )
        if isinstance(found, str):
            self.why_not_compiled = found
            return
        self.fused, self.why_not_compiled = found, ""
        if self.works_together:
            self.together = max(1, IN_ONE_CALL // self.objective.layout.size_P)

    def _check_fit(self, start: Tensor, inputs: Tensor, targets: Tensor) -> None:
        p = self.objective.layout.size_P
        try:
            with torch.random.fork_rng(devices=[]):
                self.objective.gradients_one_by_one(
                    start[None, :p], start[None, p:], inputs[None], targets[None]
                )
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"model or loss fail on inputs of shape {tuple(inputs.shape)} and targets of"
                f" {targets.dtype} ({reason}); use a model and a loss that fit the data"
            ) from error

    @property
    def divisible(self) -> bool:
        """Whether parts may run at the same time; not if they draw from torch's one generator on
        the way.
        """
        return not (self.objective.stochastic or self.one_by_one)

    @property
    def works_together(self) -> bool:
        """Whether all workers share each part; otherwise each worker takes a part by itself."""
        return self.fused is not None and self._pool is not None

    def parts(self, jobs: list[Session]) -> list[list[Session]]:
        """Split jobs into batches that can run together, in descending order of steps.

        Exact gradients need equal data sizes. Where there are several batches anyway, equal numbers
        of steps in each save putting rows together that finish apart.
        """
        groups: dict[tuple[int, int], list[Session]] = {}
        exact, alike = (
            self.algorithm.batch == "all",
            self.together is not None and self.fused is None and len(jobs) > self.together,
        )
        for job in sorted(jobs, key=lambda job: -job.steps):
            groups.setdefault(
                (self._size_list[job.device] if exact else 0, job.steps if alike else 0), []
            ).append(job)
        size = self.max_batch or self.together or len(jobs)
        return [
            group[k : k + size] for group in groups.values() for k in range(0, len(group), size)
        ]

    def run(
        self,
        jobs: list[Session],
        x_NF: Tensor,
        prev_NP: Tensor,
        anchor_NP: Tensor | None,
        workers: Workers | None = None,
    ) -> tuple[Tensor, Tensor]:
        """New (x, x_prev) of these devices. Rows are in the order of `jobs`, which is descending in
        steps.
        """
        p = self.objective.layout.size_P
        session = _MiniBatches(self, jobs, x_NF[:, p:])
        fused = self._fused_session(jobs, workers or OneWorker())
        rows = self._round(
            jobs, Rows(x_NF[:, :p], prev_NP), self._work(jobs, session, anchor_NP, fused)
        )
        if fused is None or fused.went_wrong(session.losses):
            session.check(rows.x_NP)
        x_NF = (
            torch.cat([rows.x_NP, session.buffers_NB], dim=1)
            if session.buffers_NB.shape[1]
            else rows.x_NP
        )
        return x_NF, rows.prev_NP

    def run_in_place(
        self,
        jobs: list[Session],
        x_NP: Tensor,
        prev_NP: Tensor,
        anchor_NP: Tensor | None,
        workers: Workers,
        copies: InPlace,
    ) -> None:
        """The same by compiled code in the memory of all models."""
        session, fused = _MiniBatches(self, jobs, x_NP[:0]), self._fused_session(jobs, workers)
        assert fused is not None
        fused.in_place = copies
        self._round(jobs, Rows(x_NP, prev_NP), self._work(jobs, session, anchor_NP, fused))
        if fused.went_wrong(session.losses):
            session.check(x_NP[copies.device_N])

    def _round(self, jobs: list[Session], rows: Rows, work: Work) -> Rows:
        if not jobs[0].offline:
            return self.algorithm.device_round(rows, work)
        return self.algorithm.offline_round(rows, work)

    def _work(
        self,
        jobs: list[Session],
        session: "_MiniBatches",
        anchor_NP: Tensor | None,
        fused: FusedSession | None,
    ) -> Work:
        penalty = self.penalty_of(
            torch.tensor([job.device for job in jobs], device=self._starts.device)
        )
        return Work([job.steps for job in jobs], session.gradient, anchor_NP, penalty, fused)

    def _fused_session(self, jobs: list[Session], workers: Workers) -> FusedSession | None:
        if self.fused is None:
            return None
        penalty = self.penalty_of(torch.tensor([job.device for job in jobs]))
        penalty_N = (
            penalty[:, 0]
            if isinstance(penalty, Tensor)
            else torch.tensor([penalty]).expand(len(jobs))
        )
        return FusedSession(
            self.fused,
            [job.steps for job in jobs],
            lambda: self._sessions(jobs),
            penalty_N,
            workers,
        )

    def _sessions(self, jobs: list[Session]) -> Sessions:
        """Steps and mini-batches of these jobs for compiled code."""
        positions, hashes = self.batches(jobs)
        pool = self._pool
        if pool is None:
            inputs, targets = self._fetch(positions, torch.float32, hashes)
            pool = Pool(inputs.contiguous(), None, targets.contiguous())
            positions = torch.arange(positions.numel()).reshape(positions.shape)
        return Sessions([job.steps for job in jobs], pool, positions.contiguous())

    def penalty_of(self, device_N: Tensor) -> Tensor | float:
        """gamma_i of these devices: one for all, or (N, 1)."""
        return self._penalty_N1[device_N] if self._same_penalty is None else self._same_penalty

    def batches(self, jobs: list[Session]) -> Batches:
        """The mini-batches of every step of these jobs."""
        device = torch.tensor([job.device for job in jobs], device=self._starts.device)
        session = torch.tensor([job.session for job in jobs], device=device.device)
        steps = jobs[0].steps
        if self.algorithm.batch == "all":
            within = torch.arange(self._size_list[jobs[0].device], device=device.device).expand(
                len(jobs), steps, -1
            )
            return Batches(self._positions[self._starts[device][:, None, None] + within], None)
        return self.batches_of(device, session, steps)

    def batches_of(self, device_N: Tensor, session_N: Tensor, steps: int) -> Batches:
        """The mini-batches of so many steps of these devices' sessions."""
        assert self._grid is not None
        grid = self._grid.of(steps)
        within = draws.batch_positions(self.seed, device_N, session_N, self._sizes[device_N], grid)
        hashes = (
            None
            if self._augment is None
            else draws.slots(self.seed, draws.AUGMENT, device_N, session_N, grid)
        )
        return Batches(self._positions[self._starts[device_N][:, None, None] + within], hashes)

    def positions_of(self, device: int) -> Tensor:
        """Where all samples of one device are in the pool."""
        start = int(self._starts[device])
        return self._positions[start : start + self._size_list[device]]

    def gradients(
        self, params: Tensor, buffers: Tensor, positions: Tensor, hashes: Tensor | None
    ) -> Gradients:
        """Gradient, loss and new buffers of some devices on the mini-batches at these positions."""
        inputs, targets = self._fetch(positions, params.dtype, hashes)
        call = self.objective.gradients_one_by_one if self.one_by_one else self.objective.gradients
        return call(params, buffers, inputs, targets)

    def traced_gradients(
        self, jobs: int
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Gradients]:
        """`gradients` for so many devices at once, as plain operations if the model can be
        traced.
        """
        p, batch = self.objective.layout.size_P, self.algorithm.batch
        assert batch != "all"
        inputs, targets = self._fetch(self._positions[:1].expand(jobs, batch), self._start.dtype)
        start_NF = self._start.repeat(jobs, 1)
        call = self.objective.operations(
            start_NF[:, :p].contiguous(), start_NF[:, p:].contiguous(), inputs, targets
        )

        def gradients(
            params: Tensor, buffers: Tensor, positions: Tensor, hashes: Tensor | None
        ) -> Gradients:
            *parts, loss, after = call(
                params, buffers, *self._fetch(positions, params.dtype, hashes)
            )
            return Gradients(tuple(parts), loss, after)

        return gradients

    def exact_gradient(self, x: Tensor, positions: Tensor) -> Tensor:
        """The gradient of one model on its own samples; asked for now and then, so by ordinary
        autograd and never traced.
        """
        inputs, targets = self._fetch(positions[None], x.dtype)
        p, address = self.objective.layout.size_P, draws.address_one(self.seed, draws.EXACT)
        with seeded(address, x):
            found = self.objective.gradients_one_by_one(x[None, :p], x[None, p:], inputs, targets)
        return found.gradient_NP[0]

    def _fetch(
        self, positions: Tensor, dtype: torch.dtype, hashes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Samples as the model wants them: gathered in their small dtype, augmented, then
        transformed.
        """
        inputs, targets = (take(samples, positions) for samples in (self._inputs, self._targets))
        if hashes is not None and self._augment is not None:
            inputs = self._augment.apply(inputs, hashes)
        return self._transform(inputs, dtype), (
            targets.to(dtype) if targets.is_floating_point() else targets
        )


def take(samples: Tensor, positions: Tensor) -> Tensor:
    """samples[positions], in a third of the time."""
    return samples.index_select(0, positions.reshape(-1)).reshape(
        *positions.shape, *samples.shape[1:]
    )


@contextmanager
def seeded(address: int, x: Tensor) -> Iterator[None]:
    """Dropout and the like draw from a generator that is seeded by an address, where x is."""
    on_cpu = x.device.type == "cpu"  # torch.manual_seed sees to every kind of device, slowly
    seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        seed(address >> 1)
        yield


class _MiniBatches:
    """The mini-batch gradients of one batch of jobs; keeps buffers and losses on the way."""

    def __init__(self, trainer: Trainer, jobs: list[Session], buffers_NB: Tensor) -> None:
        self.trainer = trainer
        self.jobs = jobs
        self.buffers_NB = buffers_NB.clone()
        self.losses: list[Tensor] = []  # of each step, one per job
        self._batches: Batches | None = None

    def gradient(self, k: int, ex: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the first len(ex) jobs in step k."""
        n = len(ex)
        if self._batches is None:
            self._batches = self.trainer.batches(self.jobs)
        positions, hashes = self._batches.of_step(k, n)
        # one by one, nobody has asked whether it is
        draws_numbers = self.trainer.objective.stochastic or self.trainer.one_by_one
        with self._own_randomness(k, ex) if draws_numbers else nullcontext():
            gradients = self.trainer.gradients(ex, self.buffers_NB[:n], positions, hashes)
        self.buffers_NB[:n] = gradients.buffers_NB
        self.losses.append(gradients.loss_N)
        return gradients.parts

    def _own_randomness(self, k: int, ex: Tensor) -> AbstractContextManager[None]:
        first, seed = self.jobs[0], self.trainer.seed
        return seeded(draws.address_one(seed, draws.BATCH, first.device, first.session, k), ex)

    def check(self, x_NP: Tensor) -> None:
        """Refuse values that are not finite, and say where the first one came from."""
        total = torch.stack([x_NP.sum(), *(loss.sum() for loss in self.losses)]).sum()
        if bool(
            torch.isfinite(total)
        ):  # a sum of finite values can overflow, so only a finite one decides
            return
        for k, loss in enumerate(self.losses):
            bad = (~torch.isfinite(loss)).nonzero()
            if len(bad):
                job = self.jobs[int(bad[0])]
                raise NumericalError(
                    f"the loss of device {job.device} is {float(loss[int(bad[0])])} in step {k + 1}"
                    f" of {job.steps} of its session {job.session}; check its data, or use a"
                    f" smaller device_step (now {self.trainer.algorithm.device_step:g})"
                )
        rows = (~torch.isfinite(x_NP)).any(1).nonzero()
        if not len(rows):
            return
        job = self.jobs[int(rows[0])]
        raise NumericalError(
            f"the model of device {job.device} is no longer finite after its session {job.session};"
            f" use a smaller device_step (now {self.trainer.algorithm.device_step:g})"
        )
