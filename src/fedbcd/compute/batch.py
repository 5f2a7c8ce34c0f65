"""Training many devices at once: gather their mini-batches, run the algorithm on the stack, one
vectorised gradient per step.

Shapes: N devices, F values of a model: P parameters, then B values of buffers; K steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbcd.algorithm import draws
from fedbcd.algorithm.augment import Augment
from fedbcd.algorithm.fused.library import ChainSessions, ModelRows, SamplePool
from fedbcd.algorithm.interpret import Interpreter, Registers
from fedbcd.algorithm.method import Bound, Method
from fedbcd.algorithm.objective import Gradients, Objective
from fedbcd.algorithm.plan import Custom, Plan, batches_of, flat
from fedbcd.algorithm.trees import Tree
from fedbcd.compute.fit import check_fit, labels_fit, ready
from fedbcd.compute.fused import Compiled, compiled_for, pool_of
from fedbcd.compute.workers import OneWorker, Workers
from fedbcd.data.federation import Transform
from fedbcd.data.samples import Pool, Samples
from fedbcd.errors import ConfigError, NumericalError
from fedbcd.own import calling, is_own
from fedbcd.schedule.work import Session

# all models of a batch on a CPU together have at most this number of parameters: few enough for
# its cache, enough models to share the overhead of a call
CACHED_PARAMETERS = 2**20
# the same for compiled code, which keeps one model in the cache at a time: memory for the results
# is the limit
COMPILED_CALL_PARAMETERS = 2**24


Numbers = npt.NDArray[np.int64]


class Batches(NamedTuple):
    """Mini-batches of all steps: positions in the pool and, for augmentation, one hash per slot;
    (jobs, steps, R) each.
    """

    positions: Tensor
    hashes: Tensor | None

    def of(self, number_N: Numbers) -> tuple[Tensor, Tensor | None]:
        """Those with these numbers, for the first jobs."""
        n, k = len(number_N), int(number_N[0])
        if bool((number_N == k).all()):
            return self.positions[:n, k], None if self.hashes is None else self.hashes[:n, k]
        chosen = torch.arange(n), torch.from_numpy(number_N)
        return self.positions[chosen], None if self.hashes is None else self.hashes[chosen]


class TrainingData(Protocol):
    """What training needs of a federation."""

    pool: Pool
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
        method: Method,
        objective: Objective,
        seed: int,
        start: Tensor,
        max_batch: int | None,
        bound: Bound | None = None,
    ) -> None:
        """`bound`: the method as it is bound in this run, where uploads have layers."""
        if max_batch is not None and max_batch < 1:
            raise ConfigError(
                f"max_batch={max_batch} must be 1 or more; leave it out to train all that is due"
                " together"
            )
        where = start.device
        self.method = method
        self.bound = bound or Bound(method, objective.layout, federation.sizes)
        self.objective = objective.to(where)
        self._start = start
        self.seed = seed
        self.max_batch = max_batch
        self.one_by_one = max_batch == 1
        self.together = (
            max(1, CACHED_PARAMETERS // objective.layout.size_P) if where.type == "cpu" else None
        )
        self._transform = federation.transform
        self._augment = federation.augment
        self._samples = federation.pool.to(where)
        self.why_not_tensors = self._samples.why_not_tensors
        self._addressed = self._augment is not None or bool(self.why_not_tensors)
        self._positions, self._starts = federation.positions.to(where), federation.starts.to(where)
        self._sizes = torch.tensor(federation.sizes, device=where)
        plans = (method.plan, method.offline, method.at_evaluation)
        longest = max(method.lengths(offline=offline)[1] for offline in (False, True))
        most = max(batches_of(plan, longest) for plan in plans)
        self._grid = (
            None if method.batch == "all" else draws.grid(max(1, most), method.batch, where)
        )
        gamma = self.bound.penalty_N
        self._same_penalty = float(gamma[0]) if bool((gamma == gamma[0]).all()) else None
        self._penalty_N1 = gamma.to(start)[:, None]
        self._size_list = federation.sizes
        # what must be finite: what is sent, and what is tested
        self._checked = {*self.bound.upload.places, method.personal} - {"z"}
        self.compiled: Compiled | None = None  # whole sessions in compiled code
        self.why_not_compiled = self.why_one_by_one = ""
        self.doubts: list[str] = []  # about loss and data, seen on the first samples
        self._pool: SamplePool | None = None  # what it can take samples from

    def check_vectorised(self, start: Tensor) -> str | None:
        """Try a gradient. Fall back to one device at a time when the model cannot be vectorised;
        returns the reason, if so.
        """
        first = self._positions[[0, min(1, self._size_list[0] - 1)]][: self._smallest_batch]
        raw, targets = self._samples.take(first)
        inputs = ready(self._transform, self._augment, raw, start.dtype)
        targets = targets.to(start.dtype) if targets.is_floating_point() else targets
        labels = self._samples.known_targets
        self.doubts = check_fit(
            self.objective, start, inputs, targets, targets if labels is None else labels
        )
        if self.one_by_one:
            self.why_not_compiled = self.why_one_by_one = "max_batch = 1: no device with another"
            return None
        self._fuse(start, inputs, targets)
        if self.compiled is not None:  # can be vectorised as well, and vmap need not be loaded
            return None
        if self._samples.collate is None:
            reason = self.objective.why_not_vectorised(start, inputs, targets)
        else:
            reason = "what a collate function makes may be of another shape each time"
        if reason is not None:
            self.one_by_one, self.max_batch, self.why_one_by_one = True, 1, reason
        return reason

    def _fuse(self, start: Tensor, inputs: Tree, targets: Tensor) -> None:
        """Let compiled code do the work, if it can."""
        if not isinstance(self._samples, Samples):
            self.why_not_compiled = self._samples.why_not_tensors
            return
        self._pool = pool_of(self._samples, None if self._augment is not None else self._transform)
        batch = self.method.batch
        samples = max(self._size_list) if batch == "all" else batch
        example = (inputs, targets)
        found = compiled_for(
            self.bound, self.objective, start, example, self._samples.targets, samples
        )
        if isinstance(found, str):
            self.why_not_compiled = found
            return
        self.compiled, self.why_not_compiled = found, ""
        if self.works_together:
            self.together = max(1, COMPILED_CALL_PARAMETERS // self.objective.layout.size_P)

    @property
    def _smallest_batch(self) -> int:
        """Some layers do not work on one sample."""
        batch = self.method.batch
        return min(self._size_list) if batch == "all" else batch

    def rehearse(self) -> None:
        """Carry out what somebody else has written for devices and servers once, for nothing."""
        bound, method = self.bound, self.method
        model = bound.first_model(self._start)
        kept = {name: x[None] for name, x in bound.tables(self._start).items()}
        heard = {name: z[None] for name, z in bound.heard.views(model[: bound.heard.size]).items()}
        remedy = "it gets tensors by name, of devices with a row for each"
        if any(isinstance(operation, Custom) for operation in flat(method.plan)):
            with calling("{}: its plan fails", method.name, remedy=remedy):
                self.interpreted(method.plan, [Session(0, 0, 1, None, False)], {**kept, **heard})
        if is_own(type(method.step)):
            nothing = torch.zeros(bound.upload.size, dtype=torch.float64, device=model.device)
            with calling("{}: its server step fails", method.name, remedy=remedy):
                bound.stepped(model.double(), nothing, 1.0, 1, 1)

    @property
    def divisible(self) -> bool:
        """Whether parts may run at the same time; not if they draw from torch's one generator on
        the way.
        """
        return not (self.objective.stochastic or self.one_by_one)

    @property
    def works_together(self) -> bool:
        """Whether all workers share each part; otherwise each worker takes a part by itself."""
        return self.compiled is not None and self._pool is not None

    def parts(self, jobs: list[Session]) -> list[list[Session]]:
        """Split jobs into batches that can run together, in descending order of steps.

        Exact gradients need equal data sizes. Where there are several batches anyway, equal numbers
        of steps in each save putting rows together that finish apart.
        """
        groups: dict[tuple[int, int], list[Session]] = {}
        exact, alike = (
            self.method.batch == "all",
            self.together is not None and self.compiled is None and len(jobs) > self.together,
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
        self, jobs: list[Session], registers: Registers, workers: Workers | None = None
    ) -> Registers:
        """What the plan of these sessions makes of the registers; rows are in the order of `jobs`,
        which is descending in steps.
        """
        if self.compiled is not None:
            loop = self.compiled.loop_of(jobs[0].offline)
            models = loop.copies(registers, self.bound.layout.size_P)
            self.run_compiled(jobs, models, registers.get("z"), workers or OneWorker())
            return {**registers, "x": models.new_x, "x_prev": models.new_prev}
        plan = self.method.offline if jobs[0].offline else self.method.plan
        return self.interpreted(plan, jobs, registers)

    def interpreted(self, plan: Plan, jobs: list[Session], registers: Registers) -> Registers:
        """What this plan makes of the registers, by torch."""
        session = MiniBatches(self, jobs, plan)
        penalty = self.penalty_of(
            torch.tensor([job.device for job in jobs], device=self._starts.device)
        )
        steps = [job.steps for job in jobs]
        numbers = [job.session for job in jobs]
        interpreter = Interpreter(self.bound, steps, penalty, session, numbers)
        after = interpreter.run(plan, registers)
        session.check([after[name] for name in self._checked if name in after])
        return after

    def run_compiled(
        self, jobs: list[Session], models: ModelRows, z_NF: Tensor | None, workers: Workers
    ) -> None:
        """The same by compiled code, which puts new models where `models` says."""
        assert self.compiled is not None
        loop = self.compiled.loop_of(jobs[0].offline)
        penalty_N = self._penalty_N1[torch.tensor([job.device for job in jobs]), 0]
        steps = [job.steps for job in jobs]
        sessions = self._sessions(jobs) if loop.takes_gradients else ChainSessions(steps)
        outcome = self.compiled.train(loop, models, sessions, z_NF, penalty_N, workers)
        if not outcome.finite:
            session = MiniBatches(self, jobs, ())
            session.losses += outcome.losses_NK.T
            rows = models.new_x if models.rows is None else models.new_x[models.rows]
            session.check([rows])

    def _sessions(self, jobs: list[Session]) -> ChainSessions:
        """Steps and mini-batches of these jobs for compiled code."""
        positions, hashes = self.batches(jobs, jobs[0].steps)
        pool = self._pool
        if pool is None:
            inputs, targets = self._fetch(positions, torch.float32, hashes)
            pool = SamplePool(inputs.contiguous(), None, targets.contiguous())
            positions = torch.arange(positions.numel()).reshape(positions.shape)
        return ChainSessions([job.steps for job in jobs], pool, positions.contiguous())

    def penalty_of(self, device_N: Tensor) -> Tensor | float:
        """gamma_i of these devices: one for all, or (N, 1)."""
        return self._penalty_N1[device_N] if self._same_penalty is None else self._same_penalty

    def batches(self, jobs: list[Session], most: int) -> Batches:
        """The first `most` mini-batches of these jobs."""
        device = torch.tensor([job.device for job in jobs], device=self._starts.device)
        session = torch.tensor([job.session for job in jobs], device=device.device)
        if self.method.batch == "all":
            within = torch.arange(self._size_list[jobs[0].device], device=device.device)
            within = within.expand(len(jobs), most, -1)
            return Batches(self._positions[self._starts[device][:, None, None] + within], None)
        return self.batches_of(device, session, most)

    def batches_of(self, device_N: Tensor, session_N: Tensor, steps: int) -> Batches:
        """The mini-batches of the first `steps` steps of these devices' sessions."""
        assert self._grid is not None
        grid = self._grid.of(steps)
        within = draws.batch_positions(self.seed, device_N, session_N, self._sizes[device_N], grid)
        hashes = (
            None
            if not self._addressed
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
        with labels_fit(targets):
            return call(params, buffers, inputs, targets)

    def traced_gradients(
        self, jobs: int
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Gradients]:
        """`gradients` for `jobs` devices at once; as plain operations if the model is traceable."""
        p, batch = self.objective.layout.size_P, self.method.batch
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
    ) -> tuple[Tree, Tensor]:
        """Samples as the model wants them: gathered in their small dtype, augmented, then
        transformed.
        """
        inputs, targets = self._samples.take(positions, hashes)
        if hashes is not None and self._augment is not None:
            inputs = self._augment.apply(inputs, hashes)
        return self._transform(inputs, dtype), (
            targets.to(dtype) if targets.is_floating_point() else targets
        )


