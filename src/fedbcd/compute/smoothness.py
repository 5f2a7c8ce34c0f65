"""L_i, rho_i and sigma of a user's model on a user's data: Hessian-vector products on a sample of
devices, at a few points.

Shapes: N samples, P parameters.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbcd.algorithm.method import Method
from fedbcd.algorithm.objective import Objective
from fedbcd.algorithm.projection import Ball, Box, ours, projected
from fedbcd.algorithm.trees import Tree, mapped
from fedbcd.compute.batch import Trainer
from fedbcd.compute.certify import sample_of
from fedbcd.data.federation import Federation
from fedbcd.theory.assumptions import Bias, Smoothness
from fedbcd.theory.curvature import Curvature, curvature, softmax_smoothness

KINKS = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.Hardtanh,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool2d,
)
FEWEST_BATCHES, MOST_BATCHES, BIAS_SAMPLES = (
    32,
    512,
    16_384,
)  # on which the bias of gradients is measured: a part of the work for L_i
PRODUCTS = 40  # Hessian-vector products per device and point at most
START, TRAINED = "at the start", "after 30 steps"
RANDOM = "at a random point of X + zeta (X - X)"  # where gradients are taken
# never below 0
NONNEGATIVE = (
    nn.functional.cross_entropy,
    nn.functional.binary_cross_entropy_with_logits,
    nn.functional.mse_loss,
    nn.functional.l1_loss,
    nn.functional.huber_loss,
)


class DeviceLoss:
    """g_i of one device as a function of the flat parameters, with gradients and Hessian-vector
    products.
    """

    def __init__(
        self,
        federation: Federation,
        objective: Objective,
        device: int,
        flat: Tensor,
        most: int | None = None,
    ) -> None:
        """`most` samples of the device at most; `flat` is a model of the right size and dtype,
        whose buffers are used.
        """
        positions = federation.owned(device)[:most]
        self._objective = objective
        self._buffers = flat[objective.layout.size_P :]
        inputs, targets = federation.pool.take(positions)
        self.inputs = mapped(lambda t: t.to(flat.device), federation.transform(inputs, flat.dtype))
        targets = targets.to(flat.device)
        self.targets = targets.to(flat.dtype) if targets.is_floating_point() else targets

    @property
    def each(self) -> Tree:
        """Every sample as a batch of its own."""
        return mapped(lambda t: t[:, None], self.inputs)

    def value(self, x: Tensor) -> Tensor:
        """g_i(x)."""
        layout = self._objective.layout
        counters = {name: value.clone() for name, value in layout.counters.items()}
        state = {**layout.parameters_of(x), **layout.buffers_of(self._buffers.clone()), **counters}
        objective = self._objective
        outputs = objective.taken(objective.module, state, self.inputs, self.targets)
        return objective.loss(outputs, self.targets)

    def gradient(self, x: Tensor) -> Tensor:
        """grad g_i(x)."""
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.value(x), x)
        return gradient

    def curvature(
        self, x: Tensor, products: int, tolerance: float = 1e-3, seed: int = 0
    ) -> Curvature:
        """The ends of the Hessian's spectrum at x. The graph of the gradient is built once; each
        product goes through it backwards.
        """
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.value(x), x, create_graph=True)

        def product(v: Tensor) -> Tensor:
            # not `grad(gradient, x, v)`, the same bits: torch loads sympy to compare two shapes
            (result,) = torch.autograd.grad(gradient @ v, x, retain_graph=True)
            return result.detach()

        start = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        return curvature(product, start, products, tolerance)


def estimate(
    federation: Federation,
    method: Method,
    objective: Objective,
    start: Tensor,
    devices: int = 4,
    seed: int = 0,
) -> Smoothness:
    """Curvature of g_i on `devices` evenly spaced devices: at x(0), after 30 exact steps from
    there, and at a random point of where gradients are taken, which is X extended by momentum.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found: dict[str, dict[int, Curvature]] = {}
        chosen, gamma = (
            sample_of(range(federation.devices), devices),
            method.penalties(federation.devices),
        )
        for device in chosen:
            loss = DeviceLoss(federation, objective, device, start)
            x0, generator = (
                start[: objective.layout.size_P],
                torch.Generator().manual_seed(seed + device),
            )
            points = {START: x0, TRAINED: _trained(loss, method, x0, float(gamma[device]))}
            for where, x in (points | _random_point(method, x0, generator)).items():
                found.setdefault(where, {})[device] = loss.curvature(x, PRODUCTS)
    linear = _is_softmax_regression(objective.module, federation.loss)
    everyone = range(federation.devices) if linear else ()
    bounds = [
        softmax_smoothness(DeviceLoss(federation, objective, device, start).inputs)
        for device in everyone
    ]
    return Smoothness(
        found,
        bounds,
        convex=linear,
        kinks=any(isinstance(part, KINKS) for part in objective.module.modules()),
    )


