"""Other people's methods, naive and in float64: what the examples must come to. They share nothing
with the package but the address of a mini-batch (`oracle.address`), and read who did what from an
event log.
"""

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

import fedbcd as fb
import oracle
from fedbcd.spec import RunSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES, SIZE, BATCH = 8, 12, 8
Vector = np.ndarray[Any, np.dtype[np.float64]]


def example(name: str) -> ModuleType:
    """A module of `examples`, found as a user's own is."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def lines(servers: int = 2) -> fb.Federation:
    """Linear regression in three numbers, a bias among them."""
    chance = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(SIZE, 2, generator=chance), torch.randn(SIZE, 1, generator=chance) + i % 3)
        for i in range(DEVICES)
    ]
    return fb.Federation(Line, nn.functional.mse_loss, data, servers)


def Line() -> nn.Module:
    """The model."""
    return nn.Linear(2, 1)


STEP, ETA = 0.1, 0.9
CASES = ("scaffold", "fedbuff", "own_availability")


def own(case: str, **changes: Any) -> RunSpec:
    """A run with what an example brings, by object."""
    theirs: Any = example(case)
    if case == "scaffold":
        spec = RunSpec(theirs.Scaffold(step=STEP, eta=ETA))
    elif case == "fedbuff":
        spec = RunSpec(theirs.FedBuff(step=STEP, eta=ETA, at_once=3), fb.AsyncCloud(first=2))
    else:
        algorithm = fb.FedBCD(device_step=STEP, server_step=ETA, batch=BATCH)
        spec = RunSpec(algorithm, theirs.Turns(0.25), availability=theirs.Shifts())
    return spec.changed({"active": 2, "looks": 1, **changes})


class Naive:
    """One run, from its log; `z` is by handle."""

    def __init__(self, federation: fb.Federation, folder: Path) -> None:
        self.federation = federation
        module = federation.make_model(0).double()
        start = torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()
        self.start = np.asarray(start, dtype=np.float64)
        self.z: dict[str, Vector] = {f"z/{n}/0": self.start for n in range(8)} | {"z/0": self.start}
        self.home = {i: n for n, own in enumerate(federation.servers) for i in own}
        self.log = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]

    def happened(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Events and commands in order: their names, on whom, and what they say."""
        for line in self.log:
            if "on" in line:
                number = int(line["on"].partition("/")[2] or -1)
                for part in (line["event"], *line["do"]):
                    ((name, says),) = part.items()
                    yield name, number, says

    def gradient(self, x: Vector, device: int, session: int, k: int) -> Vector:
        """Of mean squared error on a mini-batch."""
        owned = self.federation.owned(device).numpy()
        at = [
            oracle.below(oracle.address(0, oracle.BATCH, device, session, k, r), SIZE)
            for r in range(BATCH)
        ]
        inputs = self.federation.pool.inputs.double().numpy()[owned[at]]
        targets = self.federation.pool.targets.double().numpy()[owned[at]]
        wrong = inputs @ x[:2] + x[2] - targets[:, 0]
        return np.append(2 * inputs.T @ wrong, 2 * wrong.sum()) / BATCH


def scaffold(run: Naive, step: float, eta: float) -> Vector:
    """SCAFFOLD, option II."""
    work: dict[int, dict[str, Any]] = {}
    c, c_i = np.zeros(3), {i: np.zeros(3) for i in range(DEVICES)}
    sent: dict[int, tuple[Vector, Vector]] = {}
    counted: list[int] = []
    for name, number, says in run.happened():
        if name == "Train":
            work[number] = {**says, "c": c}
        elif name == "Trained":
            z, old = run.z[work[number]["model"]], c_i[number]
            y, c_then = z, work[number]["c"]
            for k in range(says["steps"]):
                g = run.gradient(y, number, work[number]["session"], k)
                y = y - step * (g - old + c_then)
            c_i[number] = old - c_then + (z - y) / (says["steps"] * step)
            sent[number] = (y - z, c_i[number] - old)
        elif name == "Absorb":
            counted.append(says["device"])
        elif name == "StepGlobal":
            dy, dc = (sum(sent[i][part] for i in counted) for part in (0, 1))
            run.z[says["result"]] = run.z[says["model"]] + eta * dy / len(counted)
            c, counted = c + dc / DEVICES, []
            z = run.z[says["result"]]
    return z[None]


def fedbuff(run: Naive, step: float, eta: float) -> Vector:
    """FedBuff; the age of an update is by a count of its server's steps."""
    begun: dict[int, tuple[int, dict[str, Any]]] = {}
    made: dict[int, int] = defaultdict(int)
    sent: dict[int, Vector] = {}
    buffer: dict[int, list[Vector]] = defaultdict(list)
    for name, number, says in run.happened():
        if name == "Train":
            begun[number] = (made[run.home[number]], says)
        elif name == "Trained":
            told = begun[number][1]
            x = z = run.z[told["model"]]
            for k in range(says["steps"]):
                x = x - step * run.gradient(x, number, told["session"], k)
            sent[number] = x - z
        elif name == "Absorb":
            age = made[number] - begun[says["device"]][0]
            buffer[number].append(sent[says["device"]] / (1 + age) ** 0.5)
        elif name == "MixModels":
            mean = sum(run.z[model] for model in says["models"]) / len(says["models"])
            run.z |= dict.fromkeys(says["results"], mean)
        elif name == "StepModel":
            some, made[number] = buffer.pop(number), made[number] + 1
            run.z[says["result"]] = run.z[says["mixed"]] + eta * sum(some) / len(some)
    return np.stack([run.z[f"z/{n}/{made[n]}"] for n in range(len(run.federation.servers))])


def own_availability(run: Naive, step: float, eta: float) -> Vector:
    """FedBCD whose two servers keep three quarters of their model in a mix."""
    x, before = (dict.fromkeys(range(DEVICES), run.start) for _ in range(2))
    copies = {n: dict.fromkeys(own, run.start) for n, own in enumerate(run.federation.servers)}
    work: dict[int, dict[str, Any]] = {}
    latest: dict[int, Vector] = {}
    for name, number, says in run.happened():
        if name == "Train":
            work[number] = says
        elif name == "Trained":
            z = run.z[work[number]["model"]]
            for k in range(says["steps"]):
                ex = x[number] + 0.9 * (x[number] - before[number])
                g = run.gradient(ex, number, work[number]["session"], k) + (ex - z)
                x[number], before[number] = ex - step * g, x[number]
        elif name == "Absorb":
            copies[number][says["device"]] = x[says["device"]]
        elif name == "MixModels":
            a, b = (run.z[model] for model in says["models"])
            mixed = (0.75 * a + 0.25 * b, 0.25 * a + 0.75 * b)
            run.z |= dict(zip(says["results"], mixed, strict=True))
        elif name == "StepModel":
            w, mean = run.z[says["mixed"]], sum(copies[number].values()) / len(copies[number])
            latest[number] = run.z[says["result"]] = w - eta * (w - mean)
    return np.stack([latest[n] for n in sorted(latest)])


ORACLES: dict[str, Callable[[Naive, float, float], Vector]] = {
    "scaffold": scaffold,
    "fedbuff": fedbuff,
    "own_availability": own_availability,
}
