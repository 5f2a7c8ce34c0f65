"""How far float32 may take a step of eq. (4) from the exact one, for a chain of linear layers,
whatever the processor.

The standard model (Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 and 3): an
operation gives its exact result times 1 + d with |d| <= U, the unit roundoff; a fused multiply-add
leaves one such d out. So a sum of n products is off by at most gamma(n) = n U / (1 - n U) times the
sum of their magnitudes, in whatever order it is taken. `expf` and `logf` are taken to be right to
`LIBM` units; good libraries stay below one.

A step is carried out in float64, and every result that float32 rounds gets a perturbation e with a
bound b on |e|, from the magnitudes at that place. Whatever is computed from x, say f, is then off
by at most sum |df/de| b: autograd gives df/de. That is the first order. What comes beyond it: an
output off by D changes a probability, and a slope of softmax, by a factor of at most e^(2 D) and
e^(4 D); products of two perturbations are smaller than one by the relative error of the results
between, for which `PRODUCTS` allows a hundredth; and float64's own roundings are 2^-29 times
smaller. Where an input of ReLU is so near to 0 that its error may change its sign, what comes back
there may be missing, or there instead of missing: a perturbation as large as itself.

The f that is asked for is the component of x along the difference that was found: if the difference
is explained by rounding, then so is that component. X comes last: an entry that float32 has at the
edge of X may have been anywhere beyond it, so the nearest such place counts. (Let d be the
difference before the projection and m the nearest. Every entry of m has the sign of that of d and
is no larger, so that |m|^2 = m.m <= m.d, and m.d is bounded as said.)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedbcd.algorithm.fused.chain import LinearLayer

U = 2.0**-24
# a hundred roundings of float64, of numbers up to 1: more than any test makes that allows so much
ROUNDED_64 = 100 * 2.0**-53
LIBM = 4
PRODUCTS = 1.01


def of_run(rounds: int, steps: int = 5) -> float:
    """How far float32 may take entries up to 1 in so many rounds of so many steps, where gradient
    steps do not magnify.

    A step is off by at most seven roundings of such numbers: three of eq. (4a), three of (4b), and
    the gradient's own, of which there are up to some dozens, times a step of at most a tenth, as
    one. Momentum .9 passes what it is off on to those that follow: 1 / (1 - .9) times in all.
    """
    return 7 * 10 * U * rounds * steps


def gamma(n: int) -> float:
    """The relative error of n roundings one upon the other."""
    return n * U / (1 - n * U)


class Rule(NamedTuple):
    """The numbers of eq. (4)."""

    step: float = 0.05
    momentum: float = 0.9
    low: float = -0.6
    high: float = 0.7

    def in_float32(self) -> "Rule":
        """As compiled code is given them."""
        return Rule(*torch.tensor(self, dtype=torch.float32).tolist())


class Given(NamedTuple):
    """What a step of one device begins with."""

    x: Tensor
    prev: Tensor
    anchor: Tensor | None
    penalty: float
    inputs: Tensor
    targets: Tensor


class Roundings:
    """Perturbations of the results of a computation, each with a bound on its magnitude."""

    def __init__(self) -> None:
        self.perturbations: list[Tensor] = []
        self.bounds: list[Tensor] = []
        self.beyond = PRODUCTS  # what the second order may add, as a factor

    def rounded(self, exact: Tensor, bound: Tensor) -> Tensor:
        """A result that float32 has up to this."""
        self.perturbations.append(torch.zeros_like(exact, requires_grad=True))
        self.bounds.append(bound.detach())
        return exact + self.perturbations[-1]

    def bound(self, scalar: Tensor) -> float:
        """How far all of them together can move it."""
        slopes = torch.autograd.grad(
            scalar, self.perturbations, retain_graph=True, allow_unused=True
        )
        pairs = zip(slopes, self.bounds, strict=True)
        return self.beyond * sum(
            float((slope.abs() * bound).sum()) for slope, bound in pairs if slope is not None
        )


class Forward(NamedTuple):
    """What each layer is given; which of its outputs may be on either side of 0; outputs of the
    last, and how far float32 may be from them.
    """

    inputs: list[Tensor]
    doubtful: list[Tensor]
    outputs: Tensor
    distance: Tensor  # in the norm of each sample


class Chain:
    """The layers at one point, with the roundings of what they compute."""

    def __init__(
        self, layers: Sequence[LinearLayer], flat: Tensor, error: Tensor, roundings: Roundings
    ) -> None:
        self.layers, self.flat, self.error, self.roundings = layers, flat, error, roundings

    def weight(self, layer: LinearLayer, of: Tensor | None = None) -> Tensor:
        """W, (outputs, inputs)."""
        return (self.flat if of is None else of)[layer.weight :][
            : layer.inputs * layer.outputs
        ].view(layer.outputs, layer.inputs)

    def bias(self, layer: LinearLayer, of: Tensor | None = None) -> Tensor:
        """b, or zeros."""
        flat = self.flat if of is None else of
        return (
            flat[layer.bias :][: layer.outputs]
            if layer.bias >= 0
            else flat.new_zeros(layer.outputs)
        )

    def forward(self, inputs: Tensor) -> Forward:
        """All layers, one after the other."""
        now, given, doubtful = inputs, [], []
        # of the inputs from those of float32, for each sample; ReLU and W magnify it by ||W|| at
        # most
        distance = now.new_zeros(len(now))
        for layer in self.layers:
            given.append(now)
            weight, bias = self.weight(layer), self.bias(layer)
            bound = gamma(layer.inputs + 1) * (now.abs() @ weight.abs().T + bias.abs())
            own = (
                (
                    bound
                    + now.abs() @ self.weight(layer, of=self.error).T
                    + self.bias(layer, of=self.error)
                )
                .detach()
                .norm(dim=1)
            )
            distance = PRODUCTS * (torch.linalg.matrix_norm(weight.detach(), 2) * distance + own)
            now = self.roundings.rounded(now @ weight.T + bias, bound)
            doubtful.append(now.detach().abs() <= distance[:, None])
            if layer.relu:
                now = self.roundings.rounded(now.relu(), doubtful[-1] * distance[:, None])
        self.roundings.beyond = PRODUCTS * math.exp(4 * float(distance.max()))
        return Forward(given, doubtful, now, distance)

    def cross_entropy(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The mean, and its derivatives by the outputs: (e^(o - most) / total - 1 at the target) /
        samples.
        """
        samples, classes = outputs.shape
        most, target = outputs.amax(1, keepdim=True), targets[:, None]
        powers = (outputs - most).exp()
        powers = self.roundings.rounded(powers, powers * U * (most - outputs + LIBM))
        total = powers.sum(1, keepdim=True)
        total = self.roundings.rounded(total, gamma(classes) * total)
        terms = (total.log(), most - outputs.gather(1, target))
        losses = self.roundings.rounded(
            terms[0] + terms[1], gamma(LIBM + 1) * (terms[0].abs() + 2 * terms[1].abs())
        )
        at_target = torch.nn.functional.one_hot(targets, classes)
        shares = powers / total
        derivatives = (
            self.roundings.rounded(shares - at_target, gamma(4) * shares + gamma(2) * at_target)
            / samples
        )
        return self.roundings.rounded(losses.mean(), U * losses.mean()), derivatives

    def back(self, layer: LinearLayer, derivatives: Tensor) -> Tensor:
        """By the inputs of a layer."""
        weight = self.weight(layer)
        return self.roundings.rounded(
            derivatives @ weight, gamma(layer.outputs) * derivatives.abs() @ weight.abs()
        )

    def gradient(
        self, layer: LinearLayer, derivatives: Tensor, inputs: Tensor, into: Tensor
    ) -> None:
        """By W and b."""
        bound = gamma(len(inputs))
        product = self.roundings.rounded(
            derivatives.T @ inputs, bound * derivatives.abs().T @ inputs.abs()
        )
        self.weight(layer, of=into).copy_(product)
        if layer.bias >= 0:
            into[layer.bias :][: layer.outputs] = self.roundings.rounded(
                derivatives.sum(0), bound * derivatives.abs().sum(0)
            )


