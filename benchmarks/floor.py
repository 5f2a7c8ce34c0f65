"""The floor on CPU: the same rounds with gradients written by hand in NumPy, one model in cache at
a time, nothing general.

Server work is included: sums in float64, the cloud step, the models written back.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
WIDTHS = (784, 128, 64, 10)
SIZE = sum(a * b + b for a, b in pairwise(WIDTHS))


def layers(flat: Array) -> list[Array]:
    """Weights and biases as views."""
    out, k = [], 0
    for a, b in pairwise(WIDTHS):
        out += [flat[k : k + a * b].reshape(b, a), flat[k + a * b : k + a * b + b]]
        k += a * b + b
    return out


def gradient(flat: Array, x: Array, y: npt.NDArray[np.int64], out: Array) -> None:
    """The gradient of the mean cross-entropy of the MLP, written into `out`."""
    w1, b1, w2, b2, w3, b3 = layers(flat)
    g1, c1, g2, c2, g3, c3 = layers(out)
    h1 = x @ w1.T
    h1 += b1
    np.maximum(h1, 0, out=h1)
    h2 = h1 @ w2.T
    h2 += b2
    np.maximum(h2, 0, out=h2)
    p = h2 @ w3.T
    p += b3
    p -= p.max(1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= np.float32(len(y))
    np.matmul(p.T, h2, out=g3)
    p.sum(0, out=c3)
    d2 = p @ w3
    d2 *= h2 > 0
    np.matmul(d2.T, h1, out=g2)
    d2.sum(0, out=c2)
    d1 = d2 @ w2
    d1 *= h1 > 0
    np.matmul(d1.T, x, out=g1)
    d1.sum(0, out=c1)


class Floor:
    """FedBCD, FedBCD-I and FedProx on the recipes' MLP."""

    def __init__(
        self,
        inputs: npt.NDArray[np.uint8],
        targets: npt.NDArray[np.int64],
        start: Array,
        devices: int,
        personal: bool,
    ) -> None:
        self.inputs = inputs.astype(np.float32) / np.float32(255)
        self.targets = targets
        rows = devices if personal else 1
        self.x = np.repeat(start[None], rows, 0)
        self.prev = self.x.copy()
        self.z = start.copy()
        self.total = rows * start.astype(np.float64)
        self.g, self.ex, self.step = (np.empty_like(start) for _ in range(3))

    def aspg(
        self, x: Array, prev: Array, batches: npt.NDArray[np.int64], gamma: float | None
    ) -> None:
        """K ASPG steps in place; `batches` has one row of positions per step."""
        g, ex, step = self.g, self.ex, self.step
        for rows in batches:
            np.subtract(x, prev, out=ex)
            ex *= np.float32(0.9)
            ex += x
            gradient(ex, self.inputs[rows], self.targets[rows], g)
            if gamma is not None:
                np.subtract(ex, self.z, out=step)
                step *= np.float32(gamma)
                g += step
            g *= np.float32(0.005)
            prev[:] = x
            np.subtract(ex, g, out=x)
            np.clip(x, -2, 2, out=x)

    def fedbcd(self, work: list[tuple[int, npt.NDArray[np.int64]]]) -> None:
        """Algorithm 1: every active device trains; the sum of all copies follows; z steps towards
        their mean.
        """
        for i, batches in work:
            before = self.x[i].astype(np.float64)
            self.aspg(self.x[i], self.prev[i], batches, 1.0)
            before -= self.x[i]
            self.total -= before
        mean = self.total / len(self.x)
        self.z = (self.z - 0.5 * (self.z - mean)).astype(np.float32)

    def fedbcd_i(
        self, offline: list[tuple[int, npt.NDArray[np.int64]]], active: list[tuple[int, int]]
    ) -> None:
        """Algorithm 2: available devices train without the penalty, active ones step towards z."""
        for i, batches in offline:
            self.aspg(self.x[i], self.prev[i], batches, None)
        total = np.zeros(SIZE)
        for i, steps in active:
            x, prev = self.x[i], self.prev[i]
            for _ in range(steps):
                prev[:] = x
                np.subtract(x, self.z, out=self.step)
                self.step *= np.float32(0.2)
                x -= self.step
                np.clip(x, -2, 2, out=x)
            total += x
        self.z = (self.z - 0.5 * (self.z - total / len(active))).astype(np.float32)

    def fedprox(self, work: list[tuple[int, npt.NDArray[np.int64]]]) -> None:
        """Start from z without momentum, stay near it, average."""
        total = np.zeros(SIZE)
        x, prev = self.x[0], self.prev[0]
        for _, batches in work:
            x[:] = self.z
            prev[:] = self.z
            self.aspg(x, prev, batches, 5.0)
            total += x
        self.z = (total / len(work)).astype(np.float32)
