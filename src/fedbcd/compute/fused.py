"""Sessions in compiled code, where there is some for model and plan: what of the engine's it
takes, and where it leaves the models.

Shapes: N devices, P parameters, F values of a model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbcd.algorithm.fused.library import (
    ChainSessions,
    ChainTester,
    ChainTrainer,
    ModelRows,
    Outcome,
    SamplePool,
    bounds_of,
    library,
)
from fedbcd.algorithm.interpret import Registers
from fedbcd.algorithm.method import Bound
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.plan import OneLoop, Plan, Steps, one_loop
from fedbcd.compute.workers import Workers
from fedbcd.data.federation import Transform, as_dtype
from fedbcd.data.samples import Samples, Scale

# values of a mini-batch; above this, arithmetic takes the time, not the overhead, and every thread
# keeps the mini-batch twice
LARGEST_BATCH_VALUES = 2**22


@dataclass(frozen=True)
class Loop:
    """A plan that compiled code knows."""

    plan: OneLoop
    bounds: tuple[float, float]  # of the box to project onto

    @property
    def takes_gradients(self) -> bool:
        """Or only steps of the penalty."""
        return isinstance(self.plan.loop, Steps)

    def copies(self, registers: Registers, size_P: int) -> ModelRows:
        """Where it begins, and memory for what it gives."""
        x = registers["z" if self.plan.from_z else "x"][:, :size_P]
        prev = x if self.plan.from_z else registers.get("x_prev", x)
        return ModelRows(x, prev, torch.empty(x.shape), torch.empty(x.shape))


@dataclass(frozen=True)
class Compiled:
    """The sessions of a method in compiled code."""

    chain: ChainTrainer
    online: Loop
    offline: Loop | None

    def loop_of(self, offline: bool) -> Loop:
        """Of an activation, or of an offline round."""
        found = self.offline if offline else self.online
        assert found is not None
        return found

    def train(
        self,
        loop: Loop,
        models: ModelRows,
        sessions: ChainSessions,
        z_NF: Tensor | None,
        penalty_N: Tensor,
        workers: Workers,
    ) -> Outcome:
        """By all workers together."""
        part, z_NP = loop.plan.loop, z_NF if loop.plan.pulled else None
        chain, given = self.chain, (models, sessions, z_NP, penalty_N, workers)
        if isinstance(part, Steps):
            step, momentum = part.step, part.momentum
            return chain.train(*given, bounds=loop.bounds, step=step, momentum=momentum)
        return chain.train(*given, bounds=loop.bounds, contact=part.contact)


def compiled_for(
    bound: Bound,
    objective: Objective,
    start: Tensor,
    example: tuple[Tensor, Tensor],
    targets: Tensor,
    samples: int,
) -> Compiled | str:
    """Compiled code that trains these models, or why there is none: it works on a CPU, in float32.

    example: inputs and targets as the model takes them; targets: those of all samples; samples: in
    the largest mini-batch.
    """
    compiled, method = library(), bound.method
    if compiled is None:
        return "nothing was compiled at installation, or FEDBCD_FUSED=0 asks to do without"
    if start.device.type != "cpu" or start.dtype != torch.float32:
        dtype = str(start.dtype).removeprefix("torch.")
        return f"it works on a CPU in float32, and this run is in {dtype} on {start.device.type}"
    loops: list[Loop] = []
    for plan in (method.plan, method.offline):
        loop = _loop_of(plan) if plan else None
        if isinstance(loop, str):
            return loop
        loops += [] if loop is None else [loop]
    if bound.coupling_F is not None:
        return "it couples all tensors alike, and this method has factors for some (by_tensor)"
    layers = objective.chain(start, *example)
    if layers is None:
        return "model and loss are no chain of linear layers, ReLU and mean cross-entropy"
    values = samples * layers[0].inputs
    if values > LARGEST_BATCH_VALUES:
        return f"mini-batches have {values} numbers, more than {LARGEST_BATCH_VALUES}"
    if not _are_classes(targets, layers[-1].outputs):
        return f"targets are no class numbers below {layers[-1].outputs}"
    chain = ChainTrainer(layers, objective.layout.size_P, compiled)
    online, *offline = loops
    return Compiled(chain, online, offline[0] if offline else None)


def _loop_of(plan: Plan) -> Loop | str:
    found = one_loop(plan)
    if found is None:
        if any(isinstance(part, Steps) and part.is_more for part in plan):
            return "it knows plain steps: no weight decay, schedule or optimizer"
        return "it knows plans that are one loop of steps, and this method's is more"
    bounds = bounds_of(found.loop.projection)
    if bounds is None:
        projection = repr(found.loop.projection)
        return f"it knows boxes and no others of the sets to project onto ({projection:.60})"
    return Loop(found, bounds)


def tester_for(
    objective: Objective, where: torch.device, dtype: torch.dtype, example: tuple[Tensor, Tensor]
) -> ChainTester | None:
    """The same for outputs of models."""
    compiled = library()
    if compiled is None or where.type != "cpu" or dtype != torch.float32:
        return None
    layers = objective.chain(
        objective.layout.flatten(objective.to_test, dtype), *example, testing=True
    )
    return None if layers is None else ChainTester(layers, objective.layout.size_P, compiled)


def pool_of(samples: Samples, transform: Transform | None) -> SamplePool | None:
    """Samples as they are in memory, if each number of an input can be made by itself; None if only
    `transform` knows how.
    """
    inputs, targets = samples.inputs, samples.targets
    if not (inputs.is_contiguous() and (isinstance(transform, Scale) or transform is as_dtype)):
        return None
    if inputs.dtype == torch.uint8:
        return SamplePool(
            inputs,
            transform(torch.arange(256, dtype=torch.uint8), torch.float32).contiguous(),
            targets.contiguous(),
        )
    return (
        SamplePool(inputs, None, targets.contiguous())
        if inputs.dtype == torch.float32 and transform is as_dtype
        else None
    )


def _are_classes(targets: Tensor, classes: int) -> bool:
    return (
        targets.dtype == torch.int64
        and targets.ndim == 1
        and bool(((targets >= 0) & (targets < classes)).all())
    )
