"""What is measured, as values. A measure is statistics of samples, which add, and what is made of
their sum.

Shapes: S samples, D statistics of each, L labels or outputs of a sample.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbcd.errors import ConfigError

Better = Literal["higher", "lower", "neither"]
Loss = Callable[[Tensor, Tensor], Tensor]
Found = Tensor | float
Metric = Callable[[Tensor, Tensor], Any]  # a tensor, a number, or a mapping of names to such
Statistics = Callable[[Tensor, Tensor], Tensor]
Finish = Callable[[Tensor, float], Found]
DIRECTIONS = ("higher", "lower", "neither")
IGNORED = -100  # a target that torch's losses leave out


@dataclass(frozen=True)
class Measure:
    """A measure of models. Its statistics add over samples, devices, shards and processes.

    name        what its columns are called after: global_NAME, personal_NAME ...
    statistics  of (outputs, targets) of S samples: (S,) or (S, D)
    finish      makes a value, or one for each column, of the sum of statistics (D,) and the number
                of samples; by default their mean
    better      "higher", "lower" or "neither"; or one of these for each column
    columns     of a measure with several values: what comes after its name
    whole       statistics are of all samples they are given together: each time those of a device,
                or of a label
    """

    name: str
    statistics: Statistics
    finish: Finish | None = None
    better: Better | tuple[Better, ...] = "higher"
    columns: tuple[str, ...] = ("",)
    whole: bool = False

    def __post_init__(self) -> None:
        for name in self.names:
            if not name.isidentifier():
                raise ConfigError(
                    f"a measure is called {name!r:.80}; columns are named after it, so use a word"
                    " of letters, digits and underscores, such as 'recall'"
                )
        given = self.better
        directions = (given,) * len(self.columns) if isinstance(given, str) else tuple(given)
        if len(directions) != len(self.columns) or not {*directions} <= {*DIRECTIONS}:
            raise ConfigError(
                f"the measure {self.name} has better={given!r:.80}; use"
                f' "higher", "lower" or "neither", or one for each of its columns'
                f" {', '.join(self.columns)}"
            )
        object.__setattr__(self, "better", directions)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its values."""
        return tuple("_".join(filter(None, (self.name, column))) for column in self.columns)

    @property
    def directions(self) -> dict[str, Better]:
        """Of each value, which is better."""
        return dict(zip(self.names, self.better, strict=True))  # type: ignore[arg-type]

    def of_samples(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(S, D), float64."""
        found = torch.as_tensor(self.statistics(outputs, targets))
        if found.shape[:1] != targets.shape[:1]:
            raise ValueError(
                f"it gives shape {tuple(found.shape)} for {len(targets)} samples; it must give a"
                " number for each"
            )
        return found.double().reshape(len(targets), -1)

    def sums(self, outputs: Tensor, targets: Tensor, sizes: Sequence[int]) -> Tensor:
        """Of consecutive stretches of samples, so long each: (stretches, D)."""
        if not self.whole:
            found = torch.split(self.of_samples(outputs, targets), list(sizes))
            return torch.stack([part.sum(0) for part in found])
        parts = zip(*(torch.split(each, list(sizes)) for each in (outputs, targets)), strict=True)
        return torch.stack([self.of_samples(*part).sum(0) for part in parts])

    def value(self, total: Tensor, count: float) -> tuple[float, ...]:
        """What the sum of the statistics of so many samples comes to."""
        found = total / count if self.finish is None else self.finish(total, count)
        values = torch.as_tensor(found).double().reshape(-1).tolist()
        if len(values) != len(self.columns):
            raise ConfigError(
                f"the measure {self.name} gives {len(values)} values for its {len(self.columns)}"
                " columns; name a column for each"
            )
        return tuple(values)

    def by_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The first value of each sample for itself, (S,)."""
        found = self.of_samples(outputs, targets)
        if self.finish is None:
            return found[:, 0]
        return torch.tensor([self.value(row, 1.0)[0] for row in found], dtype=torch.float64)

    @classmethod
    def of_metric(cls, metric: Metric, outputs: Tensor, targets: Tensor) -> Self:
        """A metric that gives these samples a score each, one score together, or a mapping of names
        to such.
        """
        found = metric(outputs, targets)
        keys = tuple(map(str, found)) if isinstance(found, Mapping) else ()
        name = "" if keys else name_of(metric)
        better: Any = getattr(metric, "better", "higher")
        if isinstance(better, Mapping):
            better = tuple(better.get(key, "higher") for key in keys)
        made = cls(
            name if name.isidentifier() or keys else "score",
            functools.partial(_scores, metric, keys),
            better=better,
            columns=keys or ("",),
            whole=True,
        )
        made.of_samples(outputs, targets)
        return made


def _scores(metric: Metric, keys: Sequence[str], outputs: Tensor, targets: Tensor) -> Tensor:
    """(S, keys): one score of all samples counts for each."""
    found, columns = metric(outputs, targets), []
    for part in [found[key] for key in keys] if keys else [found]:
        scores = torch.as_tensor(part, device=targets.device).double()
        if scores.ndim and len(scores) != len(targets):
            raise ValueError(
                f"it gives shape {tuple(scores.shape)} for {len(targets)} samples; it must give a"
                " number for each, one for all, or a mapping of names to such"
            )
        one = scores.expand(len(targets)) if scores.ndim == 0 else None
        columns.append(scores.reshape(len(targets), -1).mean(1) if one is None else one)
    return torch.stack(columns, 1)


def name_of(metric: Metric) -> str:
    """What a metric is called."""
    return str(getattr(metric, "__name__", type(metric).__name__))


# ------------------------------------------------------------------------------------------------
# labels
def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sample: 1 where the largest output is the target's, else 0; of several targets, the share
    of those that are right.
    """
    if targets.is_floating_point():
        raise ValueError(
            f"accuracy compares labels, and targets are {targets.dtype}; labels are whole numbers,"
            " targets.long(), and numbers are measured by mse or r2"
        )
    hits = hits_of(outputs, targets)
    return hits if hits.ndim == 1 else _share(hits, targets != IGNORED)


def hits_of(outputs: Tensor, targets: Tensor, axis: int | None = None) -> Tensor:
    """1 where the largest output is the target's, float64. `axis` of classes, where both could
    be.
    """
    if targets.ndim == 1 and outputs.ndim == 2:
        return (outputs.argmax(-1) == targets).to(torch.float64)
    if len(outputs) != len(targets):  # tokens of all samples one after another
        outputs = outputs.reshape(*targets.shape, -1)
    of_axis = {1: (0, *range(2, outputs.ndim)), -1: tuple(range(outputs.ndim - 1))}
    fitting = [k for k, kept in of_axis.items() if _shape(outputs, kept) == targets.shape]
    if not fitting:
        raise ValueError(
            f"outputs are of shape {tuple(outputs.shape)}, targets of {tuple(targets.shape)}; one"
            " axis of the outputs must be that of the classes, the others those of the targets"
        )
    chosen = axis if axis in fitting else fitting[-1]
    return (outputs.argmax(chosen) == targets).to(torch.float64)


def _shape(outputs: Tensor, axes: Sequence[int]) -> torch.Size:
    return torch.Size(outputs.shape[axis] for axis in axes)


def _share(hits: Tensor, known: Tensor) -> Tensor:
    return (hits * known).flatten(1).sum(1) / known.flatten(1).sum(1)


def token_accuracy(axis: int | None = None) -> Measure:
    """The share of tokens that are right, over those that are not to be ignored."""

    def statistics(outputs: Tensor, targets: Tensor) -> Tensor:
        known = targets != IGNORED
        hits = hits_of(outputs, targets, axis) * known
        return torch.stack((hits.flatten(1).sum(1), known.flatten(1).sum(1).double()), 1)

    return Measure("accuracy", statistics, lambda total, _: total[0] / total[1])


def binary_accuracy(threshold: float) -> Measure:
    """One output for two classes, 0 and 1."""

    def statistics(outputs: Tensor, targets: Tensor) -> Tensor:
        right = (fitting(outputs, targets) > threshold) == (targets > 0.5)
        return right.double().flatten(1).mean(1) if right.ndim > 1 else right.double()

    return Measure("accuracy", statistics)


def f1(threshold: float = 0.0) -> Measure:
    """Of several labels at once: 2 hits / (2 hits + missed + wrong), over all labels together
    (micro), and the mean over labels (macro; without those that neither occur nor are predicted).
    An output above the threshold predicts its label.
    """

    def statistics(outputs: Tensor, targets: Tensor) -> Tensor:
        said, true = fitting(outputs, targets) > threshold, targets > 0.5
        counts = torch.stack((said & true, said ^ true), 1)
        return counts.double().flatten(1)

    def finish(total: Tensor, _: float) -> Tensor:
        hits, errors = total.view(2, -1)
        by_label = 2 * hits / (2 * hits + errors)
        micro = 2 * hits.sum() / (2 * hits.sum() + errors.sum())
        return torch.stack((micro, by_label.nanmean()))

    return Measure("f1", statistics, finish, columns=("micro", "macro"))


# ------------------------------------------------------------------------------------------------
# numbers
def fitting(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs of shape (N, 1) for targets of shape (N,), and the other way round."""
    if outputs.numel() != targets.numel():
        raise ValueError(
            f"outputs are of shape {tuple(outputs.shape)}, targets of {tuple(targets.shape)}"
        )
    return outputs.reshape(targets.shape)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sample: the mean of (output - target)^2; lower is better."""
    difference = fitting(outputs, targets).double() - targets
    return difference.square().flatten(1).mean(1) if targets.ndim > 1 else difference.square()


mse.better = "lower"  # type: ignore[attr-defined]  # what a metric of one's own may say, too


def mse_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of (output - target)^2 over a batch."""
    return nn.functional.mse_loss(fitting(outputs, targets), targets)


def _r2_statistics(outputs: Tensor, targets: Tensor) -> Tensor:
    true = targets.double().reshape(len(targets), -1)
    error = fitting(outputs, targets).double().reshape(true.shape) - true
    return torch.stack((error.square(), true, true.square()), 1).flatten(1)


def _r2(total: Tensor, count: float) -> Tensor:
    """1 - (sum of squared errors / sum of squares about the mean), the mean over outputs."""
    errors, true, squares = total.view(3, -1)
    about = squares - true.square() / count
    noise = squares * 1e-12  # of a sum in float64
    return torch.where(about > noise, 1 - errors / about, torch.nan).mean()


ACCURACY = Measure("accuracy", accuracy)
MSE = Measure("mse", mse, better="lower")
R2 = Measure("r2", _r2_statistics, _r2)
F1 = f1()
KNOWN: dict[str, Measure] = {"accuracy": ACCURACY, "mse": MSE, "r2": R2, "f1": F1}
BY_FUNCTION: dict[Metric, Measure] = {accuracy: ACCURACY, mse: MSE}


# ------------------------------------------------------------------------------------------------
# the loss
def loss_measure(loss: Loss, targets: Tensor) -> Measure:
    """The loss as a measure. One that is a mean over a batch is taken of each stretch of samples
    for itself.
    """
    if loss is F.cross_entropy and not targets.is_floating_point():
        if targets.ndim == 1 and not bool((targets == IGNORED).any()):
            by_sample = functools.partial(F.cross_entropy, reduction="none")
            return Measure("loss", by_sample, better="lower")
        return Measure("loss", _cross_entropy, _log_loss, better="lower")
    if loss is mse_loss:
        return Measure("loss", mse, better="lower")

    def statistics(outputs: Tensor, targets: Tensor) -> Tensor:
        found = loss(outputs, targets).double()
        return found.mean().expand(len(targets))  # a loss without reduction has a value per sample

    return Measure("loss", statistics, better="lower", whole=True)


def _of_module(outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    return torch.full((len(targets),), torch.nan)


# A module's own: of what it returns, so whoever tests takes it from there, batch by batch.
OWN_LOSS = Measure("loss", _of_module, better="lower")


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sums over the targets of a sample, and how many of them count."""
    found = F.cross_entropy(outputs, targets, reduction="none").double().reshape(len(outputs), -1)
    counted = (targets != IGNORED).double().reshape(len(outputs), -1)
    return torch.stack((found.sum(1), counted.sum(1)), 1)


def _log_loss(total: Tensor, _: float) -> Tensor:
    return total[0] / total[1]


# ------------------------------------------------------------------------------------------------
# which
OF_NUMBERS = {
    mse_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
}
THRESHOLDS: dict[Any, float] = {  # of losses that know of two classes by output
    F.binary_cross_entropy_with_logits: 0.0,
    F.multilabel_soft_margin_loss: 0.0,
    F.binary_cross_entropy: 0.5,
    nn.BCEWithLogitsLoss: 0.0,
    nn.MultiLabelSoftMarginLoss: 0.0,
    nn.BCELoss: 0.5,
}
CLASSES_FIRST = {F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss}


def fitting_measures(loss: Loss, targets: Tensor) -> tuple[Measure, ...]:
    """What fits a loss and these targets, where nobody says."""
    kind: Any = type(loss) if isinstance(loss, nn.Module) else loss
    several = targets.ndim > 1 and targets[:1].numel() > 1
    threshold = THRESHOLDS.get(kind)
    if threshold is None and targets.is_floating_point() and several and kind not in OF_NUMBERS:
        zeros_and_ones = bool(((targets == 0) | (targets == 1)).all())
        threshold = 0.0 if zeros_and_ones and kind not in CLASSES_FIRST else None
    if threshold is not None:
        return (f1(threshold),) if several else (binary_accuracy(threshold),)
    if targets.is_floating_point():
        return MSE, R2
    if targets.ndim == 1:
        return (ACCURACY,)
    return (token_accuracy(1 if kind in CLASSES_FIRST else -1),)


def chosen_measures(
    said: Sequence[Measure | Metric], outputs: Tensor, targets: Tensor
) -> tuple[Measure, ...]:
    """Measures and metrics as measures; `outputs` and `targets` are an example."""
    found: list[Measure] = []
    for each in said:
        if isinstance(each, Measure):
            each.value(each.sums(outputs, targets, [len(targets)])[0], len(targets))
        found.append(each if isinstance(each, Measure) else _of_metric(each, outputs, targets))
    names = [name for measure in found for name in measure.names]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two measures are called {name!r}; give fb.Measure(name, ...) another name"
            )
    return tuple(found)


def _of_metric(metric: Metric, outputs: Tensor, targets: Tensor) -> Measure:
    known = BY_FUNCTION.get(metric)
    return Measure.of_metric(metric, outputs, targets) if known is None else known