@dataclass(frozen=True)
class Constants:
    """What the bounds of Theorem 1 hold of the costs beside L_i: on all devices where `bounded`,
    otherwise the largest that was seen on some.
    """

    gradient: float  # D_g
    excess: float  # Delta*
    sigma: float
    bounded: bool


def constants(
    federation: Federation,
    method: Method,
    objective: Objective,
    start: Tensor,
    known: Smoothness,
    spread: float,
    diameter: float,
) -> Constants:
    """D_g, Delta* and sigma: bounds for softmax regression, otherwise seen on the devices and at
    points of X such as those of L_i; `spread` is the sigma that was seen.
    """
    everyone = range(federation.devices)
    x0 = start[: objective.layout.size_P]
    steepest, excess, lengths = 0.0, 0.0, 0.0
    chosen = everyone if known.bounds else list(next(iter(known.seen.values())))
    for device in chosen:
        loss = DeviceLoss(federation, objective, device, start)
        if known.bounds:  # a sample's gradient is (s - e_y) x (a, 1), and ||s - e_y||^2 <= 2
            squares = loss.inputs.flatten(1).double().square().sum(1) + 1
            gradient = float((2 * squares).sqrt().mean())
            lengths = max(lengths, 2 * float(squares.mean()))
        else:
            gradient = max(
                float(torch.linalg.vector_norm(loss.gradient(x).double()))
                for x in _points(method, x0, device)
            )
        most = gradient * diameter
        if federation.loss in NONNEGATIVE:
            with torch.no_grad():
                most = min(most, float(loss.value(x0)))
        steepest, excess = max(steepest, gradient), excess + most
    return Constants(
        steepest,
        2 * excess * federation.devices / len(chosen),
        math.sqrt(lengths) if known.bounds else spread,
        bool(known.bounds),
    )


def _points(method: Method, x0: Tensor, seed: int) -> list[Tensor]:
    """x(0) and, where one can be drawn, another point of X."""
    drawn = _random_point(method, x0, torch.Generator().manual_seed(seed))
    return [x0, *(projected(method.projection, x) for x in drawn.values())]


def sigma(
    federation: Federation, objective: Objective, start: Tensor, devices: int = 4, most: int = 64
) -> float:
    """The square root of the largest E ||grad h - grad g_i||^2 over some devices, at x(0), from up
    to `most` samples each.
    """
    p = objective.layout.size_P
    worst = 0.0
    for device in sample_of(range(federation.devices), devices):
        data = DeviceLoss(federation, objective, device, start, most)
        n = len(data.targets)
        with torch.random.fork_rng(devices=[]):
            stack = start.expand(n, -1)
            each = objective.gradients_one_by_one(
                stack[:, :p], stack[:, p:], data.each, data.targets[:, None]
            ).gradient_NP.double()
        worst = max(worst, float((each - each.mean(0)).square().sum(1).mean()))
    return math.sqrt(worst)