class Step(NamedTuple):
    """The new x before the projection, and the loss before the step, in float64."""

    unprojected: Tensor
    loss: Tensor
    rule: Rule
    roundings: Roundings

    def times_the_bound(self, x: Tensor, loss: Tensor) -> float:
        """How far these are from it, as a multiple of the bound: at most 1 if there is only
        rounding between them.
        """
        if bool(((x < self.rule.low) | (x > self.rule.high)).any()):
            return math.inf
        exact, x = self.unprojected.detach(), x.double()
        nearest = torch.where(x == self.rule.low, exact.clamp(max=self.rule.low), x)
        nearest = torch.where(x == self.rule.high, exact.clamp(min=self.rule.high), nearest)
        return max(
            self._multiple(self.unprojected, nearest - exact),
            self._multiple(self.loss, loss.double() - self.loss.detach()),
        )

    def _multiple(self, of: Tensor, difference: Tensor) -> float:
        distance = float(difference.norm())
        return (
            distance / self.roundings.bound((difference / distance * of).sum()) if distance else 0.0
        )


def exact_step(layers: Sequence[LinearLayer], given: Given, rule: Rule) -> Step:
    """x <- P_X(ex - eta (gradient + gamma (ex - z))) at ex = x + zeta (x - x_prev), as `chain.c`
    rounds it.
    """
    rule, roundings = rule.in_float32(), Roundings()
    x, change = given.x.double(), given.x.double() - given.prev.double()
    ex = x + rule.momentum * change
    error = gamma(2) * rule.momentum * change.abs() + U * ex.abs()
    ex = roundings.rounded(ex, error)
    chain = Chain(layers, ex, error, roundings)
    inputs, doubtful, outputs, _ = chain.forward(given.inputs.double().flatten(1))
    loss, derivatives = chain.cross_entropy(outputs, given.targets)
    gradient = torch.zeros_like(ex)
    for at in reversed(range(len(layers))):
        chain.gradient(layers[at], derivatives, inputs[at], into=gradient)
        if at > 0:
            derivatives = chain.back(layers[at], derivatives)
            if layers[at - 1].relu:
                perhaps = derivatives.abs() * doubtful[at - 1]
                derivatives = roundings.rounded(derivatives * (inputs[at] > 0), perhaps)
    pull = (
        rule.step
        * given.penalty
        * ((given.anchor if given.anchor is not None else ex).double() - ex)
    )
    size = ex.abs() + rule.step * gradient.abs() + pull.abs()
    new = roundings.rounded(ex - rule.step * gradient + pull, gamma(5) * size)
    return Step(new, loss, rule, roundings)


def exact_outputs(
    layers: Sequence[LinearLayer], flat: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """What a model gives in float64, and how far float32 may be from it, in the norm of each
    sample.
    """
    chain = Chain(layers, flat.double(), torch.zeros(len(flat), dtype=torch.float64), Roundings())
    found = chain.forward(inputs.double().flatten(1))
    return found.outputs.detach(), found.distance
