"""Who talks to whom, and how fast that makes servers agree: Assumptions 1 and 3, and the matrix
convergence lemma.

A schedule is plain data: which servers were mixed in each round, and in which rounds each device
was active.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedbcd.errors import ConfigError

# of a round and the servers that it mixes: a row for each
Weights = Callable[[int, Sequence[int]], Sequence[Sequence[float]] | None]


@dataclass(frozen=True, slots=True)
class MixingRate:
    """|[Phi(t, s)]_nm - 1/|V|| <= theta beta^(t - s), for products Phi of t - s mixing matrices."""

    theta: float
    beta: float


def lemma_rate(least_weight: float, servers: int, rounds: int) -> MixingRate:
    """The matrix convergence lemma: theta = (1 - c/(4|V|^2))^-2, beta = (1 - c/(4|V|^2))^(1/q), c =
    `least_weight`, q = `rounds`.

    It needs a_nn >= c as well, which Assumption 3 does not say (docs/errata.md).
    """
    if not 0 < least_weight <= 1:
        raise ConfigError(
            f"c={least_weight} must be above 0 and at most 1: it is the smallest positive mixing"
            " coefficient"
        )
    if servers < 1 or rounds < 1:
        raise ConfigError(f"servers={servers} and q={rounds} must be 1 or more")
    base = 1.0 - least_weight / (4.0 * servers**2)
    return MixingRate(base**-2, base ** (1.0 / rounds))


@dataclass(frozen=True, slots=True)
class ScheduleMemory:
    """How long one schedule remembers: per round t, the largest over n of sum_l sum_m
    |[A(t-1)...A(l)]_nm - 1/|V||, l = 1..t-1.

    It takes the place of theta beta^k in the consensus lemma, before the lemma covers all schedules
    by the worst one.
    """

    memory: tuple[float, ...]


def schedule_memory(matrices: Sequence[Tensor]) -> ScheduleMemory:
    """The memory of a schedule with these mixing matrices A(0), A(1), ...; A(0) mixes equal starts
    and does not matter.
    """
    if not matrices:
        raise ConfigError("a schedule needs at least one mixing matrix")
    identity = torch.eye(len(matrices[0]), dtype=torch.float64)
    products = identity.new_empty(
        0, *identity.shape
    )  # A(t-1)...A(l), for every l that has not been forgotten
    memory = [0.0]
    for t in range(1, len(matrices)):
        deviation = (products - 1.0 / len(identity)).abs()
        memory.append(float(deviation.sum((0, 2)).max()) if len(products) else 0.0)
        products = matrices[t].double() @ torch.cat([products, identity[None]])
        forgotten = (products - 1.0 / len(identity)).abs().amax((1, 2)) < 1e-13
        products = products[~forgotten]
    return ScheduleMemory(tuple(memory))


def mixing_matrices(
    servers: int, mixes: Iterable[Sequence[int]], weights: Weights = lambda *_: None
) -> list[Tensor]:
    """One mixing matrix per round: `weights` (None: 1/B) among the servers that were mixed, 1 on
    the diagonal of the others.
    """
    matrices = []
    for t, first in enumerate(mixes):
        matrix = torch.eye(servers, dtype=torch.float64)
        chosen, among = torch.tensor(list(first)), weights(t, first)
        matrix[chosen[:, None], chosen[None, :]] = torch.tensor(
            1.0 / len(first) if among is None else among, dtype=torch.float64
        )
        matrices.append(matrix)
    return matrices


# ------------------------------------------------------------------------------------------------
# Assumption 1
def activation_period(rounds_active: Sequence[int], rounds: int) -> int | None:
    """p: the least number such that every p rounds in a row, of `rounds`, include an activation;
    None if there never was one.
    """
    if not rounds_active:
        return None
    marks = [-1, *sorted(set(rounds_active)), rounds]
    return max(later - earlier for earlier, later in pairwise(marks) if later > earlier)


def connection_period(servers: int, edges: Sequence[Sequence[tuple[int, int]]]) -> int | None:
    """q: the least number such that the union of the graphs of any q rounds in a row is strongly
    connected; None if not even all are.

    `edges` has the pairs (n, m) with a_nm > 0 of every round. With doubly stochastic weights a
    connected graph is strongly connected.
    """
    if servers == 1:
        return 1
    ends = [_end_of_connection(servers, edges, start) for start in range(len(edges))]
    if not ends or ends[0] is None:
        return None
    # a window that reaches the last round unconnected says that q is longer than it
    return max(
        len(edges) - start + 1 if end is None else end - start for start, end in enumerate(ends)
    )


def _end_of_connection(
    servers: int, edges: Sequence[Sequence[tuple[int, int]]], start: int
) -> int | None:
    """The first round by whose end the union of graphs since `start` is connected."""
    parent = list(range(servers))

    def root(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    parts = servers
    for t in range(start, len(edges)):
        for n, m in edges[t]:
            a, b = root(n), root(m)
            if a != b:
                parent[a] = b
                parts -= 1
        if parts == 1:
            return t + 1
    return None


def cut_off(servers: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The connected parts of a graph, largest first: more than one means that some servers never
    hear of others.
    """
    neighbours: dict[int, set[int]] = {n: set() for n in range(servers)}
    for n, m in edges:
        neighbours[n].add(m)
        neighbours[m].add(n)
    parts: list[list[int]] = []
    left = set(range(servers))
    while left:
        seen, todo = set[int](), [min(left)]
        while todo:
            n = todo.pop()
            if n not in seen:
                seen.add(n)
                todo.extend(neighbours[n] - seen)
        parts.append(sorted(seen))
        left -= seen
    return sorted(parts, key=lambda part: (-len(part), part))
