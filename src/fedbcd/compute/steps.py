"""The steps of the cloud from sums and models: eqs. (5) and (6) in float64, rounded once.
Simulation and deployment compute with these.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.variants import Algorithm
from fedbcd.protocol.clouds import Weights


def stepped(
    algorithm: Algorithm, mixed: Tensor, total: Tensor, weight: float, dtype: torch.dtype
) -> Tensor:
    """Eqs. (5) and (6b) in float64, rounded once. With nobody to count, z = w."""
    if weight == 0.0:
        return mixed.to(dtype)
    if algorithm.server_step_form == "absolute":
        z = cloud_step.server_step_absolute(mixed, total, weight, algorithm.server_step)
    else:
        z = cloud_step.server_step(mixed, total / weight, algorithm.server_step)
    return z.to(dtype)


def stepped_globally(
    algorithm: Algorithm,
    z: Tensor,
    total_VF: Tensor,
    weights: Sequence[float],
    iterations: int,
    dtype: torch.dtype,
) -> Tensor:
    """Sync-cloud, eq. (5): K_z steps of the one global model towards all servers' devices
    together.
    """
    total, weight = total_VF.sum(0), sum(weights)
    z = z.double()
    for _ in range(iterations):
        z = stepped(algorithm, z, total, weight, dtype).double()
    return z.to(dtype)


def mixed_models(models: Sequence[Tensor], results: int, weights: Weights | None) -> list[Tensor]:
    """Eq. (6a): w_n for the servers of a mix; without weights all get the mean."""
    z_BF = torch.stack([*models]).double()
    if weights is None:
        w_BF = cloud_step.mean(z_BF).expand(results, -1)
    else:
        w_BF = cloud_step.mix(z_BF, torch.tensor(weights, dtype=torch.float64, device=z_BF.device))
    return [w.to(models[0].dtype) for w in w_BF]