def bias(
    federation: Federation, method: Method, objective: Objective, start: Tensor
) -> Bias | None:
    """Why mini-batch gradients are not known to be unbiased, with what many of them show on one
    device; None: they are.
    """
    reasons = _reasons(federation, method, objective, start)
    why = Bias(tuple(reasons), tuple(reasons.values()))
    if not reasons or objective.stochastic:
        return why if reasons else None
    device, p = sample_of(range(federation.devices), 1)[0], objective.layout.size_P
    trainer = Trainer(federation, method, objective, 0, start, max_batch=1)
    assert method.batch != "all"
    batches = max(FEWEST_BATCHES, min(MOST_BATCHES, BIAS_SAMPLES // method.batch))
    session = torch.arange(batches)
    drawn = trainer.batches_of(torch.full_like(session, device), session, 1)
    exact = trainer.exact_gradient(start, trainer.positions_of(device)).double()
    errors = []
    for k in range(batches):
        hashes = None if drawn.hashes is None else drawn.hashes[k]
        gradient = trainer.gradients(
            start[None, :p], start[None, p:], drawn.positions[k], hashes
        ).gradient_NP[0]
        errors.append(gradient.double() - exact)
    apart = (
        torch.stack(errors) @ torch.stack(errors).T
    )  # of two batches, so that the variance of neither adds to the bias
    apart = apart[~torch.eye(batches, dtype=torch.bool)]
    chance = math.sqrt(2 * float(apart.square().sum())) / len(apart)
    return replace(
        why,
        measured=math.sqrt(max(0.0, float(apart.mean()))),
        error=chance,
        gradient=float(exact.norm()),
    )


def _reasons(
    federation: Federation, method: Method, objective: Objective, start: Tensor
) -> dict[str, str]:
    """What keeps the mean of mini-batch gradients from being the gradient of g_i, and what would
    not.
    """
    if method.batch == "all":
        return {}  # of all samples, without augmentation
    found = {}
    if federation.augment is not None:
        name = getattr(federation.augment, "name", type(federation.augment).__name__)
        reason = (
            f"augmentation ({name}): gradients are those of changed samples, so their mean is not"
            " the gradient of g_i on the samples"
        )
        found[reason] = 'augment = "none"'
    data = DeviceLoss(federation, objective, 0, start, 8)
    two = mapped(lambda t: t[:2], data.inputs)
    objective.why_not_vectorised(start, two, data.targets[:2])
    if objective.stochastic:
        found["the forward pass draws random numbers (dropout), so g_i itself is random"] = (
            "no dropout"
        )
    elif any(isinstance(part, _BatchNorm) for part in objective.module.modules()):
        reason = (
            "batch normalisation: a sample's gradient depends on the others of its batch, so the"
            " mean over batches is not that of all"
        )
        found[reason] = "group normalisation"
    elif _are_coupled(objective, data, start):
        found["the gradient of a batch is not the mean of its samples' gradients"] = (
            "a loss that is the mean over samples"
        )
    return found


def _are_coupled(objective: Objective, data: DeviceLoss, start: Tensor) -> bool:
    """Whether the gradient of some samples together is another than the mean of theirs."""
    p, n = objective.layout.size_P, len(data.targets)
    stack = start.expand(n, -1)
    each = objective.gradients_one_by_one(
        stack[:, :p], stack[:, p:], data.each, data.targets[:, None]
    ).gradient_NP.double()
    together = data.gradient(start[:p]).double()
    return float((each.mean(0) - together).norm()) > 1e3 * torch.finfo(start.dtype).eps * float(
        each.norm(dim=1).mean()
    )


def _trained(
    loss: DeviceLoss, method: Method, start: Tensor, gamma: float, steps: int = 30
) -> Tensor:
    """Where exact steps of this device lead in a while: closer to the path of a run than any random
    point.
    """
    x = prev = start
    for _ in range(steps):
        ex = x + method.momentum * (x - prev)
        gradient = loss.gradient(ex) + gamma * (ex - start)
        prev, x = x, projected(method.projection, ex - method.device_step * gradient)
    return x


def _random_point(method: Method, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A point of X extended to x + zeta (x - y), x and y of X: drawn evenly for a box, from the
    surface for a ball; nothing for other sets.
    """
    u, projection = torch.rand(like.shape, generator=generator).to(like), ours(method.projection)
    if isinstance(projection, Box) and abs(projection.low) < float("inf") > abs(projection.high):
        beyond = method.momentum * (projection.high - projection.low)
        low, high = projection.low - beyond, projection.high + beyond
        return {RANDOM: low + (high - low) * u}
    if isinstance(projection, Ball):
        direction = torch.randn(like.shape, generator=generator).to(like)
        radius = (1 + 2 * method.momentum) * projection.radius
        return {RANDOM: direction / torch.linalg.vector_norm(direction) * radius}
    return {}


def _is_softmax_regression(module: nn.Module, loss: object) -> bool:
    """Whether g_i is multinomial logistic regression, so that it is convex with a known L_i."""
    parts = [part for part in module.modules() if not list(part.children())]
    linear = [part for part in parts if isinstance(part, nn.Linear)]
    flat = all(isinstance(part, nn.Linear | nn.Flatten | nn.Identity) for part in parts)
    return (
        loss is nn.functional.cross_entropy
        and len(linear) == 1
        and flat
        and isinstance(module, nn.Sequential | nn.Linear)
    )
