"""What will make a run diverge, said before it starts: a glance at its settings and at the curvature of a few samples."""

import math

import torch

from fedbcd.algorithm.variants import FedBCDI, penalties
from fedbcd.data.federation import Federation
from fedbcd.engines.settings import Settings
from fedbcd.engines.simulate.numbers import StackedNumbers
from fedbcd.engines.smoothness import DeviceLoss
from fedbcd.protocol.clouds import GraphCloud
from fedbcd.theory.bounds import device_step_limit, stable_step_limit
from fedbcd.theory.mixing import cut_off

SAMPLES, PRODUCTS, TOLERANCE = 16, 8, 0.1  # a glance: less work than two rounds of the paper's


def doubts(federation: Federation, settings: Settings, numbers: StackedNumbers) -> list[str]:
    """A sentence for each setting that will make the run diverge, or keep it from agreeing; most runs have none."""
    return [text for text in (_graph(settings), _penalty(federation, settings), _step(federation, settings, numbers)) if text]


def _graph(settings: Settings) -> str | None:
    """Servers that never hear of others, Assumption 1(ii)."""
    if not isinstance(settings.cloud, GraphCloud):
        return None
    matrices = settings.cloud.mixing
    edges = {(n, m) for matrix in matrices for n, row in enumerate(matrix) for m, a in enumerate(row) if a > 0}
    parts = cut_off(len(matrices[0]), edges)
    if len(parts) == 1:
        return None
    return f"the mixing graph is disconnected: servers {parts[1]} never hear of servers {parts[0]}, so they will not agree; add an edge"


def _penalty(federation: Federation, settings: Settings) -> str | None:
    """FedBCD-I's penalty steps x <- x - gamma_i (x - z) overshoot more each time beyond 2."""
    largest = float(penalties(settings.algorithm, federation.devices).max())
    if isinstance(settings.algorithm, FedBCDI) and largest > 2:
        return f"penalty={largest:g} makes FedBCD-I's penalty steps diverge, as any above 2 does; use a penalty of at most 1"
    return None


def _step(federation: Federation, settings: Settings, numbers: StackedNumbers) -> str | None:
    """eta_x against the curvature of one device at the start."""
    algorithm, start = settings.algorithm, numbers.global_NF()[0]
    gamma = 0.0 if isinstance(algorithm, FedBCDI) else float(penalties(algorithm, federation.devices)[0])
    try:
        with torch.random.fork_rng(devices=[]):
            loss = DeviceLoss(federation, numbers.trainer.objective, 0, start, SAMPLES)
            seen = loss.curvature(start[: numbers.size_P], PRODUCTS, TOLERANCE).high
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None  # a model without second derivatives: nothing can be said
    limit = stable_step_limit(max(seen + gamma, 1e-30), algorithm.momentum)
    if not (math.isfinite(seen) and algorithm.device_step > limit):
        return None
    return (
        f"device_step={algorithm.device_step:g} will diverge: device 0 has curvature L={seen:.3g} at the start, where steps "
        f"beyond {limit:.3g} grow; Assumption 4(i) asks for at most {device_step_limit(max(seen, 0.0), gamma):.3g} (see 'fedbcd check')"
    )
