"""What may keep a run from getting on, said before it starts: a glance at its settings and at the
curvature of a few samples.

And what holds it back, said before and after.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedbcd.algorithm.method import pulls_only
from fedbcd.algorithm.projection import on_bound
from fedbcd.compute.certify import sample_of
from fedbcd.compute.numbers import Numbers
from fedbcd.compute.smoothness import DeviceLoss
from fedbcd.data.federation import Federation
from fedbcd.protocol.clouds import Cloud, GraphCloud
from fedbcd.spec import RunSpec
from fedbcd.theory.bounds import device_step_limit, stable_step_limit
from fedbcd.theory.mixing import cut_off

SAMPLES, PRODUCTS, TOLERANCE = 16, 8, 0.1  # a glance: less work than two rounds of the paper's
MODELS = 100  # models looked at for weights on a border
# devices whose loss is looked at; only one where the model is not small
DEVICES = 3
SMALL_PARAMETERS = 200_000


def setting_warnings(federation: Federation, spec: RunSpec, numbers: Numbers) -> list[str]:
    """A sentence for each setting that may make the run diverge, or keeps it from agreeing; most
    runs have none.
    """
    alone = never_mixes(spec.cloud, len(federation.servers))
    found = (
        _graph(spec),
        alone,
        _available(federation, numbers),
        _penalty(numbers),
        _step(federation, numbers),
        *numbers.trainer.doubts,
    )
    return [text for text in found if text]


def at_the_border(numbers: Numbers, devices: Sequence[int]) -> str | None:
    """A sentence if weights sit on the border of the set that was asked for, in the models of some
    of these devices or the global ones.
    """
    projection, p, z_1F = numbers.method.projection, numbers.size_P, numbers.global_VF()[:1]
    if on_bound(projection, z_1F[:, :p]) is None:
        return None  # before personal models are fetched from wherever they are kept
    chosen = sample_of(devices, MODELS)
    personal = numbers.method.keeps_personal and bool(chosen)
    there = torch.tensor(chosen, device=z_1F.device)
    x_NP = (numbers.personal_NF.index_select(0, there) if personal else z_1F)[:, :p]
    held = on_bound(projection, x_NP)
    count = 0 if held is None else int(held.sum())
    if not count:
        return None
    whose = f"the models of {len(chosen)} devices" if personal else "the global model"
    return (
        f"{count:,} of {x_NP.numel():,} weights ({count / x_NP.numel():.1%}) of {whose} sit on the"
        f" border of the set that was asked for, {projection!r:.80}, which may hold them back; a"
        " wider set, or none, lets them go on"
    )


def _graph(spec: RunSpec) -> str | None:
    """Servers that never hear of others, Assumption 1(ii)."""
    if not isinstance(spec.cloud, GraphCloud):
        return None
    matrices = spec.cloud.mixing
    edges = {
        (n, m)
        for matrix in matrices
        for n, row in enumerate(matrix)
        for m, a in enumerate(row)
        if a > 0
    }
    parts = cut_off(len(matrices[0]), edges)
    if len(parts) == 1:
        return None
    return (
        f"the mixing graph is disconnected: servers {parts[1]} never hear of servers {parts[0]}, so"
        " nothing makes them agree; add an edge"
    )


def never_mixes(cloud: Cloud, servers: int) -> str | None:
    """A sentence if the cloud waits for one of several servers: a mix of one is none."""
    if getattr(cloud, "first", servers) > 1 or servers == 1:
        return None
    return (
        f"the {cloud.name} cloud with first=1 never mixes: none of the {servers} servers hears of"
        " another; use first=2 or more"
    )


def _available(federation: Federation, numbers: Numbers) -> str | None:
    """More available devices than any server has."""
    wanted, most = numbers.method.available, max(map(len, federation.servers))
    if wanted is None or wanted <= most:
        return None
    return (
        f"available={wanted:g}, but no server has more than {most} devices: all of them are"
        f" available in each round; use available <= {most}, or leave it out for 0.8 of the members"
    )


def _penalty(numbers: Numbers) -> str | None:
    """FedBCD-I's penalty steps x <- x - gamma_i (x - z) take x - z times 1 - gamma_i."""
    largest = float(numbers.bound.penalty_N.max())
    if pulls_only(numbers.method.plan) and largest > 2:
        return (
            f"penalty={largest:g}: each of FedBCD-I's penalty steps ends {largest - 1:.3g} times as"
            " far from the server's model as it began, on its other side; use a penalty of at"
            " most 1"
        )
    return None


def _step(federation: Federation, numbers: Numbers) -> str | None:
    """eta_x against the largest L_i + gamma_i seen at the start, on a few devices. Curvature often
    falls later: it may go well.
    """
    method, start, gamma_N = numbers.method, numbers.global_VF()[0], numbers.bound.penalty_N
    if method.first_steps is None:
        return None
    if method.first_steps is not None and method.first_steps.optimizer is not None:
        return None  # the bound is of steps along the gradient
    if pulls_only(method.plan):
        gamma_N = torch.zeros_like(gamma_N)  # its penalty has steps of its own
    seen = {}
    for device in _looked_at(gamma_N, numbers.size_P):
        try:
            with torch.random.fork_rng(devices=[]):
                loss = DeviceLoss(federation, numbers.trainer.objective, device, start, SAMPLES)
                seen[device] = loss.curvature(start[: numbers.size_P], PRODUCTS, TOLERANCE).high
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            continue  # no second derivatives here: nothing can be said
    finite = {device: high for device, high in seen.items() if math.isfinite(high)}
    if not finite:
        return None
    worst = max(finite, key=lambda device: finite[device] + float(gamma_N[device]))
    high, gamma = finite[worst], float(gamma_N[worst])
    limit = stable_step_limit(max(high + gamma, 1e-30), method.momentum)
    if method.device_step <= limit:
        return None
    return (
        f"device_step={method.device_step:g} may be too large: on"
        f" {min(SAMPLES, federation.sizes[worst])} samples of device {worst} at the start the"
        f" curvature is L={high:.3g}, with gamma={gamma:g}; while it is so, steps beyond"
        f" {limit:.3g} grow, and Assumption 4(i) asks for at most"
        f" {device_step_limit(max(high, 0.0), gamma):.3g} (see 'fedbcd check')"
    )


def _looked_at(gamma_N: Tensor, size: int) -> list[int]:
    """The device with the largest penalty, and some more, evenly spaced, where that is cheap."""
    steepest = int(gamma_N.argmax())
    return (
        [steepest]
        if size > SMALL_PARAMETERS
        else [steepest, *(d for d in sample_of(range(len(gamma_N)), DEVICES) if d != steepest)][
            :DEVICES
        ]
    )
