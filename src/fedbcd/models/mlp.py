"""Fully connected networks."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int = 784, classes: int = 10, hidden: Sequence[int] = (128, 64)) -> nn.Module:
    """A multi-layer perceptron with ReLU; by default 784-128-64-10, 109,386 parameters, as the
    recipes read the paper's "three-layer neural network".
    """
    widths = [inputs, *hidden, classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def logistic(inputs: int = 784, classes: int = 10) -> nn.Module:
    """Multinomial logistic regression: one linear layer."""
    return mlp(inputs, classes, hidden=())
