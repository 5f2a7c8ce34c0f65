"""The steps of the cloud from sums and models: eqs. (5) and (6) in float64, rounded once.
Simulation and deployment compute with these.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbcd.algorithm import cloud as cloud_step
from fedbcd.algorithm.variants import Algorithm
from fedbcd.protocol.clouds import Cloud, GraphCloud
from fedbcd.protocol.messages import MixModels, ModelRef


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


def mixing_matrices(cloud: Cloud, device: torch.device) -> list[Tensor]:
    """The matrices a_nm that are used in turn; none for clouds that take plain means."""
    return (
        [torch.tensor(m, dtype=torch.float64, device=device) for m in cloud.mixing]
        if isinstance(cloud, GraphCloud)
        else []
    )


def mixed_models(
    command: MixModels, models: Sequence[Tensor], mixing: Sequence[Tensor]
) -> dict[ModelRef, Tensor]:
    """Eq. (6a): w_n for the servers of a mix, by handle."""
    z_BF = torch.stack([*models]).double()
    if mixing:
        weights = mixing[command.round % len(mixing)]
        chosen = torch.tensor(command.servers, device=weights.device)
        w_BF = cloud_step.mix(z_BF, weights[chosen][:, chosen])
    else:
        w_BF = cloud_step.mean(z_BF).expand(len(command.results), -1)
    return {handle: w.to(models[0].dtype) for handle, w in zip(command.results, w_BF, strict=True)}
