"""Sessions in compiled code, where there is some for the model: what of the engine's it takes, and
where it leaves the models.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbcd.algorithm.device import Contact, Rows
from fedbcd.algorithm.fused.library import (
    ChainTester,
    ChainTrainer,
    Models,
    Outcome,
    Pool,
    Sessions,
    bounds_of,
    library,
)
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.projection import Projection
from fedbcd.compute.workers import Workers
from fedbcd.data.federation import Transform, as_dtype
from fedbcd.data.samples import Scale

# numbers of a mini-batch; beyond, it is no longer the overhead that takes the time, and every
# thread keeps it twice
LARGEST = 2**22


def fused_for(
    objective: Objective,
    projection: Projection,
    start: Tensor,
    example: tuple[Tensor, Tensor],
    targets: Tensor,
    samples: int,
) -> ChainTrainer | str:
    """Compiled code that trains these models, or why there is none: it works on a CPU, in float32.

    example: inputs and targets as the model takes them; targets: those of all samples; samples: in
    the largest mini-batch.
    """
    compiled = library()
    if compiled is None:
        return "nothing was compiled at installation, or FEDBCD_FUSED=0 asks to do without"
    if start.device.type != "cpu" or start.dtype != torch.float32:
        dtype = str(start.dtype).removeprefix("torch.")
        return f"it works on a CPU in float32, and this run is in {dtype} on {start.device.type}"
    if bounds_of(projection) is None:
        return f"it knows boxes and no others of the sets to project onto ({projection!r:.60})"
    layers = objective.chain(start, *example)
    if layers is None:
        return "model and loss are no chain of linear layers, ReLU and mean cross-entropy"
    if samples * layers[0].inputs > LARGEST:
        return f"mini-batches have {samples * layers[0].inputs} numbers, more than {LARGEST}"
    if not _are_classes(targets, layers[-1].outputs):
        return f"targets are no class numbers below {layers[-1].outputs}"
    return ChainTrainer(layers, objective.layout.size_P, compiled)


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


def pool_of(inputs: Tensor, targets: Tensor, transform: Transform | None) -> Pool | None:
    """Samples as they are in memory, if each number of an input can be made by itself; None if only
    `transform` knows how.
    """
    if not (inputs.is_contiguous() and (isinstance(transform, Scale) or transform is as_dtype)):
        return None
    if inputs.dtype == torch.uint8:
        return Pool(
            inputs,
            transform(torch.arange(256, dtype=torch.uint8), torch.float32).contiguous(),
            targets.contiguous(),
        )
    return (
        Pool(inputs, None, targets.contiguous())
        if inputs.dtype == torch.float32 and transform is as_dtype
        else None
    )


def _are_classes(targets: Tensor, classes: int) -> bool:
    return (
        targets.dtype == torch.int64
        and targets.ndim == 1
        and bool(((targets >= 0) & (targets < classes)).all())
    )


class InPlace(NamedTuple):
    """Models that are rows of the tables of all models, and stay there; copies of x may be kept,
    before and after.
    """

    device_N: Tensor
    before_NP: Tensor | None
    after_NP: Tensor | None


class FusedSession:
    """The sessions of some devices, by all workers together. New models come in memory of their
    own, unless `in_place`.
    """

    in_place: InPlace | None = None

    def __init__(
        self,
        chain: ChainTrainer,
        steps: list[int],
        sessions: Callable[[], Sessions],
        penalty_N: Tensor,
        workers: Workers,
    ) -> None:
        self._chain = chain
        self._steps = steps
        self._sessions = sessions
        self._penalty_N = penalty_N
        self._workers = workers
        self.outcome: Outcome | None = None

    def aspg(
        self,
        rows: Rows,
        anchor_NP: Tensor | None,
        step: float,
        momentum: float,
        projection: Projection,
    ) -> Rows:
        """Eq. (4)."""
        return self._train(
            rows, self._sessions(), anchor_NP, projection, step=step, momentum=momentum
        )

    def penalty_steps(
        self, rows: Rows, anchor_NP: Tensor, projection: Projection, momentum: Contact
    ) -> Rows:
        """Algorithm 2, lines 14-18."""
        return self._train(rows, Sessions(self._steps), anchor_NP, projection, contact=momentum)

    def _train(
        self,
        rows: Rows,
        sessions: Sessions,
        anchor_NP: Tensor | None,
        projection: Projection,
        **settings: Any,
    ) -> Rows:
        models, bounds = self._models(rows), bounds_of(projection)
        assert bounds is not None
        self.outcome = self._chain.train(
            models, sessions, anchor_NP, self._penalty_N, self._workers, bounds=bounds, **settings
        )
        return Rows(models.new_x, models.new_prev)

    def went_wrong(self, losses: list[Tensor]) -> bool:
        """Whether something is not finite; then `losses` gets what is known of each step."""
        assert self.outcome is not None
        if not self.outcome.finite:
            losses += self.outcome.losses_NK.T
        return not self.outcome.finite

    def _models(self, rows: Rows) -> Models:
        if self.in_place is not None:
            return Models(*rows, *rows, *self.in_place)
        return Models(*rows, torch.empty(rows.x_NP.shape), torch.empty(rows.x_NP.shape))
