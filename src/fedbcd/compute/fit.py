"""Whether model, loss, transform and augmentation fit the data: tried on a few samples before
anything runs. What does not fit is a sentence, with the remedy where it is known.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedbcd.algorithm.augment import Augment
from fedbcd.algorithm.objective import Loss, Objective
from fedbcd.algorithm.trees import Tree, leaves, mapped, shapes
from fedbcd.config import shown
from fedbcd.data.federation import Transform
from fedbcd.errors import ConfigError, DataError
from fedbcd.own import calling

FITS = "use a model and a loss that fit the data"


def ready(transform: Transform, augment: Augment | None, raw: Tree, dtype: torch.dtype) -> Tree:
    """Inputs as the model gets them."""
    about, takes = f"on inputs of shape {shapes(raw)}", "it takes inputs and a dtype"
    first = leaves(raw)[0]
    if augment is not None:
        hashes = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        remedy = "use one for such inputs, or none"
        with calling("augment={} fails {}", shown(augment), about, remedy=remedy):
            changed = augment.apply(raw, hashes)
        if not isinstance(changed, Tensor) or changed.shape != raw.shape:
            raise ConfigError(
                f"augment={shown(augment)} changes the shape {about}; it must return inputs of the"
                " same shape"
            )
    remedy = f"{takes}, and returns inputs, such as lambda inputs, dtype: inputs.to(dtype) / 255"
    with calling("the transform fails {}", about, remedy=remedy):
        found = transform(raw, dtype)
    if not isinstance(raw, Tensor) and isinstance(found, Mapping | tuple):
        return found
    if not isinstance(found, Tensor) or found.shape[:1] != first.shape[:1]:
        gives = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"the transform gives {gives} for {len(first)} samples; {remedy}")
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise ConfigError("the transform makes values that are not finite; it may divide by 0")
    return found


def check_fit(
    objective: Objective, flat: Tensor, inputs: Tree, targets: Tensor, labels: Tensor
) -> list[str]:
    """Refuse a model or a loss that fails on these samples, or on the extremes of these labels;
    returns what is doubtful.
    """
    outputs = _outputs(objective, flat, inputs, targets)
    check_labels(objective.loss, outputs, targets, labels)
    value = _tried_loss(objective.loss, outputs, targets)
    for wrong, says in (
        (not isinstance(value, Tensor), f"returns {type(value).__name__}; let it return a tensor"),
        (
            isinstance(value, Tensor) and value.numel() != 1,
            f"returns shape {_shape(value)}; let it return the mean over the batch"
            ' (reduction="mean")',
        ),
        (
            isinstance(value, Tensor) and not value.requires_grad,
            "has no gradient; leave .item(), .detach() and .numpy() out",
        ),
        (isinstance(value, Tensor) and not bool(value.isfinite().all()), "is not finite at x(0)"),
    ):
        if wrong:
            raise ConfigError(f"the loss {says}")
    p = objective.layout.size_P
    with calling("the gradient fails", remedy=FITS), torch.random.fork_rng(devices=[]):
        batch = mapped(lambda t: t[None], inputs)
        objective.gradients_one_by_one(flat[None, :p], flat[None, p:], batch, targets[None])
    return _doubts(objective.loss, outputs, targets)


def _outputs(objective: Objective, flat: Tensor, inputs: Tree, targets: Tensor) -> Any:
    p, layout = objective.layout.size_P, objective.layout
    remedy = FITS
    if not isinstance(inputs, Tensor):
        remedy = "it gets them by name, or one after another"
    elif not inputs.is_floating_point():
        remedy = f"{inputs.dtype} is left as it is, for tokens; give inputs.float() if it is none"
    elif inputs.dtype != flat.dtype:
        remedy = f"the transform returns {inputs.dtype}; use the dtype that it is given"
    with (
        calling("the model fails on inputs of shape {}", _shape(inputs), remedy=remedy),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
    ):
        params = layout.parameters_of(flat[:p].detach().requires_grad_(True))
        outputs, _ = objective.outputs(params, layout.buffers_of(flat[p:]), inputs, targets)
    if isinstance(outputs, Tensor) and not outputs.requires_grad:
        raise ConfigError(
            "the model's outputs have no gradient; leave .detach(), .item() and .numpy() out of its"
            " forward()"
        )
    return outputs


def _tried_loss(loss: Loss, outputs: Any, targets: Tensor) -> Any:
    """Also refused: outputs and targets of which every pair is compared, not each with its own."""
    what = f"the loss fails on outputs of {_kind(outputs)} and targets of {_kind(targets)}"
    with warnings.catch_warnings(), calling("{}", what, remedy=_remedy(loss, outputs, targets)):
        warnings.filterwarnings("error", "Using a target size", UserWarning)
        value = loss(outputs, targets)
        number = isinstance(value, Tensor) and value.numel() == 1
        column = number and isinstance(outputs, Tensor) and outputs.shape != targets.shape
        if column and targets.is_floating_point() and outputs.numel() == targets.numel() > 1:
            given = torch.arange(len(targets)).to(outputs)  # the same numbers on both sides
            of_each = given.reshape(-1, *[1] * (outputs.ndim - 1)).expand_as(outputs)
            target = of_each.reshape(targets.shape).to(targets)
            each = [float(loss(of_each[k : k + 1], target[k : k + 1])) for k in range(len(given))]
            mean = sum(each) / len(each)
            if not math.isclose(float(loss(of_each, target)), mean, rel_tol=1e-2, abs_tol=1e-6):
                raise ValueError("it compares every output with every target")
    return value


def check_labels(
    loss: Loss, outputs: Any, targets: Tensor, labels: Tensor, whose: str = ""
) -> None:
    """Refuse labels, somewhere in the data, that the loss has no output for; `targets` are of the
    outputs. On the CPU: a GPU does not survive them.
    """
    whole = not (targets.is_floating_point() or targets.dtype == torch.bool)
    if not (whole and isinstance(outputs, Tensor)):
        return
    with torch.no_grad():
        least, largest = int(labels.min()), int(labels.max())
        known, first = outputs.detach().cpu()[:1], targets.cpu()[:1]
        if _failure(loss, known, torch.zeros_like(first)):
            return  # for another reason, which is said elsewhere
        for end in (least, largest):
            if reason := _failure(loss, known, torch.full_like(first, end)):
                raise ConfigError(
                    f"labels{whose} are {least} to {largest}, and the loss fails on {end} with"
                    f" outputs of shape {tuple(known.shape[1:])} ({reason});"
                    f" {_renumber(least, largest, known.shape[1] if known.ndim == 2 else 0)}"
                )


@contextmanager
def labels_fit(targets: Tensor) -> Iterator[None]:
    """A label of data that are read when they are needed, of which there is no output, is said."""
    try:
        yield
    except IndexError as error:
        raise DataError(
            f"targets of {int(targets.min())} to {int(targets.max())} have come, and the model or"
            f" the loss fails on them ({error}); number labels from 0, one for each output"
        ) from None


def _renumber(least: int, largest: int, outputs: int) -> str:
    if least > 0 and largest - least < outputs:
        return f"number labels from 0: targets - {least}"
    if 0 < outputs <= largest:
        return f"give the model {largest + 1} outputs, or number labels from 0"
    return "number labels from 0, one for each output"


def _failure(loss: Callable[..., Any], *given: Any) -> str:
    try:
        loss(*given)
    except Exception as error:  # noqa: BLE001  whatever their loss does
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def _doubts(loss: Loss, outputs: Any, targets: Tensor) -> list[str]:
    """What works and yet is seldom meant."""
    if not isinstance(outputs, Tensor):
        return []
    with torch.no_grad():
        one = float(loss(outputs[:1], targets[:1]))
        two = float(loss(outputs[[0, 0]], targets[[0, 0]]))
        labels = not targets.is_floating_point() and outputs.ndim == 2 and outputs.shape[1] > 1
        rise = float(loss(outputs + 1, targets) - loss(outputs, targets)) if labels else math.nan
        logarithms = _sum_to_one(outputs.exp())
        probabilities = bool((outputs >= 0).all()) and _sum_to_one(outputs)
    found = {
        "the loss is a sum: of a sample that comes twice it is twice as large, so steps grow with"
        ' the batch; use the mean (reduction="mean")': abs(one) > 1e-6
        and math.isclose(two, 2 * one, rel_tol=1e-3),
        "the loss falls as all outputs grow, without an end: nll_loss is for log-probabilities; use"
        " cross_entropy, or end the model with nn.LogSoftmax(1)": not logarithms
        and math.isclose(rise, -1, rel_tol=1e-3),
        "the model gives probabilities to a loss that takes any numbers and makes them such, so its"
        " gradients are small; leave the softmax out": probabilities and abs(rise) < 1e-4,
    }
    return [says for says, doubtful in found.items() if doubtful]


def _sum_to_one(outputs: Tensor) -> bool:
    return outputs.ndim == 2 and bool((outputs.sum(1) - 1).abs().max() < 1e-4)


def _remedy(loss: Loss, outputs: Any, targets: Tensor) -> str:
    """What makes them fit, where that can be seen."""
    if not isinstance(outputs, Tensor):
        return "let the model return a tensor, or the loss take what it returns"
    whole, alike = not targets.is_floating_point(), outputs.shape == targets.shape
    labels = targets.ndim == 1 and outputs.ndim == 2 and outputs.shape[1] > 1
    column = outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1
    of_labels = loss is nn.functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
    for holds, remedy in (
        (not whole and labels, "labels are whole numbers: targets.long()"),
        (targets.dtype == torch.bool and labels, "labels are whole numbers: targets.long()"),
        (whole and alike and targets.ndim > 1, "labels are numbers: targets.argmax(1)"),
        (whole and targets.ndim == 2 and targets.shape[1] == 1, "use targets.squeeze(1)"),
        (
            of_labels and column and not whole,
            "cross-entropy is for labels, whole numbers; of numbers take the squared error:"
            ' nn.MSELoss(), in a job file loss = "mse"',
        ),
        (column and not whole, "use targets[:, None], or end the model with nn.Flatten(0)"),
        (column, "use targets.float()[:, None]"),
        (whole and alike, "use targets.float()"),
    ):
        if holds:
            return remedy
    return FITS


def _shape(value: Any) -> Any:
    if isinstance(value, Mapping | tuple):
        return ", ".join(value) if isinstance(value, Mapping) else f"{len(value)} inputs"
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _kind(value: Any) -> str:
    return f"{_shape(value)} ({value.dtype})" if isinstance(value, Tensor) else f"{_shape(value)}"
