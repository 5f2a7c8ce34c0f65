"""The mixing weights of a cloud, which may be somebody's own."""

from collections.abc import Sequence

import torch

from fedbcd.algorithm.cloud import check_doubly_stochastic
from fedbcd.config import convert
from fedbcd.errors import ConfigError
from fedbcd.own import calling, is_own
from fedbcd.protocol.clouds import Cloud, Weights


def weights_of(cloud: Cloud, round_: int, servers: Sequence[int]) -> Weights | None:
    """a_nm of a mix; of somebody else's cloud checked, whatever the round."""
    if not is_own(type(cloud)):
        return cloud.weights(round_, servers)
    where = f"cloud={cloud!r:.80}: weights({round_}, {servers!r:.40})"
    with calling("{} fails", where, remedy="it takes a round and the servers of its mix"):
        given = cloud.weights(round_, servers)
    if given is None:
        return None
    weights: Weights = convert(given, tuple[tuple[float, ...], ...], where)
    if {len(row) for row in weights} | {len(weights)} != {len(servers)}:
        raise ConfigError(
            f"{where} has rows of {[len(row) for row in weights]} numbers; {len(servers)} servers"
            f" need {len(servers)} rows of {len(servers)}"
        )
    try:
        check_doubly_stochastic(torch.tensor(weights, dtype=torch.float64))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return weights
