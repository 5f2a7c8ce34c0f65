"""The federations of the cases, as plain tensors that are the same on every machine and with every
version of torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

DEVICES, SERVERS, CLASSES, FEATURES, HIDDEN = 12, 3, 3, 19, 17


@dataclass(frozen=True)
class Given:
    """What a federation is made of; `transform` and `metric` by their names."""

    model: Callable[[], nn.Module] | nn.Module
    devices: list[tuple[Tensor, Tensor]]
    servers: int | list[list[int]]
    test: tuple[Tensor, Tensor] | None
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    transform: str = "default"
    metric: str = "accuracy"
    augment: int | None = None  # padding of FlipCrop
    partitioned: bool = False  # devices own positions of one pool


def integers(count: int, key: int, below: int) -> np.ndarray:
    """Numbers 0 .. below - 1 by a hash of their places."""
    h = np.arange(count, dtype=np.uint64) + np.uint64(key * 1_000_003 + 1)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        h = (h ^ (h >> np.uint64(30))) * np.uint64(factor)
    return ((h >> np.uint64(33)) % np.uint64(below)).astype(np.int64)


def values(shape: tuple[int, ...], key: int) -> Tensor:
    """Numbers between -1 and 1, multiples of 1/512: exact in every dtype that counts."""
    flat = integers(int(np.prod(shape)), key, 1025) - 512
    return torch.from_numpy(flat.reshape(shape)).to(torch.float32) / 512


def filled(module: nn.Module) -> nn.Module:
    """With parameters that do not come from torch's generator."""
    with torch.no_grad():
        for key, parameter in enumerate(module.parameters()):
            parameter.copy_(values(tuple(parameter.shape), 900 + key) / 2)
    return module


def chain() -> nn.Module:
    """Compiled code trains it in float32."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def bent() -> nn.Module:
    """Nothing but torch trains it."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def normed() -> nn.Module:
    """With buffers."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def dropping() -> nn.Module:
    """With random numbers of its own."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Dropout(0.25), nn.Linear(HIDDEN, CLASSES)
    )


def convolving() -> nn.Module:
    """For small pictures."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 25, CLASSES),
    )


def regressing() -> nn.Module:
    """One number comes out."""
    return nn.Linear(FEATURES, 1)


def frozen() -> nn.Module:
    """Its first layer is not trained."""
    module = chain()
    for parameter in module[0].parameters():  # type: ignore[index, union-attr]
        parameter.requires_grad_(False)
    return module


MODELS = {f.__name__: f for f in (chain, bent, normed, dropping, convolving, regressing, frozen)}
TALL = {"uneven": [[0, 5, 7, 9], [1, 2, 3, 4, 6], [8, 10, 11]]}


def labels(inputs: Tensor, key: int, own: int | None) -> Tensor:
    """The class whose row of whole numbers fits best; each device has a row of its own added.
    Exact, since all is whole.
    """
    whole = (inputs.reshape(len(inputs), -1).double() * 512).round().to(torch.int64)
    truth = torch.from_numpy(integers(whole.shape[1] * CLASSES, key, 21).reshape(-1, CLASSES) - 10)
    if own is not None:
        truth = truth + torch.from_numpy(
            integers(truth.numel(), 5000 + own, 15).reshape(truth.shape) - 7
        )
    return (whole @ truth).argmax(1)


@cache
def given(name: str) -> Given:
    """One of the federations: a model's name, or one of the kinds below."""
    model = {
        "bytes": "chain",
        "drawn": "chain",
        "uneven": "bent",
        "module": "bent",
        "untested": "bent",
        "pool": "bent",
    }.get(name, name)
    shape = (2, 5, 5) if model == "convolving" else (FEATURES,)
    inputs = [values((15 + i, *shape), i) for i in range(DEVICES)]
    tested = values((60, *shape), 77)
    targets = [labels(x, 100, i) for i, x in enumerate(inputs)]
    test_targets = labels(tested, 100, None)
    servers = TALL.get(name, SERVERS)
    make = MODELS[model] if name == "drawn" else partial(_made, model)
    if name in ("bytes", "convolving"):
        pairs = [(_bytes(x), y) for x, y in zip(inputs, targets, strict=True)]
        padding = 1 if name == "convolving" else None
        return Given(
            make, pairs, servers, (_bytes(tested), test_targets), transform="scale", augment=padding
        )
    if name == "regressing":
        pairs = [(x, (x[:, :3].sum(1, keepdim=True) * (i + 1)) / 8) for i, x in enumerate(inputs)]
        test = (tested, tested[:, :3].sum(1, keepdim=True))
        return Given(make, pairs, servers, test, loss=nn.functional.mse_loss, metric="squared")
    pairs = list(zip(inputs, targets, strict=True))
    test = None if name == "untested" else (tested, test_targets)
    return Given(
        _made(model) if name == "module" else make, pairs, servers, test, partitioned=name == "pool"
    )


def _made(model: str) -> nn.Module:
    return filled(MODELS[model]())


def _bytes(x: Tensor) -> Tensor:
    return ((x + 1) * 127).to(torch.uint8)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric: the higher, the nearer."""
    return -((outputs - targets) ** 2).mean(-1).to(torch.float64)
