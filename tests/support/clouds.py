"""A round of the cloud: the product's `mix` and `server_step`, as Algorithm 1 has them."""

import torch
from torch import Tensor

from fedbcd.algorithm.cloud import check_doubly_stochastic, mix, server_step


def cloud_round(
    z_VF: Tensor, weights_VV: Tensor, mean_personal_VF: Tensor, step: float, iterations: int = 1
) -> Tensor:
    """Algorithm 1, lines 16-23: K_z = `iterations` times, mix by a_nm, then step each server
    towards its own devices.
    """
    check_doubly_stochastic(weights_VV)
    for _ in range(iterations):
        z_VF = server_step(mix(z_VF, weights_VV), mean_personal_VF, step)
    return z_VF


def first_b_weights(servers: int, first: tuple[int, ...]) -> Tensor:
    """The mixing matrix of Async-cloud: a_nm = 1/B among the first B servers, a_nn = 1 for the
    others.
    """
    weights = torch.eye(servers, dtype=torch.float64)
    members = torch.tensor(first)
    weights[members[:, None], members[None, :]] = 1.0 / len(first)
    return weights
