"""The clouds a user can choose, as plain values; each knows how to make its coordinator."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedbcd.addressed import LINKS, unit_one
from fedbcd.config import SUCH_AS, convert, fit, settings
from fedbcd.errors import ConfigError
from fedbcd.protocol.coordinator import (
    AsyncCoordinator,
    Coordinator,
    RigorousCoordinator,
    SyncCoordinator,
)

Weights = tuple[tuple[float, ...], ...]  # a_nm: a row for each server of a mix
Link = tuple[int, int]  # two servers


class _PlainMean:
    """Clouds that mix by the mean."""

    __slots__ = ()

    def weights(self, round_: int, servers: Sequence[int]) -> Weights | None:  # noqa: ARG002
        """a_nm for the servers of a mix; None: 1 / how many they are."""
        return None


@dataclass(frozen=True, slots=True)
class SyncCloud(_PlainMean):
    """All servers wait for all: one global model, updated when the last server has reported."""

    name: ClassVar[str] = "sync"
    sync: ClassVar[bool] = True

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        return SyncCoordinator(range(servers), iterations)


@settings
@dataclass(frozen=True, slots=True)
class AsyncCloud(_PlainMean):
    """The first B = `first` servers to finish are mixed; the others go on undisturbed."""

    first: int = 2
    name: ClassVar[str] = "async"
    sync: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fit(self)

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        _check_first(self.first, servers)
        return AsyncCoordinator(range(servers), self.first, iterations)


@settings
@dataclass(frozen=True, slots=True)
class RigorousCloud(_PlainMean):
    """Appendix A: numbered rounds; the first B = `first` are mixed, the others finish their phase
    and step alone.
    """

    first: int = 2
    name: ClassVar[str] = "rigorous"
    sync: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fit(self)

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        _check_first(self.first, servers)
        return RigorousCoordinator(range(servers), self.first, iterations)


@settings
@dataclass(frozen=True, slots=True)
class GraphCloud:
    """Eq. (6) with your own mixing coefficients a_nm: all servers exchange along a graph. Rows and
    columns sum to one.

    `mixing` is one matrix, or several that are used in turn (a_nm may vary with the round,
    Assumption 3).
    """

    mixing: tuple[Weights, ...] = field(metadata={SUCH_AS: "[[0.5, 0.5], [0.5, 0.5]]"})
    name: ClassVar[str] = "graph"
    sync: ClassVar[bool] = False

    def __init__(
        self, mixing: Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
    ) -> None:
        object.__setattr__(self, "mixing", convert(_several(mixing), tuple[Weights, ...], "mixing"))

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        for matrix in self.mixing:
            widths = [len(row) for row in matrix]
            if widths != [servers] * servers:
                raise ConfigError(
                    f"mixing has rows of {widths} numbers; {servers} servers need {servers} rows of"
                    f" {servers} numbers"
                )
        return AsyncCoordinator(range(servers), servers, iterations, alike=False)

    def weights(self, round_: int, servers: Sequence[int]) -> Weights:
        matrix = self.mixing[round_ % len(self.mixing)]
        return tuple(tuple(matrix[n][k] for k in servers) for n in servers)


@settings
@dataclass(frozen=True, slots=True)
class DynamicGraph:
    """Eq. (6) on a graph that changes: of the first B = `first` servers to finish, those that have
    a link mix along it; the others go on undisturbed, as on the Async-cloud.

    edges         the links, pairs of servers; or several lists of them, used in turn by the rounds
    link_failure  the probability with which a link fails in a round, each by a draw of its own

    a_nm = 1 / (1 + max(d_n, d_m)) along the links of this mix, where server n has d_n of them, and
    a_nn is what is left (Metropolis): doubly stochastic, whoever is there.
    """

    edges: tuple[tuple[Link, ...], ...] = field(metadata={SUCH_AS: "[[0, 1], [1, 2]]"})
    first: int
    link_failure: float = 0.0
    seed: int = 0  # of the links that fail
    name: ClassVar[str] = "dynamic-graph"
    sync: ClassVar[bool] = False

    def __init__(
        self,
        edges: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]],
        first: int,
        link_failure: float = 0.0,
        seed: int = 0,
    ) -> None:
        lists = convert(_several(edges), tuple[tuple[tuple[int, ...], ...], ...], "edges")
        for link in (link for links in lists for link in links):
            if len(link) != 2 or link[0] == link[1]:
                raise ConfigError(f"edges has {list(link)}; a link is two servers, such as [0, 1]")
        pairs = tuple(tuple((min(link), max(link)) for link in links) for links in lists)
        given = {"edges": pairs, "first": first, "link_failure": link_failure, "seed": seed}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        fit(self)
        if not 0 <= link_failure < 1:
            raise ConfigError(
                f"link_failure={link_failure} must be 0 or more and below 1, a probability; links"
                " that always fail are left out of edges"
            )

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        for n in sorted({n for links in self.edges for link in links for n in link}):
            if not 0 <= n < servers:
                raise ConfigError(f"edges names server {n}; there are servers 0 to {servers - 1}")
        _check_first(self.first, servers, f"first={servers}")
        return AsyncCoordinator(range(servers), self.first, iterations, alike=False)

    def weights(self, round_: int, servers: Sequence[int]) -> Weights:
        here = {*servers}
        links = {
            link
            for link in self.edges[round_ % len(self.edges)]
            if here.issuperset(link)
            and unit_one(self.seed, LINKS, round_, *link) >= self.link_failure
        }
        degree = Counter(n for link in links for n in link)
        a = {link: 1 / (1 + max(degree[n] for n in link)) for link in links}
        a |= {(m, n): a[n, m] for n, m in links}
        a |= {(n, n): 1 - sum(a.get((n, m), 0.0) for m in servers) for n in servers}
        return tuple(tuple(a.get((n, m), 0.0) for m in servers) for n in servers)


Cloud = SyncCloud | AsyncCloud | RigorousCloud | GraphCloud | DynamicGraph
CLOUDS: dict[str, type[Cloud]] = {
    kind.name: kind for kind in (SyncCloud, AsyncCloud, RigorousCloud, GraphCloud, DynamicGraph)
}


def _several(tables: Any) -> Any:
    """A list of tables, where one is given as well."""
    plain = tables.tolist() if hasattr(tables, "tolist") else tables
    try:
        first = plain[0][0]
        several = isinstance(first, list | tuple) or len(getattr(first, "shape", ())) > 0
        return plain if several else [plain]
    except (IndexError, KeyError, TypeError):  # `convert` says what it is
        return [plain]


def _check_first(first: int, servers: int, for_all: str = "SyncCloud()") -> None:
    if not 1 <= first <= servers:
        raise ConfigError(
            f"first={first} must be between 1 and the {servers} servers; to wait for all, use"
            f" {for_all}"
        )
