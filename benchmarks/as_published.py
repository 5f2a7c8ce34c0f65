"""The paper's experiment as its authors' public code does it, as far as its facts are known: a
method of its own, written from a list of these facts, in NumPy.

What differs from the paper's text, and from `fedbcd paper`:

- one momentum buffer (0.9, heavy ball) for all devices: it runs on from device to device
- weight decay 1e-4, and no set X
- the penalty is gamma |x - z|^2, so its gradient is twice that of the text (FedBCD 1, FedProx 5)
- eta_z is 0.5 (1 - 1e-4)^round, in the mean form
- arrivals and steps take Exp(mean 0.5) both
- FedBCD-I: a device goes on offline until its counter exceeds 4, so five times; on the
  asynchronous cloud counter, penalty steps and their number are those of the device that the
  offline loop ended with, not of the device in contact

As in the text, for want of a fact: FedAvg without momentum, FedBCD-I's penalty steps of 0.2,
1 to 5 mini-batches of 32, step 0.005, split, model and measure.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SIZES = (784, 128, 64, 10)
SERVERS, MEMBERS, AVAILABLE, OFFLINE_LIMIT = 10, 10, 8, 4
STEP, BATCH, MOMENTUM, DECAY, SERVER_STEP, DELAY = 0.005, 32, 0.9, 1e-4, 0.5, 0.5
PENALTY = {"FedAvg": 0.0, "FedProx": 5.0, "FedBCD": 1.0, "FedBCD-I": 0.2}


@dataclass(frozen=True)
class Published:
    """One run: what is asked for."""

    algorithm: str  # FedAvg, FedProx, FedBCD or FedBCD-I
    diversity: int
    active: int = 3
    first: int = 0  # B; 0: Sync-cloud
    rounds: int | None = None
    until_clock: float | None = None
    looks: int = 20


class Network:
    """The MLP on flat parameters: its mean gradient on a batch, and its answers."""

    def __init__(self) -> None:
        self.parts: list[tuple[slice, slice, tuple[int, int]]] = []
        end = 0
        for i, o in pairwise(SIZES):
            weights, bias = slice(end, end + i * o), slice(end + i * o, end + i * o + o)
            self.parts.append((weights, bias, (o, i)))
            end = bias.stop
        self.size = end

    def initial(self, draw: np.random.Generator) -> Array:
        """As torch draws linear layers."""
        flat = np.empty(self.size, np.float32)
        for weights, bias, (_, i) in self.parts:
            bound = i**-0.5
            for part in (weights, bias):
                flat[part] = draw.uniform(-bound, bound, part.stop - part.start)
        return flat

    def outputs(self, flat: Array, x: Array) -> list[Array]:
        layers = [x]
        for weights, bias, shape in self.parts:
            x = layers[-1] @ flat[weights].reshape(shape).T + flat[bias]
            layers.append(x if bias.stop == self.size else np.maximum(x, 0))
        return layers

    def gradient(self, flat: Array, x: Array, y: Array) -> Array:
        """Of the mean cross-entropy."""
        layers = self.outputs(flat, x)
        d = np.exp(layers[-1] - layers[-1].max(1, keepdims=True))
        d /= d.sum(1, keepdims=True)
        d[np.arange(len(y)), y] -= 1
        d /= len(y)
        found = np.empty_like(flat)
        for k in reversed(range(len(self.parts))):
            weights, bias, shape = self.parts[k]
            found[weights], found[bias] = (d.T @ layers[k]).ravel(), d.sum(0)
            if k:
                d = (d @ flat[weights].reshape(shape)) * (layers[k] > 0)
        return found


class Training:
    """All devices, and the one optimiser that trains them in turn."""

    def __init__(self, spec: Published, inputs: Array, targets: Array, own: list[Array], seed: int):
        self.spec, self.inputs, self.targets, self.own = spec, inputs, targets, own
        self.draw = np.random.default_rng(seed)
        self.net = Network()
        z = self.net.initial(self.draw)
        self.z = np.tile(z, (SERVERS, 1))
        self.x = np.tile(z, (SERVERS * MEMBERS, 1))
        self.buffer = np.zeros_like(z)
        self.momentum = 0.0 if spec.algorithm == "FedAvg" else MOMENTUM
        self.offline = np.zeros(len(self.x), int)
        self.server_step = SERVER_STEP
        self.k: dict[int, int] = {}  # of the devices that are in a phase
        self.leftover = (0, 1)  # the device that the offline loop ended with, and its K

    def steps(self) -> int:
        return int(self.draw.integers(1, 6))

    def train(self, i: int, steps: int, penalty: float, z: Array) -> None:
        x = self.x[i]
        for _ in range(steps):
            batch = self.draw.choice(self.own[i], BATCH, replace=False)
            g = self.net.gradient(x, self.inputs[batch], self.targets[batch])
            g += DECAY * x
            if penalty:
                g += 2 * penalty * (x - z)
            self.buffer *= self.momentum
            self.buffer += g
            x -= STEP * self.buffer

    def train_offline(self, devices: list[int]) -> None:
        for i in devices:
            self.leftover = (i, self.steps())
            if self.offline[i] <= OFFLINE_LIMIT:
                self.train(i, self.leftover[1], 0.0, self.z[0])
                self.offline[i] += 1

    def activate(self, i: int, steps: int) -> None:
        """What a device does in contact with its server."""
        name, z = self.spec.algorithm, self.z[i // MEMBERS]
        if name == "FedBCD-I":
            who, steps = self.leftover if self.spec.first else (i, steps)
            self.offline[who] = 0
            for _ in range(steps):
                self.x[who] -= PENALTY[name] * (self.x[who] - z)
            return
        if name != "FedBCD":
            self.x[i] = z
        self.train(i, steps, PENALTY[name], z)

    def mix(self, servers: list[int], active: list[int]) -> None:
        """The cloud's step, on the mean of the models of those who count; on the Sync-cloud of all
        servers together.
        """
        w, name = self.z[servers].mean(0), self.spec.algorithm
        if name in ("FedAvg", "FedProx"):
            self.z[:] = self.x[active].mean(0)
            return
        for group in [servers] if not self.spec.first else [[n] for n in servers]:
            at = [i for i in range(len(self.x)) if i // MEMBERS in group]
            counted = [i for i in at if i in active] if name == "FedBCD-I" else at
            self.z[group] = w - self.server_step * (w - self.x[counted].mean(0))
        self.server_step *= 1 - 1e-4

    # ---------------------------------------------------------------------------------------------
    def rounds(self) -> Iterator[tuple[int, float]]:
        """Plays round after round; the clock after each."""
        now, number = 0.0, 0
        heap: list[tuple[float, int]] = []
        phase: dict[int, list[int]] = {}
        needed = self.spec.first or SERVERS
        for n in range(SERVERS):
            self._open(n, 0.0, heap, phase)
        while True:
            if self.spec.algorithm == "FedBCD-I":
                busy = {i for devices in phase.values() for i in devices} if self.spec.first else ()
                self.train_offline([i for i in self._available() if i not in busy])
            ready = [heapq.heappop(heap) for _ in range(needed)]
            now, number = max(now, *(end for end, _ in ready)), number + 1
            servers = [n for _, n in ready]
            active = [i for n in servers for i in phase.pop(n)]
            for i in active:
                self.activate(i, self.k[i])
            self.mix(servers, active)
            for n in servers:
                self._open(n, now, heap, phase)
            yield number, now

    def _available(self) -> list[int]:
        return [
            n * MEMBERS + int(i)
            for n in range(SERVERS)
            for i in self.draw.permutation(MEMBERS)[:AVAILABLE]
        ]

    def _open(self, n: int, now: float, heap: list[Any], phase: dict[int, list[int]]) -> None:
        members = n * MEMBERS + np.arange(MEMBERS)
        if self.spec.algorithm == "FedBCD-I":
            members = self.draw.permutation(members)[:AVAILABLE]
        arrival = self.draw.exponential(DELAY, len(members))
        chosen = np.argsort(arrival)[: self.spec.active]
        ends = []
        for c in chosen:
            self.k[int(members[c])] = k = self.steps()
            ends.append(arrival[c] + k * self.draw.exponential(DELAY))
        phase[n] = [int(members[c]) for c in chosen]
        heapq.heappush(heap, (now + max(ends), n))


def accuracies(run: Training, test: tuple[Array, Array]) -> tuple[float, float, float]:
    """Global: mean over servers; personal: mean over devices, each on all test images of its
    labels; and the mean of the worst tenth of the devices.
    """
    inputs, targets = test
    order = np.argsort(targets, kind="stable")
    inputs, targets = inputs[order], targets[order]

    def right(flat: Array, labels: Array) -> Array:
        at = np.isin(targets, labels)
        return np.asarray(run.net.outputs(flat, inputs[at])[-1].argmax(1) == targets[at])

    one = run.spec.first == 0
    everything = np.unique(targets)
    of_z = [right(z, everything).mean() for z in (run.z[:1] if one else run.z)]
    shared = run.spec.algorithm in ("FedAvg", "FedProx")
    of_x = sorted(
        right(run.z[0] if shared else x, np.unique(run.targets[own])).mean()
        for x, own in zip(run.x, run.own, strict=True)
    )
    return float(np.mean(of_z)), float(np.mean(of_x)), float(np.mean(of_x[: len(of_x) // 10]))


def played(run: Training, test: tuple[Array, Array], should_stop: Any) -> dict[str, Any] | None:
    """The columns of a history; None: stopped before the end."""
    spec, table = run.spec, [(0, 0.0, *accuracies(run, test))]
    end, done = spec.rounds or spec.until_clock or 0, 0
    for number, now in run.rounds():
        at = number if spec.rounds else now
        if int(at * spec.looks / end) > done or at >= end:
            done = int(at * spec.looks / end)
            table.append((number, now, *accuracies(run, test)))
        if at >= end:
            break
        if should_stop():
            return None
    names = ("round", "clock", "global_accuracy", "personal_accuracy", "worst_decile")
    return dict(zip(names, map(list, zip(*table, strict=True)), strict=True))