@contextmanager
def seeded(address: int, x: Tensor) -> Iterator[None]:
    """Dropout and the like draw from a generator that is seeded by an address, where x is."""
    on_cpu = x.device.type == "cpu"  # torch.manual_seed sees to every kind of device, slowly
    seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        seed(address >> 1)
        yield


class MiniBatches:
    """The mini-batch gradients of one batch of jobs, numbered by what each job has drawn; keeps
    their losses.
    """

    def __init__(self, trainer: Trainer, jobs: list[Session], plan: Plan) -> None:
        self.trainer = trainer
        self.jobs = jobs
        self.losses: list[Tensor] = []  # of each gradient, one per job
        self._plan = plan
        self._drawn_N = np.zeros(len(jobs), dtype=np.int64)
        self._batches: Batches | None = None

    def gradients(self, at_NP: Tensor, buffers_NB: Tensor, last: bool = False) -> Gradients:
        """Of the first jobs, at these points, each on its next mini-batch, or on the `last`."""
        if self._batches is None:
            most = batches_of(self._plan, self.jobs[0].steps)
            self._batches = self.trainer.batches(self.jobs, most)
        now_N = self._drawn_N[: len(at_NP)]
        number_N = now_N - last
        positions, hashes = self._batches.of(number_N)
        # one by one, nobody has asked whether it is
        draws_numbers = self.trainer.objective.stochastic or self.trainer.one_by_one
        random = self._own_randomness(int(number_N[0]), at_NP) if draws_numbers else nullcontext()
        with random:
            found = self.trainer.gradients(at_NP, buffers_NB, positions, hashes)
        now_N += not last
        self.losses.append(found.loss_N)
        return found

    def _own_randomness(self, k: int, ex: Tensor) -> AbstractContextManager[None]:
        first, seed = self.jobs[0], self.trainer.seed
        return seeded(draws.address_one(seed, draws.BATCH, first.device, first.session, k), ex)

    def check(self, models: Sequence[Tensor]) -> None:
        """Refuse values that are not finite, and say where the first one came from."""
        total = torch.stack([tensor.sum() for tensor in (*models, *self.losses)]).sum()
        # a sum of finite values can overflow, so only a finite one decides
        if bool(torch.isfinite(total)):
            return
        step = f"(now {self.trainer.method.device_step:g})"
        for k, loss in enumerate(self.losses):
            bad = (~torch.isfinite(loss)).nonzero()
            if len(bad):
                job = self.jobs[int(bad[0])]
                raise NumericalError(
                    f"the loss of device {job.device} is {float(loss[int(bad[0])])} in step {k + 1}"
                    f" of {job.steps} of its session {job.session}; check its data, or use a"
                    f" smaller device_step {step}"
                )
        for model_NF in models:
            rows = (~torch.isfinite(model_NF)).any(1).nonzero()
            if len(rows):
                job = self.jobs[int(rows[0])]
                raise NumericalError(
                    f"the model of device {job.device} is no longer finite after its session"
                    f" {job.session}; use a smaller device_step {step}"
                )
