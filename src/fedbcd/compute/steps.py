"""The steps of the cloud from sums and models: eqs. (5) and (6) in float64, rounded once.
Simulation and deployment compute with these.

Shapes: V servers, B servers that mix, F values of a model, U values of an upload.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.method import Bound
from fedbcd.protocol.clouds import Weights

Counted = tuple[float, int, int]  # weight and number of those who count, and number of members


def stepped_globally(
    bound: Bound, z: Tensor, total_VU: Tensor, counted: Counted, iterations: int
) -> Tensor:
    """Sync-cloud, eq. (5): K_z steps of the one global model towards all servers' devices
    together, each in float64 and rounded once.
    """
    total, dtype = total_VU.sum(0), z.dtype
    for _ in range(iterations):
        z = bound.stepped(z.double(), total, *counted).to(dtype)
    return z


def mixed_models(models: Sequence[Tensor], results: int, weights: Weights | None) -> list[Tensor]:
    """Eq. (6a): w_n for the servers of a mix; without weights all get the mean."""
    z_BF = torch.stack([*models]).double()
    if weights is None:
        w_BF = cloud_step.mean(z_BF).expand(results, -1)
    else:
        w_BF = cloud_step.mix(z_BF, torch.tensor(weights, dtype=torch.float64, device=z_BF.device))
    return [w.to(models[0].dtype) for w in w_BF]
