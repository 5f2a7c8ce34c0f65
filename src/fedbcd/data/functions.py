"""By what a loss and a metric are known again: their names, and what they answer to outputs that
are the same everywhere. Source text would not do: it changes with versions of Python, and hides
what a function closes over.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.trees import outputs_of
from fedbcd.data.federation import Federation
from fedbcd.data.measures import Measure, name_of

SAMPLES = 64  # whose targets are taken
DIGITS = 9  # of the answer


def functions_of(federation: Federation, module: nn.Module) -> dict[str, str]:
    """The loss and the metric of a federation, as a record names them."""
    some = torch.arange(min(SAMPLES, len(federation.pool)))
    targets = federation.pool.take(some)[1]
    shape = _shape_of_outputs(federation, module)

    def named(function: Any) -> str:
        if isinstance(function, Measure):
            return f"{function.name} {_answer(function.statistics, shape, targets)}".rstrip()
        name = name_of(getattr(function, "func", function))  # of a partial one
        return f"{name} {_answer(function, shape, targets)}".rstrip()

    metrics = federation.metrics or (federation.metric,)
    return {"loss": named(federation.loss), "metric": "; ".join(map(named, metrics))}


def _shape_of_outputs(federation: Federation, module: nn.Module) -> tuple[int, ...] | None:
    """Of one sample."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            inputs, _ = federation.pool.take(torch.tensor([0]))
            found = outputs_of(module.eval(), federation.transform(inputs, dtype))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError):
        return None
    return tuple(found.shape[1:])


def _answer(function: Any, shape: tuple[int, ...] | None, targets: Tensor) -> str:
    """Empty where it does not answer outputs that are all between 0.1 and 0.9."""
    if shape is None:
        return ""
    count = len(targets) * math.prod(shape)
    outputs = torch.arange(1, count + 1, dtype=torch.float64).sin() * 0.4 + 0.5
    given = targets.double() if targets.is_floating_point() else targets
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = torch.as_tensor(function(outputs.view(len(targets), *shape), given))
        return f"{float(found.double().mean()):.{DIGITS}g}"
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError):
        return ""
